"""Small corpora, tokenizers and datasets that the data tests make for themselves."""

import gzip
import json
import struct
from collections.abc import Iterable
from itertools import chain, islice, product
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from sparse_lm.data.dataset import Windows
from sparse_lm.data.holdout import Selection, Survey, hold_out, sum_up, survey_documents
from sparse_lm.data.readers import zstd
from sparse_lm.data.tokenizer import END_OF_TEXT, train_tokenizer

WORDS = ["def", "return", "self", "None", "for", "range", "0", "1", "=", "==", ":", "(", ")", "é", "漢字", "🙂"]


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Distinct short texts."""
    rng = np.random.default_rng(seed)
    bodies = (" ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(count))
    return [f"# {number}\n{body}\n" for number, body in enumerate(bodies)]


class Documents(tuple):
    """A corpus in memory."""

    def parts(self) -> list["Documents"]:
        return [self]


def held_out(corpus: Iterable[str]) -> tuple[Selection, Selection, Survey]:
    """Holds out of a corpus that is read in one piece."""
    return hold_out(corpus, lambda read: sum_up([survey_documents(read)]))


def make_tokenizer(vocab_size: int = 400) -> Tokenizer:
    return train_tokenizer(make_documents(50, seed=1), vocab_size)


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_llama3_tokenizer() -> Tokenizer:
    """A tokenizer with Llama 3's structure, more entries than uint16 counts, and invented merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    triples = ((a + b, c) for a, b, c in product(alphabet, alphabet, alphabet))
    merges = list(islice(chain(product(alphabet, alphabet), triples), 66_000 - 256))
    entries = [*alphabet, *(left + right for left, right in merges)]
    vocabulary = {entry: token for token, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(f"{names[0]} $A", special_tokens=[(names[0], 66_000)])
    return tokenizer


def stream_of(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """What the packed windows have to spell, written out without any of the library's packing."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.array([token for text in documents for token in [*tokenizer.encode(text).ids, end]])


def targets_of(split: Windows) -> np.ndarray:
    """The stream of the targets of all windows, after checking that they join up."""
    windows = split.read(np.arange(len(split)))
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    return windows[:, 1:].ravel()


def json_lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_jsonl(path, documents: list[str], field: str = "text") -> None:
    path.write_text(json_lines({field: text} for text in documents))


def write_c4(path, documents: list[str]) -> None:
    """A shard as C4 is published, such as c4-train.00000-of-01024.json.gz."""
    others = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
    path.write_bytes(gzip.compress(json_lines({"text": text} | others for text in documents).encode(), mtime=0))


def write_dclm(path, documents: list[str]) -> None:
    """A shard as DCLM-baseline is published, such as shard_00000000_processed.jsonl.zst: two frames, with metadata."""
    metadata = {"WARC-Type": "response", "WARC-Identified-Payload-Type": None, "text": "other"}
    others = {"language_id_whole_page_fasttext": {"en": 0.94}, "metadata": metadata}
    rows = [others | {"text": text, "url": "http://example.org/?text=other"} for text in documents]
    half = len(rows) // 2
    path.write_bytes(b"".join(zstd.compress(json_lines(part).encode()) for part in (rows[:half], rows[half:])))


class Foreign(tfds.dataset_builders.AdhocBuilder):
    """A dataset as some other program may have left it, written without TensorFlow."""

    url_infos = {}  # noqa: RUF012

    def _split_generators(self, dl_manager):
        return {name: enumerate(rows) for name, rows in self._split_datasets.items()}


def damage_records(shard: Path, end: int = 3000) -> None:
    """In the bytes from 300 to `end` of an ArrayRecord file, before the last record, which is read to open it."""
    content = bytearray(shard.read_bytes())
    for start in range(300, end, 100):
        content[start : start + 30] = bytes(30)
    shard.write_bytes(content)


def write_tfds(folder, feature: dict, shards: int = 1, **splits: list[dict]) -> Path:
    """A dataset as TFDS writes it, in a directory below `folder`; the records of each split by name."""
    config = tfds.download.DownloadConfig(num_shards=shards)
    options = dict(data_dir=folder, file_format="array_record", disable_shuffling=True)
    features = tfds.features.FeaturesDict(feature)
    builder = Foreign(name="foreign", version="1.2.3", features=features, split_datasets=splits, **options)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_dir)


def as_tfrecords(directory: Path) -> None:
    """Rewrites a dataset's ArrayRecord shards as TFRecord files, TFDS's usual format, without TensorFlow."""
    builder = tfds.builder_from_directory(directory)
    for name, split in builder.info.splits.items():
        source = builder.as_data_source(name, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
        records = iter([source[index] for index in range(len(source))])
        for path, length in zip(map(Path, split.filepaths), split.shard_lengths, strict=True):
            framed = (struct.pack("<QI", len(record), 0) + record + bytes(4) for record in islice(records, length))
            path.with_name(path.name.replace("array_record", "tfrecord")).write_bytes(b"".join(framed))
            path.unlink()
    info = directory / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
