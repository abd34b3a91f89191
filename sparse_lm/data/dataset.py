"""Reads prepared data for training: windows by index, and what is known about them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from google.protobuf.message import DecodeError

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.errors import DataError

WINDOWS = "sparse_lm windows"  # the format of all that this library prepares begins so
FORMAT = f"{WINDOWS} 2"  # changes whenever what was prepared before would be read wrongly, or differently
TOKENIZER_FILE = "tokenizer.json"


class Windows:
    """Gives random access to one split: int32 windows [seq_len + 1], of which w[:-1] is input and w[1:] target."""

    def __init__(self, source: Sequence[dict[str, np.ndarray]], directory: Path):
        self._source, self._directory = source, directory

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(np.array([index]))[0]

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the windows at `indices` [n] as int32 [n, seq_len + 1], much faster than one by one.

        Raises DataError if a file is damaged, or cannot be read.
        """
        try:
            records = self._source.__getitems__(indices.tolist())
        except (OSError, RuntimeError, DecodeError) as error:  # the last two: damaged ArrayRecord files, records
            raise DataError(f"cannot read {self._directory}: {error}") from error
        return np.stack([record["tokens"] for record in records]).astype(np.int32)


class JoinedWindows(Windows):
    """Joins windows of several splits, one after the other, with so many of each, spread evenly over it."""

    def __init__(self, parts: Sequence[Windows], counts: Sequence[int]):
        self._parts, self._counts = parts, counts
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        which = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(which, kind="stable")
        read = []
        for number in np.unique(which):
            part, count = self._parts[number], self._counts[number]
            within = indices[which == number] - (self._ends[number] - count)
            read.append(part.read(within * len(part) // count))
        return np.concatenate(read)[np.argsort(order)]


@dataclasses.dataclass(frozen=True)
class Data:
    """Holds an opened dataset.

    `info` is the metadata of the preparation: corpus_sha256, tokenizer_sha256, and per split the numbers of documents,
    tokens and bytes, among others. `shares` are the parts of a mixture, each with its share in training windows.
    """

    directory: Path
    tokenizer_path: Path
    vocab_size: int  # one more than the largest token id
    seq_len: int  # targets of a window
    train: Windows
    heldout: Windows  # of documents that are not in `train` of the same corpus
    bytes_per_token: np.ndarray  # int32[vocab_size], UTF-8 bytes that each token stands for
    info: dict[str, Any]
    shares: tuple[tuple[Data, float], ...] = ()

    def describe(self) -> str:
        """Describes the data in a line for a log, or in a line for each part of a mixture."""
        if self.shares:
            return "\n".join(f"{share:.1%} of training from {part.describe()}" for part, share in self.shares)
        splits = self.info["splits"].values()
        documents, tokens, size = (sum(split[key] for split in splits) for key in ("documents", "tokens", "bytes"))
        return (
            f"{self.directory}: {documents:,} documents, {tokens:,} tokens of {size / tokens:.2f} bytes, "
            f"{len(self.train):,} training and {len(self.heldout):,} held-out windows of {self.seq_len}, "
            f"vocabulary {self.vocab_size:,}, text sha256 {self.info['corpus_sha256'][:12]}"
        )


def is_prepared(directory: Path) -> bool:
    """Returns True if `directory` holds windows of this library, of whatever version, and no other TFDS dataset.

    Raises DataError if it cannot be read.
    """
    return bool(_read_metadata(directory))


def open_prepared(directory: Path) -> Data:
    """Opens what `builder.prepare` wrote.

    Raises:
      DataError: the directory is not there, not complete, damaged, of another version's format, or cannot be read.
    """
    metadata = _read_metadata(directory)
    if not metadata:
        raise DataError(f"{directory} {'is not prepared data' if directory.exists() else 'does not exist'}")
    if metadata["format"] != FORMAT:
        raise DataError(f"{directory} has format {metadata['format']!r}, not {FORMAT!r}: prepare its text again")
    tokenizer = tokenizer_lib.load_tokenizer(directory / TOKENIZER_FILE)
    if tokenizer_lib.fingerprint(tokenizer) != metadata["tokenizer_sha256"]:
        raise DataError(f"{directory / TOKENIZER_FILE} is not the tokenizer that the data was prepared with")
    return Data(
        directory=directory,
        tokenizer_path=directory / TOKENIZER_FILE,
        vocab_size=metadata["vocab_size"],
        seq_len=metadata["seq_len"],
        train=_open_windows(directory, "train"),
        heldout=_open_windows(directory, "heldout"),
        bytes_per_token=tokenizer_lib.bytes_per_token(tokenizer),
        info=metadata,
    )


def mix(name: str, parts: Sequence[Data], weights: Sequence[float]) -> Data:
    """Mixes datasets of one tokenizer and one length, `weights` being in proportion to the training windows of each.

    Of the held-out windows so many are taken that the shares of the parts are the same as in training.
    """
    shares = [weight / sum(weights) for weight in weights]
    fullest = min(len(part.heldout) / share for part, share in zip(parts, shares, strict=True))
    heldout = [max(1, int(fullest * share * (1 + 1e-12))) for share in shares]  # 3 / 0.7 * 0.7 is below 3
    content = [[part.info["corpus_sha256"], share] for part, share in zip(parts, shares, strict=True)]
    splits = {
        name: {key: sum(part.info["splits"][name][key] for part in parts) for key in counts}
        for name, counts in parts[0].info["splits"].items()
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return dataclasses.replace(
        parts[0],
        directory=Path(name),
        train=JoinedWindows([part.train for part in parts], [len(part.train) for part in parts]),
        heldout=JoinedWindows([part.heldout for part in parts], heldout),
        info=parts[0].info | {"corpus_sha256": digest, "splits": splits},
        shares=tuple(zip(parts, shares, strict=True)),
    )


def _read_metadata(directory: Path) -> dict[str, Any]:
    """Reads how `directory` was prepared; an empty dict if it is not a prepared directory.

    Raises DataError if it cannot be read.
    """
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        return metadata if metadata["format"].startswith(WINDOWS) else {}
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    except OSError as error:
        raise DataError(f"{directory} cannot be read: {error}") from error


def _open_windows(directory: Path, split: str) -> Windows:
    """Opens a split and reads the end of every file: a file that is cut off has no readable end."""
    try:
        builder = tfds.builder_from_directory(directory)
        source = builder.as_data_source(split)
        for end in itertools.accumulate(builder.info.splits[split].shard_lengths):
            source[end - 1]
    except Exception as error:  # anything from a missing file to malformed JSON, in the words of several libraries
        raise DataError(f"{directory} is damaged or cannot be read: {error}") from error
    return Windows(source, directory)
