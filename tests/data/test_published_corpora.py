"""C4, DCLM and FineWeb as they are published, from small files in the same formats."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from sparse_lm.config import parse
from sparse_lm.data import tfds_corpus
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.opening import open_data
from sparse_lm.errors import DataError
from sparse_lm.prepare_data import prepare_files
from tests.command_lines import ROOT, run_each
from tests.data import examples
from tests.data.examples import make_documents, make_tokenizer, write_c4, write_tfds

COMMANDS = re.findall(r"^python -m sparse_lm\.(\w+) (.*)$", (ROOT / "docs/data.md").read_text(), re.MULTILINE)
TRAIN = [*make_documents(400), "The year 2024: it's\r\n  <|end_of_text|> naïve 漢字"]
VALIDATION = make_documents(20, seed=1)
C4_FEATURES = {name: tfds.features.Text() for name in ("content-length", "content-type", "text", "timestamp", "url")}
C4_ROWS = [[dict.fromkeys(C4_FEATURES, "x") | {"text": text} for text in part] for part in (TRAIN, VALIDATION)]


def write_everything(folder: Path) -> None:
    shard = folder / "dclm/global-shard_03_of_10/local-shard_1_of_10/shard_00000000_processed.jsonl.zst"
    parquet = folder / "fineweb/data/CC-MAIN-2024-10/000_00000.parquet"
    for path in (shard, parquet, folder / "corpus/deep/a.txt", folder / "c4/en/x", folder / "llama3/x"):
        path.parent.mkdir(parents=True)
    (folder / "corpus/deep/a.txt").write_text("".join(TRAIN), newline="")
    write_c4(folder / "c4/en/c4-train.00000-of-01024.json.gz", TRAIN[:30])
    write_c4(folder / "c4/en/c4-train.00001-of-01024.json.gz", TRAIN[30:])
    write_c4(folder / "c4/en/c4-validation.00000-of-00008.json.gz", VALIDATION)
    examples.make_llama3_tokenizer().save(str(folder / "llama3/tokenizer.json"))
    examples.write_dclm(shard, TRAIN)
    pyarrow.parquet.write_table(pyarrow.table({"text": TRAIN, "id": ["x"] * len(TRAIN)}), parquet)
    made = write_tfds(folder / "made", C4_FEATURES, train=C4_ROWS[0], validation=C4_ROWS[1])
    (folder / "tensorflow_datasets/c4/en").mkdir(parents=True)
    made.rename(folder / "tensorflow_datasets/c4/en/3.1.0")


@pytest.mark.long
def test_the_commands_of_the_page_prepare_every_document(tmp_path, tmp_path_factory, monkeypatch):
    write_everything(tmp_path)
    prepared = [shlex.split(arguments) for name, arguments in COMMANDS if name == "prepare_data"]
    assert len(prepared) >= 5
    results = run_each("sparse_lm.prepare_data", prepared, tmp_path_factory.mktemp("outputs"), cwd=tmp_path)
    for arguments, result in zip(prepared, results, strict=True):
        assert result.returncode == 0, result.stderr
        (output,) = (flag.removeprefix("--output=") for flag in arguments if flag.startswith("--output="))
        assert result.stdout.startswith(str(Path(output)))
        data = open_prepared(tmp_path / output)
        tokenizer = make_tokenizer().from_file(str(data.tokenizer_path))
        found = {}
        for name, counts in data.info["splits"].items():
            stream = examples.targets_of(getattr(data, name))[: counts["tokens"]]
            ends = np.flatnonzero(stream == data.info["end_of_text"]) + 1
            texts = [part[:-1].tolist() for part in np.split(stream, ends)[:-1]]
            found[name] = [tokenizer.decode(text, skip_special_tokens=False) for text in texts]
            assert counts["bytes"] == sum(len(text.encode()) for text in found[name])
            assert counts["documents"] == len(found[name])
        if output in ("data/c4", "data/c4_tfds"):
            assert found == {"train": TRAIN, "heldout": VALIDATION}
        elif output == "data/corpus":  # one text, in pieces
            assert sorted("".join(found["train"] + found["heldout"])) == sorted("".join(TRAIN))
        else:
            assert sorted(found["train"] + found["heldout"]) == sorted(TRAIN)
        stored = tfds.builder_from_directory(tmp_path / output).as_data_source("train")[0]["tokens"]
        assert stored.dtype == (np.uint16 if output == "data/corpus" else np.uint32)  # Llama 3's ids take more
    monkeypatch.chdir(tmp_path)
    for name, arguments in COMMANDS:
        if name != "prepare_data":
            assert name == "train"
            flags = dict(flag[2:].split("=", 1) for flag in shlex.split(arguments))
            config = runpy.run_path(str(ROOT / flags.pop("config")))["get_config"]()
            config.data.path = flags.pop("config.data.path")
            config.model.document_separator = int(flags.pop("config.model.document_separator", -1))
            data = open_data(parse(config))
            assert len(data.train) and len(data.heldout) and flags.keys() <= {"workdir"}


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_tfds_directory_of_c4_whose_empty_documents_are_left_out(tmp_path, file_format):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    empty = C4_ROWS[0][0] | {"text": ""}
    splits = {"train": [empty, *C4_ROWS[0], empty], "test": C4_ROWS[0], "validation": C4_ROWS[1]}
    directory = write_tfds(tmp_path, C4_FEATURES, shards=4, **splits)
    if file_format == "tfrecord":
        examples.as_tfrecords(directory)
    tokenizer = str(tmp_path / "tokenizer.json")
    data = prepare_files([], tmp_path / "out", tfds=str(directory), tokenizer=tokenizer, seq_len=32)
    for windows, documents in ((data.train, TRAIN), (data.heldout, VALIDATION)):
        stream = examples.stream_of(documents, make_tokenizer())
        np.testing.assert_array_equal(examples.targets_of(windows)[: len(stream)], stream)
    assert "tensorflow" not in sys.modules


def test_a_tfrecord_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path):
    directory = write_tfds(tmp_path, {"text": tfds.features.Text()}, shards=2, train=[{"text": "x" * 9}] * 4)
    examples.as_tfrecords(directory)
    train, _ = tfds_corpus.open_splits(directory)
    shard = sorted(directory.glob("*tfrecord*"))[1]
    whole = shard.read_bytes()
    far = (2**62).to_bytes(8, "little")  # a length that no file has
    damaged = {whole[:size]: "is cut off or damaged: [01] of its 2 records are whole" for size in range(len(whole))}
    damaged[far + whole[8:]] = "is cut off or damaged: 0 of its 2"
    damaged[whole * 2] = f"is damaged: {len(whole)} bytes follow"
    for content, message in damaged.items():
        shard.write_bytes(content)
        with pytest.raises(DataError, match=rf"{shard.name}: it {message}"):
            list(train)


def test_other_features_than_text_are_refused(tmp_path):
    tokens = tfds.features.Tensor(shape=(None,), dtype=np.int64)
    for name, feature, row, message in (
        ("tokens", tokens, np.arange(4), "has no feature 'text', a string a record, but tokens"),
        ("text", tokens, np.arange(4), r"the feature 'text' must be a string a record, not int64 \[None\]"),
        ("text", np.int32, 1, r"the feature 'text' must be a string a record, not int32 \[\]"),
        ("text", tfds.features.Sequence(tfds.features.Text()), ["a", "b"], r"a string a record, not object \[None\]"),
    ):
        directory = write_tfds(tmp_path / "others", {name: feature}, train=[{name: row}])
        with pytest.raises(DataError, match=message):
            tfds_corpus.open_splits(directory)
        shutil.rmtree(directory)


def test_a_file_is_not_both_read_and_held_out_however_its_path_is_spelled(tmp_path, monkeypatch):
    write_c4(tmp_path / "train.json.gz", TRAIN)
    write_c4(tmp_path / "val.json.gz", VALIDATION)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "b.json.gz").symlink_to(tmp_path / "val.json.gz")
    monkeypatch.chdir(tmp_path)
    for heldout in (f"{tmp_path}/val.json.gz", "link/../val.json.gz", "link/*"):
        with pytest.raises(DataError, match=r"(val|b)\.json\.gz is among --files and among --heldout_files"):
            prepare_files(["*.gz"], tmp_path / "out", heldout_files=[heldout], seq_len=8)
