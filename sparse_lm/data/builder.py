"""Prepared data: a TFDS dataset of packed windows, in ArrayRecord files, beside its tokenizer.

A prepared directory is an ordinary TFDS directory (`tfds.builder_from_directory` reads it) with
splits `train` and `heldout` of one feature, `tokens` [seq_len + 1], plus tokenizer.json. Its
metadata.json records how it was made. TensorFlow is not needed to write or to read it.

Every stage (surveying, sampling, tokenising, writing) consists of tasks that work on their own part of
the corpus or shard of the result, so that the outcome does not depend on how many processes there are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_builder import FileReaderBuilder
from tokenizers import Tokenizer

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data import writing
from sparse_lm.data.corpus import Corpus, python_library
from sparse_lm.data.errors import DataError
from sparse_lm.data.holdout import Split, already_split, hold_out
from sparse_lm.data.sampling import train_tokenizer
from sparse_lm.data.surveying import survey
from sparse_lm.data.tasks import Workers
from sparse_lm.data.tokenising import tokenise
from sparse_lm.data.workspace import Workspace, open_workspace

_log = logging.getLogger(__name__)

WINDOWS = "sparse_lm windows"  # the format of all that this library prepares begins so
FORMAT = f"{WINDOWS} 1"  # changes whenever the same text would be prepared differently
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most
SHARD_BYTES = 256 * 2**20
METADATA_FILE = "metadata.json"


class PackedText(FileReaderBuilder):
    """Windows of seq_len + 1 tokens; without arguments, of the Python standard library."""

    name = writing.DATASET
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
        workspace: Workspace | None = None,
        **kwargs: Any,
    ):
        """Nothing is written before `download_and_prepare`.

        Args:
          split: training and held-out documents; None for the Python standard library.
          tokenizer: None to train one with `vocab_size` entries on the training documents.
          seq_len: targets of a window.
          vocab_size: of a tokenizer to be trained.
          source: what the data is made from, recorded in the metadata for a cache to recognise.
          workspace: where tokens and shards are kept until `prepare` puts all together; None to
            leave shards in `data_dir` and keep nothing.
          **kwargs: of `tfds.core.DatasetBuilder`, such as `data_dir`.
        """
        self._split = split or hold_out(python_library())
        self._tokenizer = tokenizer or tokenizer_lib.train_tokenizer(self._split.sample(TOKENIZER_SAMPLE), vocab_size)
        self._seq_len = seq_len
        self._source = source or {}
        self._workspace = workspace
        self._fingerprint = tokenizer_lib.fingerprint(self._tokenizer)
        self._vocab_size = tokenizer_lib.vocabulary_size(self._tokenizer)
        self._dtype = tokenizer_lib.token_dtype(self._vocab_size)
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        metadata = {
            "format": FORMAT,
            "source": self._source,
            "corpus_sha256": self._split.sha256,
            "tokenizer_sha256": self._fingerprint,
            "vocab_size": self._vocab_size,
            "end_of_text": tokenizer_lib.end_of_text(self._tokenizer),
            "seq_len": self._seq_len,
            "splits": {},
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Documents joined by an end-of-text token, cut into windows that overlap by one token.",
            features=writing.window_features(self._seq_len, self._dtype),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(metadata),
        )

    def _download_and_prepare(self, dl_manager: Any, download_config: Any) -> None:
        """Streams every part to its shards.

        TFDS's default writer sorts a split in memory first and, past 1 GB, spills through
        TensorFlow; windows need no sorting, since readers shuffle.
        """
        del dl_manager, download_config  # nothing to download
        if self._workspace:
            self._write(self._workspace, self.shard_folder(self._workspace))
        else:
            with open_workspace(Path(self.data_path), Workers(1)) as workspace:
                self._write(workspace, Path(self.data_path))
        self._tokenizer.save(str(self.data_path / TOKENIZER_FILE))

    def shard_folder(self, workspace: Workspace) -> Path:
        """Where shards are until they are complete."""
        deciding = (FORMAT, self._split.sha256, self._fingerprint, self._seq_len, SHARD_BYTES)
        return workspace.path("windows", *deciding).with_suffix("")

    def _write(self, workspace: Workspace, shard_folder: Path) -> None:
        parts = tokenise(self._split, self._tokenizer, self._fingerprint, workspace)
        row_bytes = (self._seq_len + 1) * self._dtype.itemsize
        shards = writing.write(
            parts,
            shard_folder,
            seq_len=self._seq_len,
            dtype=self._dtype,
            shard_windows=max(1, SHARD_BYTES // row_bytes),
            workspace=workspace,
        )
        self.info.metadata["splits"] = {name: part.counts for name, part in parts.items()}
        self.info.set_splits(tfds.core.splits.SplitDict([self._split_info(*item) for item in shards.items()]))

    def _split_info(self, name: str, shards: list[dict[str, Any]]) -> tfds.core.SplitInfo:
        template = tfds.core.ShardedFileTemplate(
            data_dir=self.data_path,
            dataset_name=writing.DATASET,
            split=name,
            filetype_suffix="array_record",
            template=writing.SHARD_TEMPLATE,
        )
        return tfds.core.SplitInfo(
            name=name,
            shard_lengths=[shard["windows"] for shard in shards],
            num_bytes=sum(shard["bytes"] for shard in shards),
            filename_template=template,
        )


def prepare(
    directory: Path,
    corpus: Corpus,
    *,
    seq_len: int,
    heldout: Corpus | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    source: dict[str, Any] | None = None,
    processes: int = 1,
    keep: Callable[[Path], bool] | None = None,
) -> None:
    """Writes prepared data to `directory`, or to what it leads to if it is a link, replacing what is there.

    The directory appears complete, by one rename, or not at all. Until then everything is in a hidden
    folder beside it, which nothing reads but the next run of the same preparation: that one goes on
    from there, after an error or a kill, and ends with the same bytes.

    Args:
      directory: the result.
      corpus: documents to train on, and to hold some out of unless `heldout` is given.
      seq_len: targets of a window.
      heldout: documents to evaluate on.
      tokenizer: None to train one with `vocab_size` entries on the training documents.
      vocab_size: of a tokenizer to be trained.
      source: what the data is made from, recorded in the metadata for a cache to recognise.
      processes: to use at most; the result does not depend on it.
      keep: whether what is in a directory is whole, asked when no other process prepares it. If so, it is left
        if it is of the same `source`, or else of the same text, tokenizer and length, which reading the text tells.

    Raises:
      DataError: the text cannot be read, or does not go with the tokenizer, or `directory` cannot be replaced.
      OSError: the directory cannot be written.
    """
    directory = replaceable(directory)
    # One part is read by this process, and tokenised by as many threads as there are cores.
    used = min(processes, len(corpus.parts()))
    with open_workspace(directory, Workers(used, threads=processes // used)) as workspace:
        whole = keep is not None and keep(directory)
        if whole and source and read_metadata(directory).get("source") == source:
            return  # another process has just prepared the same
        read = functools.partial(survey, workspace=workspace)
        split = hold_out(corpus, read) if heldout is None else already_split(corpus, heldout, read)
        metadata = workspace.folder / "tfds"
        shutil.rmtree(metadata, ignore_errors=True)  # of a run that was killed when it had it: TFDS would read it
        builder = PackedText(
            split=split,
            tokenizer=tokenizer or train_tokenizer(split, vocab_size, TOKENIZER_SAMPLE, workspace),
            seq_len=seq_len,
            source=source,
            workspace=workspace,
            data_dir=metadata,
        )
        made_of = {name: value for name, value in builder.info.metadata.items() if name != "splits"}
        if whole and made_of.items() <= read_metadata(directory).items():
            _log.info("%s is already prepared from the same text, with the same tokenizer", directory)
            return
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download here; there is none
            builder.download_and_prepare()
        complete = builder.shard_folder(workspace)
        for file in Path(builder.data_dir).iterdir():
            file.rename(complete / file.name)
        if directory.exists():
            replaced = workspace.folder / "replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            directory.rename(replaced)
        complete.rename(directory)


def replaceable(directory: Path) -> Path:
    """The directory without links, to which a rename can move another.

    Raises:
      DataError: it is a mount point, or the current directory, which whoever works in it would lose.
    """
    directory = Path(os.path.realpath(directory))  # Path.resolve raises RuntimeError where links go in a circle
    if directory.is_mount():
        raise DataError(f"{directory} is a mount point, which cannot be replaced: name a directory in it")
    if directory == Path.cwd():
        raise DataError(f"{directory} is the current directory, which cannot be replaced: name a directory in it")
    return directory


def read_metadata(directory: Path) -> dict[str, Any]:
    """What is recorded of how `directory` was prepared; empty if it is not a prepared directory."""
    try:
        metadata = json.loads((directory / METADATA_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
