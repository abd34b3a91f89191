"""Lists how the numbers of the README's tables are measured again, and compares a new result file with what is there.

    python -m experiments.reproduce
    python -m experiments.reproduce step_llama1b runs/step_llama1b.json

Expected is what the files in `experiments/results` say, within a tolerance: machines of one kind differ by 7%, ratios
of one process by less. The exit status is 1 if a number is outside. experiments/README.md says how the text of runs,
data/python and data/other, is prepared, and `experiments.quality.time_ratio` has R by other text and with compilation.
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
from experiments.quality.time_ratio import LOSSES, ratios

TIME, RATIO = 0.10, 0.05  # tolerances; a number whose name ends in "ms" or "seconds" is a time

Numbers = dict[str, float]


class Row(NamedTuple):
    """Holds how a row of a table is measured.

    Attributes:
      command: writes the result file, OUTPUT.
      takes: hardware, and time where the file does not say it.
      file: in `experiments/results`, with the numbers that are expected.
      read: finds them in a result.
      more: files of the same suite, with runs of other seeds.
    """

    command: str
    takes: str
    file: str
    read: Callable[[dict[str, Any]], Numbers]
    more: tuple[str, ...] = ()

    def expected(self) -> dict[str, Any]:
        """Returns the result whose numbers are expected, with the runs of all files."""
        first, *others = (json.loads((RESULTS / file).read_text()) for file in (self.file, *self.more))
        return first | {"runs": sum((other["runs"] for other in others), first["runs"])} if others else first


def step(result: dict[str, Any], recipe: str = "slices", dense: str = "dense") -> Numbers:
    before, after = (result["recipes"][name]["step_ms"] for name in (dense, recipe))
    return {f"{dense} ms": before, f"{recipe} ms": after, "gain": before / after}


def time_to_loss(result: dict[str, Any], sparse: str = "slices_80") -> Numbers:
    """Returns means over the seeds that have R."""
    found = ratios(result["runs"], LOSSES["heldout"])[sparse]
    runs = {row["seed"]: row["seconds"] for row in result["runs"] if row["name"] == sparse}
    return {
        "dense seconds": statistics.fmean(runs[of.seed] / of.ratio for of in found),
        "sparse seconds": statistics.fmean(runs[of.seed] for of in found),
        "ratio": statistics.fmean(of.ratio for of in found),
    }


def rivals(result: dict[str, Any], runs: Sequence[str]) -> Numbers:
    """Returns the mean R of each run."""
    found = ratios(result["runs"], LOSSES["heldout"])
    return {f"{run} ratio": statistics.fmean(of.ratio for of in found[run]) for run in runs}


def ffn(result: dict[str, Any], recipes: Sequence[str]) -> Numbers:
    rows = [row for row in result["ffn"] if (row["tokens"], row["dim"]) == (16384, 2048)]
    return {row["recipe"]: row["both_speedup"] for row in rows if row["recipe"] in recipes}


def experts(result: dict[str, Any]) -> Numbers:
    """Reads the most even loads, which come first."""
    return {"experts24": next(row["both_speedup"] for row in result["experts"] if row["recipe"] == "experts24")}


_STEP = "python -m experiments.bench.step --recipes=dense,slices --output=OUTPUT "
_AFM = "--config=configs/afm4b.py --config.model.layers=4 --config.model.vocab_size=16384"
_TIME = (
    "python -m experiments.quality.time_to_loss --data=data/python --second_data=data/other --output=OUTPUT "
    "--workdir=OUTPUT-runs "
)
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
        functools.partial(step, recipe="slices_2_32_fp8", dense="dense_fp8"),
    ),
    "step_afm": Row(
        f"{_STEP}{_AFM} --config.sparsity.dense_layers=0 --config.batch_size=32 --config.seq_len=1024",
        "one H200",
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
        _TIME + "--suite=llama1b --runs=dense,slices_80_first_dense --gpus=0,1 --seeds=13,14,15,16",
        "two H200s; a seed trains 1,600 s for dense with its branch, 980 s for slices",
        "time_llama1b_h200.json",
        functools.partial(time_to_loss, sparse="slices_80_first_dense"),
    ),
    "time_llama1b_eighth": Row(
        _TIME + "--suite=llama1b --runs=dense,slices_90_m_32_first_dense --gpus=0,1 --seeds=13,14,15,16",
        "two H200s; a seed trains 1,600 s for dense with its branch, 880 s for slices",
        "time_llama1b_h200.json",
        functools.partial(time_to_loss, sparse="slices_90_m_32_first_dense"),
    ),
    "time_gated": Row(
        _TIME + "--suite=llama32_1b_4_layers --runs=dense,dense_slices_80 --gpus=0 --seeds=10,11",
        "one H100; a seed trains 380 s for dense with its branch and 215 s for dense_slices",
        "time_llama32_1b_4_layers_h100.json",
        functools.partial(time_to_loss, sparse="dense_slices_80"),
    ),
    "time_afm": Row(
        _TIME + "--suite=afm_4_layers --runs=dense,slices_80 --gpus=0,1,2,3 --seeds=10,11,12,13",
        "four H200s; a seed trains about 555 s for dense with its branches and 300 s for slices",
        "time_afm_4_layers_h200.json",
        time_to_loss,
    ),
    "time_afm_eighth": Row(
        _TIME + "--suite=afm_4_layers --runs=dense,slices_90_m_32 --gpus=0,1 --seeds=18,19,22",
        "two H200s; a seed trains about 555 s for dense with its branches and 240 s for slices",
        "time_afm_4_layers_turned_h200.json",
        functools.partial(time_to_loss, sparse="slices_90_m_32"),
        more=("time_afm_4_layers_m_32_h200.json", "time_afm_4_layers_leaving_h200.json"),
    ),
    "time_afm_fp8": Row(
        _TIME + "--suite=afm_4_layers_fp8 --runs=dense,slices_90_m_32 --gpus=0,1 --seeds=17,18,19,20",
        "two H200s; a seed trains 390 s for dense with its branch and 195 s for slices",
        "time_afm_4_layers_all_fp8_h200.json",
        functools.partial(time_to_loss, sparse="slices_90_m_32"),
    ),
    "time_afm_fp8_over_bf16": Row(
        _TIME + "--suite=afm_4_layers --runs=dense,dense_fp8,slices_80_fp8 --gpus=0,1 --seeds=15",
        "two H100s; 560 s of training for dense with its branch, 345 s in FP8, 250 s for slices",
        "time_afm_4_layers_fp8_h100.json",
        functools.partial(rivals, runs=("dense_fp8", "slices_80_fp8")),
    ),
    **{
        f"time_afm_{run}": Row(
            f"{_TIME}--suite=afm_4_layers --runs=dense,{run} --gpus={gpus} --seeds={seed}",
            f"{takes}; about 555 s of training for dense with its branch, 275 to 300 s for the other",
            f"time_afm_4_layers_{file}.json",
            functools.partial(rivals, runs=(run,)),
        )
        for run, seed, gpus, takes, file in (
            ("dense_slices_80", 17, "0,1", "two H200s", "rates_h200"),
            ("fixed_quarter_80", 14, "0,1", "two H100s", "controls_h100"),
            ("quarter_width", 14, "0,1", "two H100s", "controls_h100"),
            ("mixture_quarter", 10, "0,1", "two H200s", "h200"),
        )
    },
    "time_narrow_afm": Row(
        _TIME + "--suite=narrow_afm_4_layers --runs=dense,slices_80_rate_0.0011,mixture_quarter,quarter_width_longer "
        "--gpus=0,1 --seeds=0,1,2,3",
        "two H100s or H200s; a seed trains 350 s for dense with its branch, 220 to 310 s for each of the others",
        "time_narrow_afm_4_layers_h100.json",
        functools.partial(rivals, runs=("slices_80_rate_0.0011", "mixture_quarter", "quarter_width_longer")),
        more=("time_narrow_afm_4_layers_turned_h200.json",),
    ),
    "ffn": Row(
        "python -m experiments.bench.ffn --tokens=16384 --output=OUTPUT",
        "one H200",
        "ffn_16384_h200.json",
        functools.partial(ffn, recipes=("slices 2:16", "venom 128:2:16", "fst", "sste", "act24")),
    ),
    "experts": Row("python -m experiments.bench.experts --output=OUTPUT", "one H200", "experts_h200.json", experts),
}


def tolerance(number: str) -> float:
    return TIME if number.endswith((" ms", " seconds")) else RATIO


def compare(row: Row, result: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Returns name, expected value, found value and whether that is within the tolerance, for each number of a row."""
    expected, found = row.read(row.expected()), row.read(result)
    return [(name, e, found[name], abs(found[name] - e) <= tolerance(name) * e) for name, e in expected.items()]


def main(arguments: Sequence[str]) -> None:
    if len(arguments) == 1:
        for name, row in ROWS.items():
            result = row.expected()
            takes = f"{row.takes}, {result['process_seconds']} s" if "process_seconds" in result else row.takes
            numbers = row.read(result).items()
            listed = ", ".join(f"{number} {value:.4g} +- {tolerance(number):.0%}" for number, value in numbers)
            print(f"{name}: {takes}; {', '.join((row.file, *row.more))}\n    {row.command}\n    {listed}")
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
