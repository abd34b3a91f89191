"""Measures the data pipeline on CPU cores, in tokens a second: tokenising, preparing, reading.

    python -m experiments.bench.data --cores=2 --output=experiments/results/data_cpu.json

The text is the embedded corpus, the running Python's standard library, with a tokenizer trained on it. `tokenising` is
from memory to memory, `preparing` goes from JSON lines in several .zst files to prepared data with so many processes,
and `reading` yields shuffled training batches, by window. Tokenising and reading are those of the fastest repetition,
since others may use the machine too: `load_average` is what ran when the script started.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from tokenizers import Tokenizer

from experiments.result_files import show, write_results
from sparse_lm.data import corpus as corpus_lib
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import find_files, python_library
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.pipeline import train_batches
from sparse_lm.data.readers import zstd

VOCAB_SIZE = 4096
SEQ_LENS = (256, 1024, 4096)
BATCH_TOKENS = 65_536
BATCHES = 40
FILES = 8
REPETITIONS = 5


def least_seconds(function: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """Returns the least wall-clock time of a call, over several."""

    def seconds() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return min(seconds() for _ in range(repetitions))


def measure(cores: int) -> dict[str, Any]:
    """Measures the corpus, and tokens a second of every stage."""
    texts = list(python_library())
    tokenizer = tokenizer_lib.train_tokenizer(texts, VOCAB_SIZE)
    tokens = sum(map(len, tokenizer_lib.tokenize(texts, tokenizer)))
    tokenising = least_seconds(lambda: list(tokenizer_lib.tokenize(texts, tokenizer)))
    rates: dict[str, Any] = {"tokenising": round(tokens / tokenising), "preparing": {}, "reading": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(FILES):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::FILES])
            (folder / f"{number}.jsonl.zst").write_bytes(zstd.compress(lines.encode()))
        for processes in sorted({1, cores}):
            prepared = least_seconds(lambda n=processes: prepare_in(folder / f"by_{n}", 1024, tokenizer, n), 1)
            rates["preparing"][processes] = round(tokens / prepared)
        for seq_len in SEQ_LENS:
            prepare_in(folder / str(seq_len), seq_len, tokenizer, cores)
            rates["reading"][seq_len] = read_rate(folder / str(seq_len), BATCH_TOKENS // seq_len)
    return {
        "corpus_tokens": tokens,
        "corpus_bytes": sum(len(text.encode()) for text in texts),
        "tokens_per_second": rates,
    }


def prepare_in(directory: Path, seq_len: int, tokenizer: Tokenizer, processes: int) -> None:
    corpus = find_files([f"{directory.parent}/*.jsonl.zst"])
    prepare(directory, corpus, seq_len=seq_len, tokenizer=tokenizer, processes=processes)


def read_rate(directory: Path, batch_size: int) -> int:
    """Measures tokens a second of shuffled training batches."""
    data = open_prepared(directory)
    batches = train_batches(data, batch_size=batch_size, seed=0)
    duration = least_seconds(lambda: list(itertools.islice(batches, BATCHES)))
    return round(BATCHES * batch_size * data.seq_len / duration)


def main(_: list[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))[: flags.FLAGS.cores]
    os.sched_setaffinity(0, cores)
    corpus_lib.PART_BYTES = 1  # a part for every file, as with files of a published corpus
    load_average = round(os.getloadavg()[0], 1)
    packages = ("numpy", "tokenizers", "tensorflow-datasets", "array-record", "grain")
    versions = {name: importlib.metadata.version(name) for name in packages}
    about = dict(cores=len(cores), load_average=load_average, versions=versions, vocab_size=VOCAB_SIZE)
    write_results(**about, batch_tokens=BATCH_TOKENS, **show(measure(len(cores))))


if __name__ == "__main__":
    flags.DEFINE_integer("cores", 2, "Cores to run on.")
    app.run(main)
