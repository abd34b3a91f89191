"""Text corpora: documents streamed from local files, in a fixed order.

A corpus is an object that can be iterated again and again, each time yielding the same documents in
the same order. A document is a `str`, or a 1-D integer array if its text is already tokenised.
Documents come one at a time, so that a corpus may be larger than memory, and a corpus comes in parts,
which several processes can read at the same time.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import hashlib
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np

from sparse_lm.data.errors import DataError

try:
    from compression import zstd  # Python 3.14
except ImportError:
    from backports import zstd

_log = logging.getLogger(__name__)

Document = str | np.ndarray

TEXT_SUFFIXES = (".txt", ".py", ".md")
JSON_SUFFIX = ".jsonl"
SUFFIXES = (*TEXT_SUFFIXES, JSON_SUFFIX)
COMPRESSIONS = {".gz": gzip.open, ".zst": zstd.open}  # which read every member or frame, and refuse one that is cut off
# A compressed .json file is read as lines, as C4 is published; one that is not is settings more often than text.
READABLE = f"{' '.join(SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}; .json with one of these"
PIECE = 64 * 1024  # characters; a longer text file becomes several documents
PART_BYTES = 16 * 2**20  # of files, at least, if there are several in a part

LIBRARY_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LIBRARY_FILE_LIMIT = 512 * 1024  # bytes; larger files are tables of data


class Corpus(Protocol):
    """Documents in a fixed order; every iteration starts again from the first.

    Corpora are picklable.
    """

    def __iter__(self) -> Iterator[Document]: ...

    def parts(self) -> Sequence[Corpus]:
        """Corpora with the same documents, one after the other."""

    def stamp(self) -> str:
        """A word that changes when the documents do."""


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The documents of local files: of a .jsonl file every line, of any other the file itself.

    A text file of more than `PIECE` characters is cut at line ends, so that a corpus which is one
    large file still has documents to hold out. Bytes that are not UTF-8 read as U+FFFD.

    Attributes:
      paths: files named *.txt, *.py, *.md or *.jsonl, or any of these with .gz or .zst added, or
        *.json.gz or *.json.zst, which hold JSON lines too.
      text_field: the field of a .jsonl line that holds its text.
    """

    paths: tuple[Path, ...]
    text_field: str = "text"

    def __iter__(self) -> Iterator[str]:
        """Non-empty documents, file by file.

        Raises:
          DataError: a file cannot be read, or a .jsonl line has no such text.
        """
        for path in self.paths:
            try:
                with _open_text(path) as stream:
                    if text_suffix(path) == JSON_SUFFIX:
                        documents = _json_texts(stream, path, self.text_field)
                    else:
                        documents = pieces(stream, PIECE)
                    yield from filter(None, documents)
            except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
                raise DataError(f"cannot read {path}: {error}") from error

    def parts(self) -> list[TextFiles]:
        """A file each, or several small ones."""
        parts: list[list[Path]] = []
        size = PART_BYTES
        for path in self.paths:
            if size >= PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(path)
            size += path.stat().st_size
        return [TextFiles(tuple(paths), self.text_field) for paths in parts]

    def stamp(self) -> str:
        """Of the names, sizes and times of the files."""
        return file_stamp(self.paths, self.text_field)


def file_stamp(paths: Iterable[Path], *context: object) -> str:
    """SHA-256 that changes when a file is another one or was written again, and with what else decides their text."""
    digest = hashlib.sha256(repr(context).encode())
    for path in paths:
        status = path.stat()
        digest.update(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def find_files(patterns: Iterable[str], text_field: str = "text") -> TextFiles:
    """The readable files that glob patterns match, each once, sorted by path; `**` matches any folders.

    Raises:
      DataError: a pattern matches no file, or nothing that it matches is a kind of text.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [path for path in matches if path.is_file()]
        texts = [path for path in files if text_suffix(path)]
        if not texts:
            what = "only files of other kinds" if files else "no file"
            raise DataError(f"{pattern!r} matches {what}; readable: {READABLE}")
        if len(texts) < len(files):
            _log.warning("%r: skipped %d files of other kinds than %s", pattern, len(files) - len(texts), READABLE)
        paths.update(texts)
    spelled = {path.resolve(): path for path in sorted(paths, reverse=True)}  # of a file's paths the first one
    return TextFiles(tuple(sorted(spelled.values())), text_field)


def python_library() -> TextFiles:
    """The sources of the running Python's standard library: real text on every machine.

    Left out: installed packages, tests, files over 512 KiB and files that are not UTF-8.

    Raises:
      DataError: this Python has no library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LIBRARY_SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    readable = tuple(path for path in sorted(paths) if _is_library_source(path))
    if not readable:
        raise DataError(f"no Python sources under {root}: the embedded corpus needs the standard library as files")
    return TextFiles(readable)


def text_suffix(path: Path) -> str:
    """The suffix that says how to read `path` (one of `SUFFIXES`), without compression; "" for other files."""
    name = path.name.lower()
    stem = name
    for compression in COMPRESSIONS:
        stem = stem.removesuffix(compression)
    suffix = os.path.splitext(stem)[1]
    if suffix == ".json" and stem != name:
        return JSON_SUFFIX
    return suffix if suffix in SUFFIXES else ""


def pieces(stream: TextIO, limit: int) -> Iterator[str]:
    """Cuts a text into pieces of at most `limit` characters, after the last line end where there is one."""
    rest = ""
    while True:
        rest += stream.read(limit - len(rest))
        if len(rest) < limit:
            break
        cut = rest.rfind("\n") + 1 or limit
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest


def _open_text(path: Path) -> TextIO:
    """Opens `path`, decompressed and decoded; line ends are left as they are."""
    compression = path.suffix.lower()
    if compression in COMPRESSIONS and not path.stat().st_size:
        raise EOFError("the file is empty, which no compressed file is")  # gzip would make an empty text of it
    opener = COMPRESSIONS.get(compression, open)
    return opener(path, "rt", encoding="utf-8", errors="replace", newline="\n")


def _json_texts(stream: TextIO, path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter, and some of the former: more than Python takes
            raise DataError(f"{path}:{number}: not JSON that can be read: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            fields = ", ".join(record) if isinstance(record, dict) else "none"
            raise DataError(f"{path}:{number}: no text in field {field!r}; fields of this line: {fields}")
        # JSON can spell half of a surrogate pair, which is no character and has no UTF-8 form.
        yield record[field].encode("utf-8", "replace").decode("utf-8")


def _is_library_source(path: Path) -> bool:
    try:
        if path.stat().st_size > LIBRARY_FILE_LIMIT:
            return False
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
