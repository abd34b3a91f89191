"""Prepared data: a TFDS dataset of packed windows, in ArrayRecord files, beside its tokenizer.

A prepared directory is an ordinary TFDS directory (`tfds.builder_from_directory` reads it) with
splits `train` and `heldout` of one feature, `tokens` [seq_len + 1], plus tokenizer.json. Its
metadata.json records how it was made. TensorFlow is not needed to write or to read it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from tokenizers import Tokenizer

from sparse_lm.data import packing
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, python_library
from sparse_lm.data.holdout import Split, hold_out

logger = logging.getLogger(__name__)

FORMAT = "sparse_lm windows 1"  # changes whenever the same text would be prepared differently
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most
SHARD_BYTES = 256 * 2**20
WRITE_ROWS = 4096  # windows handed to the writer at one time
REPORT_SECONDS = 10


class PackedText(tfds.core.GeneratorBasedBuilder):
    """Windows of seq_len + 1 tokens; without arguments, of the Python standard library."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. Were this left to TFDS, it would look for a list of checksums, and import
    # importlib_resources to do so, which it does not declare as a requirement.
    url_infos: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        *,
        split: Split | None = None,
        tokenizer: Tokenizer | None = None,
        seq_len: int = 256,
        vocab_size: int = 4096,
        source: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        """Nothing is written before `download_and_prepare`.

        Args:
          split: training and held-out documents; None for the Python standard library.
          tokenizer: None to train one with `vocab_size` entries on the training documents.
          seq_len: targets of a window.
          vocab_size: of a tokenizer to be trained.
          source: what the data is made from, recorded in the metadata for a cache to recognise.
          **kwargs: of `tfds.core.GeneratorBasedBuilder`, such as `data_dir`.
        """
        self._split = split or hold_out(python_library())
        self._tokenizer = tokenizer or tokenizer_lib.train_tokenizer(self._split.sample(TOKENIZER_SAMPLE), vocab_size)
        self._seq_len = seq_len
        self._source = source or {}
        self._vocab_size = tokenizer_lib.vocabulary_size(self._tokenizer)
        self._dtype = tokenizer_lib.token_dtype(self._vocab_size)
        self._end_of_text = tokenizer_lib.end_of_text(self._tokenizer)
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        tokens = tfds.features.Tensor(shape=(self._seq_len + 1,), dtype=self._dtype, encoding="bytes")
        metadata = {
            "format": FORMAT,
            "source": self._source,
            "corpus_sha256": self._split.sha256,
            "tokenizer_sha256": tokenizer_lib.fingerprint(self._tokenizer),
            "vocab_size": self._vocab_size,
            "end_of_text": self._end_of_text,
            "seq_len": self._seq_len,
            "splits": {},
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Documents joined by an end-of-text token, cut into windows that overlap by one token.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(metadata),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, np.ndarray]]]]:
        del dl_manager  # nothing to download
        return {
            "train": self._generate_examples("train", self._split.train),
            "heldout": self._generate_examples("heldout", self._split.heldout),
        }

    def _generate_examples(self, name: str, corpus: Corpus) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        documents = self._counted(name, tokenizer_lib.tokenize(corpus, self._tokenizer))
        blocks = packing.pack(documents, seq_len=self._seq_len, end_of_text=self._end_of_text, dtype=self._dtype)
        yield from enumerate({"tokens": window} for block in blocks for window in block)

    def _counted(self, name: str, documents: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Passes documents on; counts them into the metadata and reports progress."""
        lengths = tokenizer_lib.bytes_per_token(self._tokenizer)
        counts = self.info.metadata["splits"][name] = {"documents": 0, "tokens": 0, "bytes": 0}
        start = reported = time.monotonic()
        for tokens in documents:
            counts["documents"] += 1
            counts["tokens"] += len(tokens) + 1  # and the end of text
            counts["bytes"] += int(lengths[tokens].sum(dtype=np.int64))
            yield tokens
            if (now := time.monotonic()) - reported > REPORT_SECONDS:
                reported = now
                millions = counts["tokens"] / 1e6
                logger.info("%s: %.1f M tokens, %.2f M tokens/s", name, millions, millions / (now - start))

    def _download_and_prepare(self, dl_manager: Any, download_config: Any) -> None:
        """Streams every split to its shards.

        TFDS's default writer sorts a split in memory first and, past 1 GB, spills through
        TensorFlow; windows need no sorting, since readers shuffle.
        """
        del download_config
        row_bytes = (self._seq_len + 1) * self._dtype.itemsize
        info = self._info()  # not self.info: that one names the final folder, to which TFDS renames this one
        writer = tfds.core.SequentialWriter(
            info, max_examples_per_shard=max(1, SHARD_BYTES // row_bytes), file_format="array_record"
        )
        splits = self._split_generators(dl_manager)
        writer.initialize_splits(list(splits))
        for name, examples in splits.items():
            while rows := [example for _, example in itertools.islice(examples, WRITE_ROWS)]:
                writer.add_examples({name: rows})
            writer.close_splits([name])
        self.info.set_splits(info.splits)
        self._tokenizer.save(str(self.data_path / TOKENIZER_FILE))


def prepare(
    directory: Path,
    split: Split,
    *,
    seq_len: int,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    source: dict[str, Any] | None = None,
) -> None:
    """Writes prepared data to `directory`, replacing what is there.

    The directory appears complete, by one rename, or not at all: a build that is killed leaves only
    a hidden folder beside it that nothing reads.

    Args:
      directory: the result.
      split, seq_len, tokenizer, vocab_size, source: as `PackedText` takes them.

    Raises:
      DataError: the text cannot be read, or does not go with the tokenizer.
      OSError: the directory cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.incomplete-", dir=directory.parent) as staging:
        builder = PackedText(
            split=split, tokenizer=tokenizer, seq_len=seq_len, vocab_size=vocab_size, source=source, data_dir=staging
        )
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download here; there is none
            builder.download_and_prepare()
        if directory.exists():
            directory.rename(Path(staging, "replaced"))
        Path(builder.data_dir).rename(directory)
