"""Rates of the data pipeline on CPU cores: tokenising, packing, preparing, reading.

    python -m experiments.bench_data --cores=2 --output=experiments/results/data_cpu.json

The text is the embedded corpus, the running Python's standard library. Each rate, in tokens a
second, is that of the fastest repetition, since others may use the machine too: `load_average` is
what ran when the script started. `packing` takes documents in memory to windows in memory,
`packing_lists` does so from Python lists of ids, and `reading` yields shuffled training batches.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from sparse_lm.data import packing, train_batches
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import python_library
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.holdout import hold_out

CORES = flags.DEFINE_integer("cores", 2, "Cores to run on.")
REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Runs of which the fastest counts.")
OUTPUT = flags.DEFINE_string("output", "experiments/results/data_cpu.json", "File to write.")

VOCAB_SIZE = 4096
PACKING_COPIES = 10  # of the corpus, so that a run is long enough to time
SEQ_LENS = (256, 1024, 4096)
BATCH_TOKENS = 65_536
BATCHES = 40


def least_seconds(function: Callable[[], Any], repetitions: int) -> float:
    """Least wall-clock time of a call, over several."""
    return min(seconds(function) for _ in range(repetitions))


def seconds(function: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def pack_all(documents: Iterable[np.ndarray], seq_len: int) -> None:
    for windows in packing.pack(documents, seq_len=seq_len, end_of_text=0, dtype=np.dtype(np.uint16)):
        np.ascontiguousarray(windows)


def measure(repetitions: int) -> dict[str, Any]:
    split = hold_out(python_library())
    texts = [*split.train, *split.heldout]
    tokenizer = tokenizer_lib.train_tokenizer(texts, VOCAB_SIZE)
    arrays = list(tokenizer_lib.tokenize(texts, tokenizer))
    lists = [tokens.tolist() for tokens in arrays]
    tokens = sum(map(len, arrays))
    rates: dict[str, Any] = {}
    tokenise = least_seconds(lambda: list(tokenizer_lib.tokenize(texts, tokenizer)), repetitions)
    rates["tokenising"] = round(tokens / tokenise)
    pack = least_seconds(lambda: pack_all(arrays * PACKING_COPIES, 1024), repetitions)
    rates["packing"] = round(tokens * PACKING_COPIES / pack)
    pack = least_seconds(lambda: pack_all((np.array(ids, np.uint16) for ids in lists), 1024), repetitions)
    rates["packing_lists"] = round(tokens / pack)

    with tempfile.TemporaryDirectory() as folder:
        directories = {seq_len: Path(folder, str(seq_len)) for seq_len in SEQ_LENS}
        prepare_seconds = {
            seq_len: seconds(functools.partial(prepare, directory, split, seq_len=seq_len, vocab_size=VOCAB_SIZE))
            for seq_len, directory in directories.items()
        }
        rates["reading"] = {
            seq_len: read_rate(directory, BATCH_TOKENS // seq_len, repetitions)
            for seq_len, directory in directories.items()
        }
    return {
        "corpus_tokens": tokens,
        "corpus_bytes": sum(len(text.encode()) for text in texts),
        "tokens_per_second": rates,
        "prepare_seconds": prepare_seconds,
    }


def read_rate(directory: Path, batch_size: int, repetitions: int) -> int:
    data = open_prepared(directory)
    batches = train_batches(data, batch_size=batch_size, seed=0)
    duration = least_seconds(lambda: list(itertools.islice(batches, BATCHES)), repetitions)
    return round(BATCHES * batch_size * data.seq_len / duration)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(argv: list[str]) -> None:
    del argv
    cores = sorted(os.sched_getaffinity(0))[: CORES.value]
    os.sched_setaffinity(0, cores)
    load_average = round(os.getloadavg()[0], 1)
    packages = ("numpy", "tokenizers", "tensorflow-datasets", "array-record", "grain")
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": len(cores),
        "load_average": load_average,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "vocab_size": VOCAB_SIZE,
        "batch_tokens": BATCH_TOKENS,
        **measure(REPETITIONS.value),
    }
    Path(OUTPUT.value).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    app.run(main)
