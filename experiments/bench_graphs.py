r"""What CUDA graphs do for a training step: the same steps with other settings of XLA's, in one process.

    python -m experiments.bench_graphs --config=configs/llama1b.py --config.model.layers=6 \
        --recipes=dense,venom_slices --output=experiments/results/graphs_llama1b_6_layers_h200.json
    python -m experiments.bench_graphs --config=configs/llama60m.py --config.seq_len=512 \
        --recipes=dense,venom_slices --output=experiments/results/graphs_llama60m_h200.json

Settings take turns, recipe by recipe and round by round, as recipes do in `experiments.bench_step`, whose flags
these are. What kernels take, and how many there are, is from a profile without graphs: the rest of a step's
time is gaps between them, less what overlaps.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from experiments import step_parts
from experiments.bench_step import (
    NAMES,
    NO_GRAPHS,
    OUTPUT,
    ROUNDS,
    STEPS,
    TRACED,
    WARMUP,
    Variant,
    compiled_variants,
    random_start,
)
from experiments.result_files import write_results
from experiments.step_timing import step_times, time_steps

_DEFAULT_COMMANDS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "no graphs": NO_GRAPHS,
    "custom calls apart": {"xla_gpu_enable_command_buffer": _DEFAULT_COMMANDS.replace("CUSTOM_CALL,", "")},
    "loops too": {"xla_gpu_enable_command_buffer": f"{_DEFAULT_COMMANDS},WHILE"},
    "concurrent": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}
"""XLA's default is graphs of everything but loops, five kernels or more in each, one after the other; the body of
a loop has graphs of its own. Custom calls are the sparse kernels."""

CHOSEN = flags.DEFINE_list("settings", list(SETTINGS), "Which of them; no graphs must be one.")
flags.register_validator(
    CHOSEN,
    lambda names: {"no graphs"} <= set(names) <= set(SETTINGS),
    f"must be among {', '.join(SETTINGS)}, with 'no graphs'",
)


def compiled_settings(variant: Variant) -> dict[str, jax.stages.Compiled]:
    """The step of a compiled variant by setting."""

    def step(setting: str) -> jax.stages.Compiled:
        return variant.step_with(SETTINGS[setting]) if SETTINGS[setting] else variant.step

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(CHOSEN.value, pool.map(step, CHOSEN.value), strict=True))


def main(_: Sequence[str]) -> None:
    dense, state, batches = random_start(flags.FLAGS.config)
    variants = compiled_variants(NAMES.value, flags.FLAGS.config, state, batches[0])
    steps = {variant.name: compiled_settings(variant) for variant in variants}
    seconds: dict[tuple[str, str], list[float]] = {(v.name, setting): [] for v in variants for setting in CHOSEN.value}
    for _ in range(ROUNDS.value):
        for variant in variants:
            state = variant.enter(state, batches[0])
            for setting, step in steps[variant.name].items():
                state, times = time_steps(step, state, batches, warmup=WARMUP.value, timed=STEPS.value)
                seconds[variant.name, setting] += times

    table: dict[str, Any] = {}
    for variant in variants:
        by_setting = {setting: step_times(seconds[variant.name, setting]) for setting in steps[variant.name]}
        state = variant.enter(state, batches[0])
        state, kernels = launched(steps[variant.name]["no graphs"], state, batches)
        table[variant.name] = dict(kernels=kernels, settings=by_setting)
    write_results(
        OUTPUT.value,
        dict(
            batch_size=dense.batch_size,
            seq_len=dense.seq_len,
            model=dataclasses.asdict(dense.model),
            options=SETTINGS,
            recipes=table,
        ),
    )
    _print(table)


def launched(step: jax.stages.Compiled, state: Any, batches: Sequence[jax.Array]) -> tuple[Any, dict[str, float]]:
    """Kernels and copies of a step: how many, and their milliseconds, summed though some may overlap."""
    state, kernels = step_parts.trace_steps(step, state, batches, TRACED.value)
    return state, dict(count=len(kernels) / TRACED.value, total_ms=sum(kernel.ms for kernel in kernels) / TRACED.value)


def _print(table: dict[str, Any]) -> None:
    for name, row in table.items():
        print(f"{name}: {row['kernels']['count']:.0f} kernels, {row['kernels']['total_ms']:.2f} ms")
        first = next(iter(row["settings"].values()))["step_ms"]
        for setting, result in row["settings"].items():
            low, high = result["step_ms_quartiles"]
            print(
                f"    {setting:<24} {result['step_ms']:8.2f} ms ({low:.2f} to {high:.2f}) "
                f"{first / result['step_ms']:6.3f}x"
            )


if __name__ == "__main__":
    app.run(main)
