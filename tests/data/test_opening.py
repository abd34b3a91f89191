import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.config import Config, ConfigError, DataConfig, ModelConfig
from sparse_lm.data import (
    DataError,
    builder,
    corpus,
    dataset,
    open_data,
    opening,
    train_batches,
)
from sparse_lm.data.holdout import hold_out
from tests.data.examples import (
    Documents,
    damage_records,
    make_documents,
    make_tokenizer,
    stream_of,
    targets_of,
)

SEQ_LEN = 32
TOKENIZER = make_tokenizer()
DOCUMENTS = Documents(make_documents(120))


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    """A run on a small stand-in for the embedded corpus."""
    monkeypatch.setattr(opening, "python_library", lambda: DOCUMENTS)
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    return Config(seq_len=SEQ_LEN, model=ModelConfig(vocab_size=500), data=data)


@pytest.fixture
def tokenizer_path(tmp_path) -> str:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def with_data(config: Config, **kwargs) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **kwargs))


def with_vocab(config: Config, size: int) -> Config:
    return dataclasses.replace(config, model=ModelConfig(vocab_size=size))


def all_windows(windows) -> np.ndarray:
    return windows.read(np.arange(len(windows)))


def stamp(directory: Path) -> int:
    return (directory / "metadata.json").stat().st_mtime_ns


