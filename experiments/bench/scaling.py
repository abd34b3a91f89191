r"""Times the whole step on 1, 2, 4, ... GPUs of a host with the same batch on each; along tensor, of all.

    python -m experiments.bench.scaling --config=configs/llama1b.py --devices=1,2,4,8 \
        --output=experiments/results/scaling_llama1b_data_h200.json
    python -m experiments.bench.scaling --config=configs/llama7b.py --axis=fsdp --devices=4,8 \
        --output=experiments/results/scaling_llama7b_fsdp_h200.json

Every count is a process of `experiments.bench.step` that sees so many GPUs. With --together, counts that
the host has GPUs for run side by side, which is quicker and, where they share power or cooling, slower
a step. The batch size of the configuration is that of one device. Efficiency is the tokens a second of a
GPU over those of a GPU of the smallest count: where the batch grows with the count, its step time over that
of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import config_flags

config_flags.DEFINE_config_file("config", "configs/llama1b.py", "The run; its batch is that of one device.")
DEVICES = flags.DEFINE_list("devices", ["1", "2", "4", "8"], "Counts of GPUs, ascending.")
AXIS = flags.DEFINE_enum("axis", "data", ["data", "fsdp", "expert", "tensor"], "Mesh axis that grows.")
RECIPES = flags.DEFINE_list("recipes", ["dense", "slices"], "Of experiments.bench.step.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each recipe.")
TOGETHER = flags.DEFINE_integer("together", 0, "GPUs of the host that counts may share; 0: one count at a time.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def waves(counts: Sequence[int], gpus: int) -> Iterable[list[tuple[int, int]]]:
    """Yields (first GPU, count) of the counts that run side by side on `gpus` GPUs; each alone if it is 0."""
    wave: list[tuple[int, int]] = []
    for count in counts:
        first = sum(c for _, c in wave)
        if wave and first + count > gpus:
            yield wave
            wave, first = [], 0
        wave.append((first, count))
    yield wave


def start(first: int, count: int, output: Path) -> subprocess.Popen:
    """Starts a process that measures `count` GPUs, from the `first` on."""
    config = flags.FLAGS.config
    batch = config.batch_size * (1 if AXIS.value == "tensor" else count)
    overrides = [argument for argument in sys.argv if argument.startswith("--config")]
    command = [
        sys.executable, "-m", "experiments.bench.step", *overrides, f"--config.batch_size={batch}",
        f"--config.mesh.{AXIS.value}={count}", f"--recipes={','.join(RECIPES.value)}", f"--rounds={ROUNDS.value}",
        "--traced=0", f"--output={output}",
    ]  # fmt: skip
    visible = ",".join(str(gpu) for gpu in range(first, first + count))
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible})


def with_efficiency(results: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Adds to the results, for each recipe, the tokens a second of one GPU over those of one of the smallest count."""
    fewest = min(results)
    for count, result in results.items():
        for name, row in result["recipes"].items():
            alone = results[fewest]["recipes"][name]["tokens_per_second"] / fewest
            row["efficiency"] = row["tokens_per_second"] / count / alone
    return results


def main(_: Sequence[str]) -> None:
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for wave in waves([int(count) for count in DEVICES.value], TOGETHER.value):
            outputs = {count: Path(directory, f"{count}.json") for _, count in wave}
            processes = {count: start(first, count, outputs[count]) for first, count in wave}
            for count, process in processes.items():
                if process.wait():
                    sys.exit(f"measuring {count} GPUs failed, exit status {process.returncode}; its output says why")
                results[count] = json.loads(outputs[count].read_text())
            with_efficiency(results)
            Path(OUTPUT.value).write_text(json.dumps(_table(results), indent=1) + "\n")
    for count, result in results.items():
        for name, row in result["recipes"].items():
            print(
                f"{count} GPUs {name:<16} {row['step_ms']:8.2f} ms {row['tokens_per_second']:10,.0f} tokens/s "
                f"{row['efficiency']:6.1%} {row['memory_gib']:6.1f} GiB"
            )


def _table(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Puts what all counts share once, the rest by count."""
    shared = {key: value for key, value in next(iter(results.values())).items() if key in _SHARED}
    own = {count: {k: v for k, v in result.items() if k not in _SHARED} for count, result in results.items()}
    return {**shared, "axis": AXIS.value, "together": TOGETHER.value, "devices": own}


_SHARED = ("device", "date", "jax", "platform_version", "seq_len", "model")


if __name__ == "__main__":
    app.run(main)
