"""Text corpora: streams documents from local files, in a fixed order.

A corpus is an object that can be iterated again and again, each time yielding the same documents in the same order. A
document is a `str`. Documents come one at a time, so that a corpus may be larger than memory, and a corpus comes in
parts, which several processes can read at the same time.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from sparse_lm.data.readers import COMPRESSIONS, JSON, LINES, PARQUET, read_documents, split_suffix
from sparse_lm.errors import DataError

_log = logging.getLogger(__name__)

SUFFIXES = (".txt", ".py", ".md", *LINES)
# A .json file is text only where it is compressed, as C4 is published, or named: settings are more often in one.
READABLE = f"{' '.join(SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}; {JSON} with one of these; {PARQUET}"
PART_BYTES = 2 * 2**20  # of files, at least, if there are several in a part; compressed text is some six times as long

LIBRARY_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LIBRARY_FILE_LIMIT = 512 * 1024  # bytes; larger files are tables of data


class Corpus(Protocol):
    """Yields documents in a fixed order; every iteration starts again from the first. Corpora are picklable."""

    def __iter__(self) -> Iterator[str]: ...

    def parts(self) -> Sequence[Corpus]:
        """Returns corpora with the same documents, one after the other."""


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Reads the documents of local files, as `read_documents` does."""

    paths: tuple[Path, ...]
    text_field: str = "text"

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from filter(None, read_documents(path, self.text_field))

    def parts(self) -> list[TextFiles]:
        """Returns a file each, or several small ones."""
        parts, size = [], PART_BYTES
        for path in self.paths:
            if size >= PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(path)
            try:
                size += path.stat().st_size
            except OSError as error:
                raise DataError(f"cannot read {path}: {error}") from error
        return [TextFiles(tuple(paths), self.text_field) for paths in parts]


def find_files(patterns: Iterable[str], text_field: str = "text") -> TextFiles:
    """Finds the readable files that glob patterns match, each once, sorted by path; `**` matches any folders.

    A pattern that is the name of a file stands for that file, whatever its suffix.

    Raises:
      DataError: a pattern matches no file, a link to none, or nothing that is a kind of text.
    """
    paths: set[Path] = set()
    for pattern in map(os.path.expanduser, patterns):
        matched = list(map(Path, glob.glob(pattern, recursive=True)))
        # Of the path without links, since `**` follows a link from a folder to itself further than the system does.
        if gone := [path for path in matched if _is_kind_of_text(path) and not os.path.exists(os.path.realpath(path))]:
            raise DataError(f"{gone[0]} is a link that leads to no file")
        found = [path for path in matched if path.is_file()]
        texts = [Path(pattern)] if os.path.isfile(pattern) else list(filter(_is_kind_of_text, found))
        if not texts:
            others = f" but {len(found)} of other kinds, which must be named one by one" if found else ""
            if os.path.isdir(pattern):
                others = f" but a directory, whose files are {os.path.join(pattern, '**', '*')!r}"
            raise DataError(f"{pattern!r} matches no file of text{others}; readable: {READABLE}")
        if others := {*found} - {*texts}:
            kinds = ", ".join(sorted({path.suffix or path.name for path in others}))
            _log.info(
                "%r: %d files of text; %d of other kinds are left out: %s", pattern, len(texts), len(others), kinds
            )
        paths.update(texts)
    # Absolute: they are the same files wherever they are named from. Of a file's paths the first one.
    spelled = {path.resolve(): path.absolute() for path in sorted(paths, reverse=True)}
    return TextFiles(tuple(sorted(spelled.values())), text_field)


def _is_kind_of_text(path: Path) -> bool:
    suffix, compression = split_suffix(path)
    return suffix in SUFFIXES or (suffix == JSON and bool(compression)) or (suffix == PARQUET and not compression)


def python_library() -> TextFiles:
    """Finds the sources of the running Python's standard library, real text on every machine.

    Installed packages, tests and files over 512 KiB are left out. Raises DataError if this Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LIBRARY_SKIPPED]  # not even looked into
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    # Distributions, and editors, leave links there that may lead nowhere.
    readable = [path for path in sorted(paths) if path.is_file() and path.stat().st_size <= LIBRARY_FILE_LIMIT]
    if not readable:
        raise DataError(f"no Python sources under {root}: the embedded corpus needs the standard library as files")
    return TextFiles(tuple(readable))
