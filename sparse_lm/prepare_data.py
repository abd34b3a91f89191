r"""Turns local text into prepared data: packed windows of tokens, and the tokenizer.

    python -m sparse_lm.prepare_data --files='corpus/**/*.txt' --output=data/corpus --vocab_size=32768
    python -m sparse_lm.train --config=configs/llama60m.py --config.data.path=data/corpus

C4 as published, with its own held-out documents and Llama 3's tokenizer:

    python -m sparse_lm.prepare_data --files='c4/en/c4-train.*.json.gz' \
        --heldout_files='c4/en/c4-validation.*.json.gz' --tokenizer=llama3/tokenizer.json --seq_len=4096 \
        --output=data/c4

--files takes .txt, .py, .md, .jsonl and .ndjson files, each also with .gz or .zst, .json.gz and .json.zst (JSON lines
or an array), .parquet, and any other text file that is named without a pattern; --tfds takes a TFDS directory instead.
Unless --tokenizer names one, a byte-level BPE is trained on the corpus. The corpus is never held in memory. Files are
read by several processes, and the result does not depend on how many.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from absl import flags

from sparse_lm import entry_point
from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import find_files
from sparse_lm.data.dataset import Data, open_prepared
from sparse_lm.data.tfds_corpus import open_splits
from sparse_lm.data.tokenizer import MIN_VOCAB_SIZE, load_tokenizer
from sparse_lm.data.workers import available_cores
from sparse_lm.errors import DataError, OutputError
from sparse_lm.files import free_place, writing
from sparse_lm.progress import duration

DEFAULT_VOCAB_SIZE = 32_768
OPTIONS = ("heldout_files", "tfds", "seq_len", "vocab_size", "tokenizer", "text_field")


def prepare_files(
    files: list[str],
    output: Path,
    *,
    seq_len: int,
    heldout_files: list[str] | None = None,
    tfds: str | None = None,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    text_field: str | None = None,
    processes: int = 1,
) -> Data:
    """Prepares what the flags of the same names say, and opens the result.

    Raises:
      DataError: the files, the tokenizer or their combination cannot be used.
      OutputError: `output` is neither new nor empty, or cannot be written.
    """
    if tokenizer and vocab_size:
        raise DataError(f"--vocab_size={vocab_size} is for a tokenizer to be trained, but --tokenizer names one")
    if tfds and (files or heldout_files):
        raise DataError(f"--tfds={tfds} brings its own documents: leave out --files and --heldout_files")
    if tfds and text_field:
        raise DataError(f"--text_field={text_field} is for --files: of a TFDS directory `text` is read")
    if not tfds and not files:
        raise DataError("no text: name it with --files or --tfds")
    directory = free_place(output)
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if tfds:
        corpus, heldout = open_splits(Path(tfds).absolute())
    else:
        corpus, heldout = (find_files(some, text_field or "text") if some else None for some in (files, heldout_files))
        resolved = {path.resolve() for path in corpus.paths}
        if both := [path for path in (heldout.paths if heldout else ()) if path.resolve() in resolved]:
            raise DataError(f"{both[0]} is among --files and among --heldout_files: match it with one of them")
    with writing(OutputError, output):
        prepare(
            directory,
            corpus,
            heldout=heldout,
            seq_len=seq_len,
            tokenizer=loaded,
            vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
            processes=processes,
        )
    return open_prepared(output)


def main() -> None:
    options, start = flags.FLAGS, time.monotonic()
    data = prepare_files(
        options.files or [],
        Path(options.output),
        processes=options.processes or available_cores(),
        **{name: options[name].value for name in OPTIONS},
    )
    print(data.describe())
    print(f"prepared in {duration(time.monotonic() - start)}")


def _define_flags() -> None:
    files = "Text files: a glob pattern, in which ** matches any folders. May be given several times."
    flags.DEFINE_multi_string("files", None, files)
    heldout = "Files to evaluate on, like --files. Without it about 2% of the text is held out."
    flags.DEFINE_multi_string("heldout_files", None, heldout)
    tfds = "A TFDS directory with `text`, instead of --files. Its validation split is held out."
    flags.DEFINE_string("tfds", None, tfds)
    output = "Directory to write, for --config.data.path: new or empty."
    flags.DEFINE_string("output", None, output, required=True)
    entries = f"Entries of the tokenizer to be trained (default {DEFAULT_VOCAB_SIZE})."
    flags.DEFINE_integer("vocab_size", None, entries, lower_bound=MIN_VOCAB_SIZE)
    flags.DEFINE_string("tokenizer", None, "A tokenizer.json to use instead of training one.")
    flags.DEFINE_integer("seq_len", 1024, "Tokens that a model reads at one time: config.seq_len.", lower_bound=1)
    field = "Field of JSON records, or column of Parquet files, that holds the text (default text)."
    flags.DEFINE_string("text_field", None, field)
    flags.DEFINE_integer("processes", None, "Processes to use at most (default: as many as there are cores).", 1)


cli = functools.partial(entry_point.run, main, _define_flags)

if __name__ == "__main__":
    cli()
