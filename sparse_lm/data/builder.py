"""Prepares data: a TFDS dataset of packed windows, in ArrayRecord files, beside its tokenizer.

A prepared directory is an ordinary TFDS directory (`tfds.builder_from_directory` reads it) with splits `train` and
`heldout` of one feature, `tokens` [seq_len + 1], plus tokenizer.json. Its metadata.json records how it was made.
TensorFlow is not needed to write or to read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from sparse_lm.data import stages
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, file_status
from sparse_lm.data.dataset import FORMAT, TOKENIZER_FILE, open_prepared
from sparse_lm.data.holdout import SURVEYED, Survey, hold_out, sample
from sparse_lm.data.workers import Workers
from sparse_lm.errors import DataError, OutputError
from sparse_lm.files import replacing, try_lock

_log = logging.getLogger(__name__)

STAMP_FILE = "stamp"  # tells what a preparation is made from


def prepare(
    directory: Path,
    corpus: Corpus,
    *,
    seq_len: int,
    heldout: Corpus | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    processes: int = 1,
) -> None:
    """Writes prepared data to `directory`, or to what it leads to if it is a link, replacing what is there.

    The directory appears complete, by one rename, or not at all. Until then everything is in a hidden folder beside
    it, which nothing reads but the next run of the same preparation: that one goes on from there, after an error or a
    kill, and ends with the same bytes.

    What is there stays if it is whole and was prepared from the same.

    Args:
      directory: the result.
      corpus: documents to train on, and to hold some out of unless `heldout` is given.
      seq_len: targets of a window.
      heldout: documents to evaluate on.
      tokenizer: None to train one with `vocab_size` entries on the training documents.
      vocab_size: entries of a tokenizer to be trained.
      processes: to use at most; the result does not depend on it.

    Raises:
      DataError: the text cannot be read, or does not go with the tokenizer.
      OutputError: `directory` cannot be replaced.
      OSError: it cannot be written.
    """
    directory = replaceable(directory)
    folder = directory.with_name(f".{directory.name}.incomplete")
    # One part is read by this process, and tokenised by as many threads as there are cores.
    used = max(1, min(processes, len(corpus.parts())))
    with locked(folder.with_suffix(".lock")), Workers(used, threads=processes // used) as workers:
        stamps = _file_stamps(corpus, heldout)
        stamp = stamp_of(corpus, heldout, seq_len, tokenizer, vocab_size)
        with contextlib.suppress(DataError):  # there is none, or it is damaged
            if open_prepared(directory).info.get("stamp") == stamp:
                _log.info("%s is already prepared from the same files", directory)
                _remove(folder)
                return
        _begin(folder, stamp)
        numbers = itertools.count()

        def survey(corpus: Corpus) -> Survey:
            return stages.survey(corpus, folder / f"survey-{next(numbers)}", workers)

        if heldout is None:
            train, rest, found = hold_out(corpus, survey)
        else:
            train, rest, found, other = corpus, heldout, survey(corpus), survey(heldout)
            found = dataclasses.replace(
                found,
                sha256=hashlib.sha256((found.sha256 + other.sha256).encode()).hexdigest(),
                documents=found.documents + other.documents,
                replaced=found.replaced + other.replaced,
            )
        if found.replaced:
            _log.warning(
                "%s of %s documents have bytes that are not UTF-8, or a U+FFFD, as which such bytes are read",
                f"{found.replaced:,}",
                f"{found.documents:,}",
            )
        if tokenizer is None:
            sampled = sample(train, min(1.0, stages.TOKENIZER_SAMPLE / found.size))
            tokenizer = stages.train_tokenizer(sampled, vocab_size, folder / "sample", workers)
        vocab_size = tokenizer_lib.vocabulary_size(tokenizer)
        metadata = {
            "format": FORMAT,
            "stamp": stamp,
            "corpus_sha256": found.sha256,
            "tokenizer_sha256": tokenizer_lib.fingerprint(tokenizer),
            "vocab_size": vocab_size,
            "end_of_text": tokenizer_lib.end_of_text(tokenizer),
            "seq_len": seq_len,
        }
        files, metadata["splits"] = {}, {}
        for name, what, part in (("train", "training text", train), ("heldout", "held-out text", rest)):
            files[name], metadata["splits"][name] = stages.tokenise(what, part, tokenizer, folder / name, workers)
        complete = folder / "complete"
        stages.write(files, complete, metadata, workers)
        tokenizer_lib.save_tokenizer(tokenizer, complete / TOKENIZER_FILE)
        now = _file_stamps(corpus, heldout)
        if changed := [path for path in stamps if stamps[path] != now[path]]:
            raise DataError(f"{changed[0]} changed while it was prepared: run the same again")
        if directory.exists():
            directory.rename(folder / "replaced")
        complete.rename(directory)
        _remove(folder)


def stamp_of(corpus: Corpus, heldout: Corpus | None, seq_len: int, tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Returns a hash of all that decides what `prepare` makes of these; of files names, sizes and times."""
    corpora = [repr(part.parts()) for part in (corpus, heldout) if part is not None]
    entries = tokenizer_lib.fingerprint(tokenizer) if tokenizer else vocab_size
    deciding = [FORMAT, str(SURVEYED), stages.SHARD_BYTES, seq_len, entries, corpora, _file_stamps(corpus, heldout)]
    return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()


def _file_stamps(*corpora: Corpus | None) -> dict[str, list[int]]:
    """Returns sizes and times of the files of corpora, by their absolute paths; raises DataError if one is gone."""
    stamps = {}
    for path in itertools.chain.from_iterable(corpus.files() for corpus in corpora if corpus is not None):
        status = file_status(path)
        stamps[str(path.absolute())] = [status.st_size, status.st_mtime_ns]
    return stamps


def _begin(folder: Path, stamp: str) -> None:
    """Makes a folder for the files of a preparation, empty unless an earlier run of the same one has left some."""
    file = folder / STAMP_FILE
    if not file.exists() or file.read_text() != stamp:
        _remove(folder)
        with replacing(file) as partial:
            partial.write_text(stamp)
    for partial in folder.rglob("*.part"):
        partial.unlink()


def _remove(folder: Path) -> None:
    """Deletes a folder of `_begin`, its stamp first: what is half removed must not be taken for work to go on from."""
    (folder / STAMP_FILE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on a file, which stays; another process waits until the first one has left, or ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        if not try_lock(lock):
            _log.info("waiting for another process, which holds %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replaceable(directory: Path) -> Path:
    """Returns the directory without links, if a rename can move another one there, and else raises OutputError.

    It cannot to a mount point, and must not to the current directory, which whoever works in it would lose.
    """
    directory = Path(os.path.realpath(directory))  # Path.resolve raises RuntimeError where links go in a circle
    if directory.is_mount() or directory == Path.cwd():
        raise OutputError(directory, "is a mount point or the current directory: name a directory in it")
    return directory
