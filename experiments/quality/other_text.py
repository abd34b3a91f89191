"""Writes the texts of folders, shuffled. By default they are of another kind than the corpus: documentation and headers
of this system's packages.

python -m experiments.quality.other_text --output=other_text.jsonl.zst
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import app, flags

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FOLDERS = ["/usr/share/doc", "/usr/share/man", "/usr/share/perl", "/usr/include"]
LEVEL = 19  # of compression
FEWEST_CHARACTERS = 500  # of a document


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


def main(_: list[str]) -> None:
    characters, most = 0, 1e6 * flags.FLAGS.megabytes
    with zstd.open(flags.FLAGS.output, "wt", encoding="utf-8", level=LEVEL) as output:
        for text in documents(flags.FLAGS.folders):
            output.write(json.dumps({"text": text}) + "\n")
            characters += len(text)
            if characters >= most:
                break
    print(f"{flags.FLAGS.output}: {characters / 1e6:.0f} million characters")


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "File to write, .jsonl.zst.", required=True)
    flags.DEFINE_list("folders", FOLDERS, "Folders to read.")
    flags.DEFINE_float("megabytes", 60, "How much text, before compression.")
    app.run(main)
