"""Times the products' configurations on this GPU and records the best of each shape in the backend's tuned.json.

python -m experiments.kernels.tune
python -m experiments.kernels.tune --backend=triton
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from absl import app

from experiments.kernels.operands import (
    SHAPES_24,
    SHAPES_VENOM,
    VENOM_BLOCKS,
    VENOM_GROUPS,
    backend,
    random_24,
    random_matrix,
    random_venom,
)
from experiments.timing import median_ms
from sparse_lm.ops import hopper, triton, tuned
from sparse_lm.ops.hopper.products import matmul_24, matmul_venom, sampled_rows_24

FFN_SHAPES = [(t, f, d) for t in (8192, 16384) for f, d in ((8192, 2048), (16384, 4096))]

CANDIDATES_24 = [matmul_24.Config(256, 192), matmul_24.Config(128, 256, raster_width=16)]
CANDIDATES_VENOM = {  # by v
    128: [matmul_venom.Config(128, 256, raster_width=2), matmul_venom.Config(128, 256, raster_width=4)],
    256: [
        matmul_venom.Config(256, 128, raster_width=4),
        matmul_venom.Config(256, 128, stages=5),
        matmul_venom.Config(256, 192),
    ],
}
CANDIDATES_ROWS = [sampled_rows_24.Config(256, 128, stages=5, raster_width=width) for width in (4, 8)]


class Case(NamedTuple):
    """A product of one shape, and the configurations that it can have."""

    kernel: str
    shape: tuple[int, ...]
    product: Callable
    operands: tuple
    configs: Sequence[Any]

    def times(self) -> dict[Any, float]:
        """Times every configuration, in milliseconds."""
        products = {config: functools.partial(self.product, config=config) for config in self.configs}
        return {config: median_ms(p, *self.operands, iterations=7) for config, p in products.items()}


def cases_24(product: Callable, shapes: Sequence, configs: Callable[[int, int, int], Sequence]) -> Iterator[Case]:
    """Yields 2:4 [M, K] x [K, N]."""
    for m, n, k in dict.fromkeys(shapes):
        operands = random_24(m, k, seed=0), random_matrix(k, n, seed=1)
        yield Case("matmul_24", (m, n, k), product, operands, configs(m, n, k))


def hopper_cases() -> Iterator[Case]:
    """Yields the products of FFNs of T tokens, F neurons and width D; candidates, and what the heuristic chooses."""
    of_ffns = [shape for t, f, d in FFN_SHAPES for shape in ((f, t, d), (t, d, f), (f, d, t))]
    shapes = [*SHAPES_24, *of_ffns]
    yield from cases_24(hopper.matmul_24, shapes, lambda *s: [*CANDIDATES_24, matmul_24.heuristic_config(*s)])
    for (t, f, d), (v, m) in itertools.product(FFN_SHAPES, ((128, 8), (128, 16), (256, 16))):
        a, b, kept = random_venom(t, f, v, m, seed=0), random_matrix(f, d, seed=1), 4 * f // m
        configs = [*CANDIDATES_VENOM[v], matmul_venom.heuristic_config(t, d, kept, v)]
        yield Case("matmul_venom", (t, d, f, v, m), hopper.matmul_venom, (a, b), configs)
        if v == 128:
            operands = random_24(f, d, seed=0), random_matrix(t, d, seed=1), a.columns
            configs = [*CANDIDATES_ROWS, sampled_rows_24.heuristic_config(v)]
            product = functools.partial(sampled_rows_24.sampled_rows_24, v=v)
            yield Case("sampled_rows_24", (t, kept, d, v), product, operands, configs)


def triton_cases() -> Iterator[Case]:
    """Yields products with the tilings that fit into this GPU's shared memory."""
    from sparse_lm.ops.triton.frame import device
    from sparse_lm.ops.triton.products import matmul_24, matmul_venom

    fits = device.shared_bytes(device.compute_capability())
    of_24, of_venom = ([t for t in m.CANDIDATES if t.shared_bytes <= fits] for m in (matmul_24, matmul_venom))
    yield from cases_24(triton.matmul_24, SHAPES_24, lambda *_: of_24)
    (t, f, d), *_ = SHAPES_VENOM
    for v, m in itertools.product(VENOM_BLOCKS, VENOM_GROUPS):
        operands = random_venom(t, f, v, m, seed=0), random_matrix(f, d, seed=1)
        whole = [tiling for tiling in of_venom if v % tiling.tile_m == 0]
        yield Case("matmul_venom", (t, d, f, v, m), triton.matmul_venom, operands, whole)


def main(_) -> None:
    path, cases = (tuned.HOPPER, hopper_cases()) if backend() is hopper else (tuned.TRITON, triton_cases())
    entries: dict[str, dict[str, Any]] = {}
    for case in cases:
        shape, times = "x".join(map(str, case.shape)), case.times()
        best = min(times, key=times.get)
        print(f"{case.kernel} {shape}: {times[best]:.4f} ms of {max(times.values()):.4f}, {best}", flush=True)
        entries.setdefault(case.kernel, {})[shape] = dataclasses.asdict(best)
    by_device = json.loads(path.read_text()) | {jax.devices()[0].device_kind: entries}
    path.write_text(json.dumps(by_device, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
