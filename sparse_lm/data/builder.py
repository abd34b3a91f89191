"""Prepares data: a TFDS dataset of packed windows, in ArrayRecord files, beside its tokenizer.

A prepared directory is an ordinary TFDS directory (`tfds.builder_from_directory` reads it) with splits `train` and
`heldout` of one feature, `tokens` [seq_len + 1], plus tokenizer.json. Its metadata.json records how it was made.
TensorFlow is not needed to write or to read it.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from tokenizers import Tokenizer

from sparse_lm.data import stages
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, file_stamp
from sparse_lm.data.dataset import FORMAT, TOKENIZER_FILE, is_whole, read_metadata
from sparse_lm.data.errors import DataError
from sparse_lm.data.holdout import already_split, hold_out
from sparse_lm.data.workers import Workers
from sparse_lm.data.workspace import open_workspace

_log = logging.getLogger(__name__)


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
) -> None:
    """Writes prepared data to `directory`, or to what it leads to if it is a link, replacing what is there.

    The directory appears complete, by one rename, or not at all. Until then everything is in a hidden folder beside
    it, which nothing reads but the next run of the same preparation: that one goes on from there, after an error or a
    kill, and ends with the same bytes.

    What is there stays if it is whole and of the same `source`, or else of the same text, tokenizer and length, which
    reading the text tells.

    Args:
      directory: the result.
      corpus: documents to train on, and to hold some out of unless `heldout` is given.
      seq_len: targets of a window.
      heldout: documents to evaluate on.
      tokenizer: None to train one with `vocab_size` entries on the training documents.
      vocab_size: entries of a tokenizer to be trained.
      source: what the data is made from, recorded in the metadata for a cache to recognise.
      processes: to use at most; the result does not depend on it.

    Raises:
      DataError: the text cannot be read, or does not go with the tokenizer, or `directory` cannot be replaced.
      OSError: the directory cannot be written.
    """
    directory = replaceable(directory)
    # One part is read by this process, and tokenised by as many threads as there are cores.
    used = min(processes, len(corpus.parts()))
    with open_workspace(directory, Workers(used, threads=processes // used)) as workspace:
        before = read_metadata(directory) if is_whole(directory) else {}
        if source and before.get("source") == source:
            return  # another process has just prepared the same
        stamps = _stamps(corpus, heldout)
        survey = functools.partial(stages.survey, workspace=workspace)
        split = hold_out(corpus, survey) if heldout is None else already_split(corpus, heldout, survey)
        tokenizer = tokenizer or stages.train_tokenizer(split, vocab_size, workspace)
        vocab_size = tokenizer_lib.vocabulary_size(tokenizer)
        metadata = {
            "format": FORMAT,
            "source": source or {},
            "corpus_sha256": split.sha256,
            "tokenizer_sha256": tokenizer_lib.fingerprint(tokenizer),
            "vocab_size": vocab_size,
            "end_of_text": tokenizer_lib.end_of_text(tokenizer),
            "seq_len": seq_len,
        }
        if metadata.items() <= before.items():
            _log.info("%s is already prepared from the same text, with the same tokenizer", directory)
            return
        parts = stages.tokenise(split, tokenizer, workspace)
        metadata["splits"] = {
            name: {key: sum(counts[key] for counts in files.values()) for key in stages.COUNTS}
            for name, files in parts.items()
        }
        complete = workspace.path("windows", *metadata.values(), stages.SHARD_BYTES).with_suffix("")
        dtype = tokenizer_lib.token_dtype(vocab_size)
        shards = stages.write(parts, complete, seq_len, dtype, workspace)
        tokenizer.save(str(complete / TOKENIZER_FILE))
        template = tfds.core.ShardedFileTemplate(complete, stages.SHARD_TEMPLATE)
        tfds.folder_dataset.write_metadata(
            data_dir=complete,
            features=stages.window_features(seq_len, dtype),
            split_infos=[
                tfds.core.SplitInfo(
                    name=name,
                    shard_lengths=[shard["windows"] for shard in results],
                    num_bytes=sum(shard["bytes"] for shard in results),
                    filename_template=template,
                )
                for name, results in shards.items()
            ],
            filename_template=template,
            check_data=False,  # by TensorFlow
            description="Documents joined by an end-of-text token, cut into windows that overlap by one token.",
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(metadata),
        )
        now = _stamps(corpus, heldout)
        if changed := [str(path) for path in stamps if stamps[path] != now[path]]:
            raise DataError(f"{changed[0]} changed while it was prepared: run the same again when it no longer does")
        if directory.exists():
            replaced = workspace.folder / "replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            directory.rename(replaced)
        complete.rename(directory)


def _stamps(*corpora: Corpus | None) -> dict[Path, str]:
    return {path: file_stamp([path]) for corpus in corpora if corpus is not None for path in corpus.files()}


def replaceable(directory: Path) -> Path:
    """Returns the directory without links, to which a rename can move another.

    Raises:
      DataError: it is a mount point, or the current directory, which whoever works in it would lose; or a link that
        leads to itself.
    """
    directory = Path(os.path.realpath(directory))  # Path.resolve raises RuntimeError where links go in a circle
    if directory.is_symlink():
        raise DataError(f"{directory} is a link that leads to itself")
    if directory.is_mount():
        raise DataError(f"{directory} is a mount point, which cannot be replaced: name a directory in it")
    if directory == Path.cwd():
        raise DataError(f"{directory} is the current directory, which cannot be replaced: name a directory in it")
    return directory