class TestEmbeddedCorpus:
    def test_it_is_prepared_once(self, config):
        first = open_data(config)
        before = stamp(first.directory)
        second = open_data(config)
        assert second.directory == first.directory
        assert stamp(second.directory) == before
        assert first.info["corpus_sha256"] == hold_out(DOCUMENTS).sha256
        assert first.vocab_size <= 500
        stream = stream_of(list(hold_out(DOCUMENTS).train), TOKENIZER.from_file(str(first.tokenizer_path)))
        np.testing.assert_array_equal(targets_of(all_windows(first.train))[: len(stream)], stream)

    def test_other_text_vocabulary_or_length_is_prepared_apart(self, config, monkeypatch, tokenizer_path):
        variants = [
            config,
            with_vocab(config, 300),
            dataclasses.replace(config, seq_len=16),
            with_data(config, tokenizer=tokenizer_path),
        ]
        opened = [open_data(variant) for variant in variants]
        monkeypatch.setattr(opening, "python_library", lambda: Documents(make_documents(60)))
        opened.append(open_data(config))
        assert len({data.directory for data in opened}) == 5
        assert [data.seq_len for data in opened] == [32, 32, 16, 32, 32]
        assert opened[1].vocab_size <= 300
        assert opened[3].vocab_size == TOKENIZER.get_vocab_size()

    @pytest.mark.parametrize("damage", ["cut shard", "other tokenizer", "no metadata"])
    def test_a_damaged_cache_is_rebuilt(self, config, damage):
        data = open_data(config)
        expected = all_windows(data.train)
        shard = next(data.directory.glob("*train*"))
        if damage == "cut shard":
            os.truncate(shard, shard.stat().st_size // 2)
        elif damage == "other tokenizer":
            TOKENIZER.save(str(data.tokenizer_path))
        else:
            (data.directory / "metadata.json").write_text("{")
        np.testing.assert_array_equal(all_windows(open_data(config).train), expected)

    def test_the_real_library_is_prepared(self, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus, "LIBRARY_FILE_LIMIT", 8 * 2**10)  # the small files, to be quick
        data = open_data(with_vocab(Config(data=DataConfig(cache_dir=str(tmp_path))), 512))
        assert len(data.train) > 500
        batch = next(train_batches(data, batch_size=4, seed=0))
        assert batch.shape == (4, 257)
        assert 0 <= batch.min() <= batch.max() < 512

    def test_small_vocabularies_are_refused(self, config, tokenizer_path):
        with pytest.raises(ConfigError, match=r"config\.model\.vocab_size = 256: must be at least 257"):
            open_data(with_vocab(config, 256))
        size = TOKENIZER.get_vocab_size()
        with pytest.raises(ConfigError, match=rf"config\.model\.vocab_size = {size - 1}: must be at least {size}"):
            open_data(with_data(with_vocab(config, size - 1), tokenizer=tokenizer_path))

    def test_a_missing_tokenizer_and_an_unwritable_cache_are_refused(self, config, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.data\.tokenizer = 'no\.json': no tokenizer file"):
            open_data(with_data(config, tokenizer="no.json"))
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"config\.data\.cache_dir = '.*/file': must be writable"):
            open_data(with_data(config, cache_dir=str(tmp_path / "file")))


class TestPreparedWindows:
    @pytest.fixture
    def path(self, tmp_path) -> str:
        directory = tmp_path / "prepared"
        builder.prepare(directory, DOCUMENTS, seq_len=SEQ_LEN, tokenizer=TOKENIZER)
        return str(directory)

    def test_they_are_read_where_they_are(self, config, path, tokenizer_path):
        for tokenizer in ("", tokenizer_path):
            data = open_data(with_data(config, path=path, tokenizer=tokenizer))
            assert data.directory == Path(path)
        assert not Path(config.data.cache_dir).exists()

    def test_what_does_not_go_with_the_data_is_refused_by_its_key(self, config, path, tmp_path):
        other = str(tmp_path / "other.json")
        make_tokenizer(300).save(other)
        end = TOKENIZER.token_to_id("<|endoftext|>")
        model = dataclasses.replace(config.model, document_separator=9)
        prepared = with_data(config, path=path)
        for refused, message in (
            (dataclasses.replace(prepared, seq_len=64), rf"config\.seq_len = 64: must be {SEQ_LEN}, with which"),
            (with_vocab(prepared, 300), r"config\.model\.vocab_size = 300: must be at least"),
            (
                dataclasses.replace(prepared, model=model),
                rf"separator = 9: must be {end}, the end of text of",
            ),
            (with_data(prepared, tokenizer=other), r"config\.data\.tokenizer = '.*': must be empty or the one of the"),
        ):
            with pytest.raises(ConfigError, match=message):
                open_data(refused)
        model = dataclasses.replace(config.model, document_separator=end)
        assert (open_data(dataclasses.replace(prepared, model=model)).train[0] == end).any()

    def test_several_are_mixed_by_weight(self, config, path, tmp_path):
        builder.prepare(tmp_path / "b", Documents(make_documents(60, seed=5)), seq_len=SEQ_LEN, tokenizer=TOKENIZER)
        data = open_data(with_data(config, path=f"{path}:0.6, {tmp_path}/b:.2"))
        parts = [open_data(with_data(config, path=part)) for part in (path, str(tmp_path / "b"))]
        assert len(data.train) == sum(len(part.train) for part in parts)
        assert data.describe() == "\n".join(
            f"{share} of training from {part.describe()}" for share, part in zip(("75.0%", "25.0%"), parts, strict=True)
        )
        batch = next(train_batches(data, batch_size=40, seed=0))
        first = {window.tobytes() for window in all_windows(parts[0].train)}
        assert sum(window.tobytes() in first for window in batch) == 30

    def test_mixtures_of_what_does_not_go_together_are_refused(self, config, path, tmp_path):
        builder.prepare(tmp_path / "other", DOCUMENTS, seq_len=SEQ_LEN, tokenizer=make_tokenizer(300))
        with pytest.raises(ConfigError, match=r"data\.path = .*/other has another tokenizer than .*/prepared: prepare"):
            open_data(with_data(config, path=f"{path}:1,{tmp_path}/other:1"))
        builder.prepare(tmp_path / "short", DOCUMENTS, seq_len=8, tokenizer=TOKENIZER)
        with pytest.raises(ConfigError, match=r"config\.seq_len = 32: must be 8, with which .*/short"):
            open_data(with_data(config, path=f"{path}:1,{tmp_path}/short:1"))
        with pytest.raises(ConfigError, match=r"data\.path = '.*': .*/none does not exist"):
            open_data(with_data(config, path=f"{path}:1,{tmp_path}/none:1"))
        for weights in (f"{path},{path}", f"{path}:1,", f"{path}:0,{path}x:1", f"{path}:1,{path}:1"):
            with pytest.raises(ConfigError, match=r"must be a directory, or several .* with weights above 0"):
                open_data(with_data(config, path=weights))

    def test_those_of_another_version_are_refused(self, config, path):
        metadata = Path(path, "metadata.json")
        metadata.write_text(metadata.read_text().replace(dataset.FORMAT, f"{dataset.WINDOWS} 1"))
        with pytest.raises(DataError, match=r"has format 'sparse_lm windows 1', not '.* 2': prepare"):
            open_data(with_data(config, path=path))

    def test_what_is_no_prepared_data_is_refused(self, config, tmp_path):
        (tmp_path / "other").mkdir()
        with pytest.raises(ConfigError, match=r"config\.data\.path = '.*/other': .* is not prepared data: make it"):
            open_data(with_data(config, path=str(tmp_path / "other")))

    def test_damage_is_reported_not_repaired(self, config, path):
        shard = next(Path(path).glob("*train*"))
        os.truncate(shard, shard.stat().st_size // 2)
        with pytest.raises(DataError, match="prepared is damaged: "):
            open_data(with_data(config, path=path))

    def test_damage_that_is_met_later_is_told(self, config, path):
        damage_records(next(Path(path).glob("*train*")))
        data = open_data(with_data(config, path=path))
        with pytest.raises(DataError, match=f"^cannot read {path}: Corrupted "):
            next(train_batches(data, batch_size=len(data.train), seed=0))
