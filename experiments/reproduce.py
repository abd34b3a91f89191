"""Lists how the numbers of the README's tables are measured again, and compares a new result file with what is there.

    python -m experiments.reproduce
    python -m experiments.reproduce step_llama1b runs/step_llama1b.json

Expected is what the file in `experiments/results` says, within a tolerance: machines of one kind differ by 5%, ratios
of one process by less. The exit status is 1 if a number is outside.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app

from experiments.plots import RESULTS
from experiments.quality.time_ratio import time_of_loss

TIME, RATIO = 0.10, 0.05  # tolerances; a number whose name ends in "ms" or "seconds" is a time

Numbers = dict[str, float]


class Row(NamedTuple):
    """Holds how a row of a table is measured.

    Attributes:
      command: writes the result file, OUTPUT.
      takes: hardware, and time where the file does not say it.
      file: in `experiments/results`, with the numbers that are expected.
      read: finds them in a result.
    """

    command: str
    takes: str
    file: str
    read: Callable[[dict[str, Any]], Numbers]


def step(result: dict[str, Any], recipe: str = "slices") -> Numbers:
    recipes = result["recipes"]
    dense, sparse = (recipes[name]["step_ms"] for name in ("dense", recipe))
    return {"dense ms": dense, f"{recipe} ms": sparse, "gain": dense / sparse}


def time_to_loss(result: dict[str, Any], sparse: str = "slices_80") -> Numbers:
    """Places the mean sparse run among the mean dense branches."""

    def mean(run: str) -> tuple[float, float]:
        rows = [row for row in result["runs"] if row["name"] == run]
        return statistics.fmean(row["seconds"] for row in rows), statistics.fmean(row["heldout_loss"] for row in rows)

    seconds, loss = mean(sparse)
    dense, _ = time_of_loss([mean("dense@0.8"), mean("dense@1.0")], loss)
    return {"dense seconds": dense, "sparse seconds": seconds, "ratio": seconds / dense}


def ffn(result: dict[str, Any]) -> Numbers:
    rows = [row for row in result["ffn"] if (row["tokens"], row["dim"]) == (16384, 2048)]
    return {row["recipe"]: row["both_speedup"] for row in rows if "both_speedup" in row}


def experts(result: dict[str, Any]) -> Numbers:
    """Reads the most even loads, which come first."""
    return {"experts24": next(row["both_speedup"] for row in result["experts"] if row["recipe"] == "experts24")}


_STEP = "python -m experiments.bench.step --recipes=dense,slices --output=OUTPUT "
_FFN = "python -m experiments.bench.ffn --tokens=16384 --shapes=2048x8192 --output=OUTPUT "
_AFM = "--config=configs/afm4b.py --config.model.layers=4 --config.model.vocab_size=16384"
_TIME = "python -m experiments.quality.time_to_loss --data=data/python --output=OUTPUT "
ROWS = {
    "step_llama1b": Row(
        _STEP + "--config=configs/llama1b.py --config.sparsity.dense_layers=0",
        "one H200, in which it timed five recipes",
        "step_llama1b_h200.json",
        step,
    ),
    "step_llama1b_fp8": Row(
        "python -m experiments.bench.step --config=configs/llama1b.py --config.sparsity.dense_layers=0 --rounds=3 "
        "--steps=4 --recipes=dense,slices,slices_2_32,dense_fp8,slices_fp8,slices_2_32_fp8 --traced=0 --output=OUTPUT",
        "one H200",
        "step_llama1b_2_32_h200.json",
        functools.partial(step, recipe="slices_2_32_fp8"),
    ),
    "step_afm": Row(
        f"{_STEP}{_AFM} --config.sparsity.dense_layers=0 --config.batch_size=32 --config.seq_len=1024",
        "one H200, about 60 s",
        "step_afm_4_layers_h200.json",
        step,
    ),
    "step_afm4b": Row(
        "NCCL_NVLS_ENABLE=0 python -m experiments.bench.step --config=configs/afm4b.py --config.mesh.fsdp=4 "
        "--config.sparsity.dense_layers=0 --config.batch_size=16 --recipes=dense,slices --traced=0 --rounds=3 "
        "--steps=5 --output=OUTPUT",
        "four H200s of one host",
        "step_afm4b_fsdp_4_h200.json",
        step,
    ),
    "step_gated": Row(
        "python -m experiments.bench.step --config=configs/llama32_1b.py --recipes=dense,dense_slices,fst,sste "
        "--config.sparsity.dense_layers=0 --rounds=2 --steps=6 --output=OUTPUT",
        "one H200",
        "step_llama32_1b_h200.json",
        functools.partial(step, recipe="dense_slices"),
    ),
    "time_llama1b": Row(
        _TIME
        + "--suite=llama1b --runs=dense,slices_80_first_dense --workdir=runs/llama1b --gpus=0,1 --seeds=13,14,15,16",
        "two H200s; a seed trains 1,600 s for dense with its branch, 980 s for slices",
        "time_llama1b_h200.json",
        functools.partial(time_to_loss, sparse="slices_80_first_dense"),
    ),
    "time_gated": Row(
        _TIME + "--suite=llama32_1b_4_layers --runs=dense,dense_slices_80 --workdir=runs/gated --gpus=0 --seeds=10,11",
        "one H100; a seed trains 380 s for dense with its branch and 215 s for dense_slices",
        "time_llama32_1b_4_layers_h100.json",
        functools.partial(time_to_loss, sparse="dense_slices_80"),
    ),
    "time_afm": Row(
        _TIME
        + "--suite=afm_4_layers --runs=dense,slices_80 --workdir=runs/time_afm --gpus=0,1,2,3 --seeds=10,11,12,13",
        "four H200s; a seed trains about 555 s for dense with its branches and 300 s for slices",
        "time_afm_4_layers_h200.json",
        time_to_loss,
    ),
    "time_afm_fp8": Row(
        _TIME + "--suite=afm_4_layers_fp8 --runs=dense,slices_80 --workdir=runs/time_fp8 --gpus=0,1 --seeds=16",
        "two H100s; 410 s of training for dense with its branch, 250 s for slices",
        "time_afm_4_layers_all_fp8_h100.json",
        time_to_loss,
    ),
    "ffn": Row(_FFN + "--recipes='slices 2:16,fst,sste,act24'", "one H200", "ffn_16384_recipes_h200.json", ffn),
    "ffn_venom": Row(_FFN + "--recipes='venom 128:2:16'", "one H200", "ffn_16384_venom_h200.json", ffn),
    "experts": Row("python -m experiments.bench.experts --output=OUTPUT", "one H200", "experts_h200.json", experts),
}


def tolerance(number: str) -> float:
    return TIME if number.endswith((" ms", " seconds")) else RATIO


def compare(row: Row, result: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Returns name, expected value, found value and whether that is within the tolerance, for each number of a row."""
    expected, found = row.read(json.loads((RESULTS / row.file).read_text())), row.read(result)
    return [(name, e, found[name], abs(found[name] - e) <= tolerance(name) * e) for name, e in expected.items()]


def main(arguments: Sequence[str]) -> None:
    if len(arguments) == 1:
        for name, row in ROWS.items():
            result = json.loads((RESULTS / row.file).read_text())
            takes = f"{row.takes}, {result['process_seconds']} s" if "process_seconds" in result else row.takes
            numbers = row.read(result).items()
            listed = ", ".join(f"{number} {value:.4g} +- {tolerance(number):.0%}" for number, value in numbers)
            print(f"{name}: {takes}; {row.file}\n    {row.command}\n    {listed}")
        return
    if len(arguments) != 3 or arguments[1] not in ROWS:
        raise app.UsageError(f"name one of {', '.join(ROWS)} and its result file, or nothing")
    try:
        compared = compare(ROWS[arguments[1]], json.loads(Path(arguments[2]).read_text()))
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        sys.exit(f"{arguments[2]} is no whole result of {arguments[1]}: {error!r}")
    for name, expected, found, within in compared:
        print(f"{name}: {found:.4g}, expected {expected:.4g} +- {tolerance(name):.0%}{'' if within else ': OUTSIDE'}")
    sys.exit(not all(within for *_, within in compared))


if __name__ == "__main__":
    app.run(main)
