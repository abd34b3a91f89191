"""Turns local text into prepared data: packed windows of tokens, and the tokenizer.

    python -m sparse_lm.prepare_data --files='corpus/**/*.txt' --output=data/corpus --vocab_size=32768
    python -m sparse_lm.train --config=configs/llama60m.py --config.data.path=data/corpus

Reads .txt, .py, .md and .jsonl files, each also with .gz or .zst, without ever holding the corpus
in memory. Unless --tokenizer names one, a byte-level BPE is trained on the corpus.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from absl import app, flags

from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import find_files
from sparse_lm.data.dataset import Data, is_prepared, open_prepared
from sparse_lm.data.errors import DataError
from sparse_lm.data.holdout import hold_out
from sparse_lm.data.tokenizer import load_tokenizer

DEFAULT_VOCAB_SIZE = 32_768

FILES = flags.DEFINE_multi_string(
    "files", None, "Text files: a glob pattern, in which ** matches any folders. May be given several times."
)
OUTPUT = flags.DEFINE_string("output", None, "Directory to write, for --config.data.path.")
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", None, f"Entries of the tokenizer to be trained (default {DEFAULT_VOCAB_SIZE})."
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "A tokenizer.json, or Llama 3's tokenizer.model, to use instead of training one."
)
SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "Tokens that a model reads at one time: config.seq_len.", lower_bound=1)
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field of a .jsonl line that holds its text.")


def prepare_files(
    files: list[str],
    output: Path,
    *,
    seq_len: int,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    text_field: str = "text",
) -> Data:
    """Prepares the files that the patterns match, and opens the result.

    Raises:
      DataError: the files, the tokenizer or their combination cannot be used, or `output` holds something else.
      OSError: `output` cannot be written.
    """
    if tokenizer and vocab_size:
        raise DataError(f"--vocab_size={vocab_size} is for a tokenizer to be trained, but --tokenizer names one")
    if output.exists() and not is_prepared(output) and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"--output={output} exists and is not prepared data: name another directory or remove it")
    prepare(
        output,
        hold_out(find_files(files, text_field)),
        seq_len=seq_len,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
        vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
    )
    return open_prepared(output)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}: quote a pattern, so that the shell leaves it alone")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    start = time.monotonic()
    try:
        data = prepare_files(
            FILES.value,
            Path(OUTPUT.value),
            seq_len=SEQ_LEN.value,
            vocab_size=VOCAB_SIZE.value,
            tokenizer=TOKENIZER.value,
            text_field=TEXT_FIELD.value,
        )
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    seconds = time.monotonic() - start
    tokens = sum(split["tokens"] for split in data.info["splits"].values())
    print(data.describe())
    print(f"{tokens / seconds:,.0f} tokens/s in {seconds:.1f} s, tokenizer included")


if __name__ == "__main__":
    flags.mark_flags_as_required(["files", "output"])
    app.run(main)
