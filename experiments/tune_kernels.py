"""Times the products' configurations on this GPU and records the best of each shape in tuned.json.

python -m experiments.tune_kernels
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app

from experiments.kernel_shapes import SHAPES_24, SHAPES_VENOM, VENOM_GROUPS, V
from experiments.kernel_timing import median_ms, random_24, random_matrix, random_venom
from sparse_lm.ops import hopper
from sparse_lm.ops.hopper import tuning
from sparse_lm.ops.hopper.matmul_24 import Config as Config24
from sparse_lm.ops.hopper.matmul_venom import Config as ConfigVenom

CANDIDATES_24 = [
    Config24(256, 192, raster_width=4),
    Config24(256, 192, raster_width=8),
    Config24(256, 192, raster_width=16),
    Config24(256, 192, raster_along_m=False),
    Config24(128, 256, raster_width=16),
]
CANDIDATES_VENOM = [
    ConfigVenom(cluster=2, raster_width=2),
    ConfigVenom(cluster=2, raster_width=4),
    ConfigVenom(cluster=1, raster_width=4),
]


def best(function: Callable, candidates: Sequence[Any], *args: Any) -> dict[str, Any]:
    """Fields of the fastest candidate."""
    times = [median_ms(functools.partial(function, config=config), *args) for config in candidates]
    fastest = candidates[times.index(min(times))]
    print(f"{min(times):.4f} ms of {min(times):.4f} .. {max(times):.4f}: {fastest}", flush=True)
    return dataclasses.asdict(fastest)


def main(_) -> None:
    entries = {"matmul_24": {}, "matmul_venom": {}}
    for m, n, k in SHAPES_24:
        operands = random_24(m, k, seed=0), random_matrix(k, n, seed=1)
        entries["matmul_24"][f"{m}x{n}x{k}"] = best(hopper.matmul_24, CANDIDATES_24, *operands)
    for t, f, d in SHAPES_VENOM:
        b = random_matrix(f, d, seed=1)
        for group in VENOM_GROUPS:
            a = random_venom(t, f, V, group, seed=0)
            entries["matmul_venom"][f"{t}x{d}x{f}x{group}"] = best(hopper.matmul_venom, CANDIDATES_VENOM, a, b)
    tuned = json.loads(tuning.PATH.read_text())
    tuned[jax.devices()[0].device_kind] = entries
    tuning.PATH.write_text(json.dumps(tuned, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
