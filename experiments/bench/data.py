"""Measures the data pipeline on CPU cores: tokenising, writing, preparing, reading.

    python -m experiments.bench.data --cores=2 --output=experiments/results/data_cpu.json

The text is the embedded corpus, the running Python's standard library, with a tokenizer trained on it.
Each rate, in tokens a second, is that of the fastest repetition, since others may use the machine too:
`load_average` is what ran when the script started. `tokenising` is from memory to memory, `writing`
makes ArrayRecord files of windows, `preparing` goes from JSON lines in several .zst
files to prepared data with so many processes, and `reading` yields shuffled training batches.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from tokenizers import Tokenizer

from sparse_lm.data import corpus as corpus_lib
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data import train_batches
from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import find_files, python_library
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.readers import zstd
from sparse_lm.data.stages import Stream, write_shard

CORES = flags.DEFINE_integer("cores", 2, "Cores to run on.")
REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Runs of which the fastest counts.")
OUTPUT = flags.DEFINE_string("output", "experiments/results/data_cpu.json", "File to write.")

VOCAB_SIZE = 4096
SEQ_LENS = (256, 1024, 4096)
BATCH_TOKENS = 65_536
BATCHES = 40
FILES = 8


def least_seconds(function: Callable[[], Any], repetitions: int) -> float:
    """Returns the least wall-clock time of a call, over several."""
    return min(seconds(function) for _ in range(repetitions))


def seconds(function: Callable[[], Any]) -> float:
    """Returns the wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(repetitions: int) -> dict[str, Any]:
    """Measures the corpus, and tokens a second of every stage."""
    texts = list(python_library())
    tokenizer = tokenizer_lib.train_tokenizer(texts, VOCAB_SIZE)
    arrays = list(tokenizer_lib.tokenize(texts, tokenizer))
    tokens = sum(map(len, arrays))
    rates: dict[str, Any] = {}
    tokenise = least_seconds(lambda: list(tokenizer_lib.tokenize(texts, tokenizer)), repetitions)
    rates["tokenising"] = round(tokens / tokenise)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.concatenate(arrays).tofile(folder / "tokens")
        rates["writing"] = {seq_len: write_rate(folder, tokens, seq_len, repetitions) for seq_len in SEQ_LENS}
        write_shards(folder, texts)
        rates["preparing"] = {}
        for processes in (1, CORES.value):
            start = time.perf_counter()
            prepare_in(folder / f"by_{processes}", 1024, tokenizer, processes)
            rates["preparing"][processes] = round(tokens / (time.perf_counter() - start))
        for seq_len in SEQ_LENS:
            prepare_in(folder / str(seq_len), seq_len, tokenizer, CORES.value)
        rates["reading"] = {
            seq_len: read_rate(folder / str(seq_len), BATCH_TOKENS // seq_len, repetitions) for seq_len in SEQ_LENS
        }
    return {
        "corpus_tokens": tokens,
        "corpus_bytes": sum(len(text.encode()) for text in texts),
        "tokens_per_second": rates,
    }


def write_rate(folder: Path, tokens: int, seq_len: int, repetitions: int) -> int:
    """Measures tokens a second from the folder's file of tokens to one of windows."""
    dtype = tokenizer_lib.token_dtype(VOCAB_SIZE)
    stream = Stream([folder / "tokens"], dtype)
    arguments = (folder / "shard", stream, 0, stream.count_windows(seq_len), seq_len, dtype)
    return round(tokens / least_seconds(lambda: write_shard(*arguments), repetitions))


def write_shards(folder: Path, texts: list[str]) -> None:
    """Writes the texts as JSON lines in `FILES` compressed files."""
    for number in range(FILES):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::FILES])
        Path(folder, f"{number}.jsonl.zst").write_bytes(zstd.compress(lines.encode()))


def prepare_in(directory: Path, seq_len: int, tokenizer: Tokenizer, processes: int) -> None:
    corpus = find_files([f"{directory.parent}/*.jsonl.zst"])
    prepare(directory, corpus, seq_len=seq_len, tokenizer=tokenizer, processes=processes)


def read_rate(directory: Path, batch_size: int, repetitions: int) -> int:
    """Measures tokens a second of shuffled training batches."""
    data = open_prepared(directory)
    batches = train_batches(data, batch_size=batch_size, seed=0)
    duration = least_seconds(lambda: list(itertools.islice(batches, BATCHES)), repetitions)
    return round(BATCHES * batch_size * data.seq_len / duration)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(_: list[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))[: CORES.value]
    os.sched_setaffinity(0, cores)
    corpus_lib.PART_BYTES = 1  # a part for every file, as with files of a published corpus
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
