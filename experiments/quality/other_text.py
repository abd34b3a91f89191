"""Writes the texts of folders, shuffled. By default they are of another kind than the corpus: documentation and headers
of this system's packages.

python -m experiments.quality.other_text --output=other_text
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import app, flags

from sparse_lm.data.readers import zstd

FOLDERS = ["/usr/share/doc", "/usr/share/man", "/usr/share/perl", "/usr/include"]
LEVEL = 19  # of compression
FEWEST_CHARACTERS = 500  # of a document
CHARACTERS = 8_000_000  # of a file, after which the next one begins


def documents(folders: Iterable[str | Path]) -> Iterator[str]:
    """Yields the texts in these folders, which may be compressed by gzip, in an order that their names decide."""
    files = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    random.Random(0).shuffle(files)
    for path in files:
        if path.is_symlink():
            continue
        try:
            text = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes()).decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            continue  # no text
        if len(text) >= FEWEST_CHARACTERS and "\0" not in text:
            yield text


def files(texts: Iterable[str], most: float) -> Iterator[list[str]]:
    """Yields so many characters of texts, and the rest of the last one, as several processes are to read them."""
    file, characters, end = [], 0, CHARACTERS
    for text in texts:
        file.append(text)
        characters += len(text)
        if characters >= min(end, most):
            yield file
            file, end = [], end + CHARACTERS
        if characters >= most:
            return
    if file:
        yield file


def main(_: list[str]) -> None:
    folder = Path(flags.FLAGS.output)
    folder.mkdir(parents=True)
    for number, texts in enumerate(files(documents(flags.FLAGS.folders), 1e6 * flags.FLAGS.megabytes)):
        path = folder / f"{number:03d}.jsonl.zst"
        with zstd.open(path, "wt", encoding="utf-8", level=LEVEL) as output:
            output.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        print(f"{path}: {sum(map(len, texts)) / 1e6:.1f} million characters", flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "Folder to make, of files .jsonl.zst.", required=True)
    flags.DEFINE_list("folders", FOLDERS, "Folders to read.")
    flags.DEFINE_float("megabytes", 60, "How much text, before compression.")
    app.run(main)
