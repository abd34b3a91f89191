"""Times the products' tilings on this GPU, and writes how near to the best the heuristics come.

python -m experiments.kernels.tune --report=experiments/results/heuristics_h100.json
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags
from jax import Array

from experiments.kernels.shapes import UNTUNED_FFN_SHAPES
from experiments.kernels.timing import median_ms, random_24, random_columns, random_matrix
from experiments.result_files import write_results
from sparse_lm.ops import hopper
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.hopper.frame.tiling import Tiling
from sparse_lm.ops.hopper.products.matmul_24 import heuristic_config as heuristic_24
from sparse_lm.ops.hopper.products.matmul_venom import heuristic_config as heuristic_venom

REPORT = flags.DEFINE_string("report", None, "JSON file to write.", required=True)

_ITERATIONS = 7
_LARGEST = 16384  # size of an operand

CANDIDATES_24 = [Tiling(256, 192), Tiling(128, 256, raster_width=16)]
CANDIDATES_VENOM = {  # by v
    128: [Tiling(128, 256, share_b=False, raster_width=width) for width in (2, 4)],
    256: [Tiling(256, 128, share_b=False, raster_width=4), Tiling(256, 192, share_b=False, raster_width=2)],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of one shape, the configurations it can have, and the heuristic's."""

    kernel: str
    shape: tuple[int, ...]
    function: Callable
    operands: tuple
    candidates: Sequence[Any]
    heuristic: Any

    def times(self) -> dict[Any, float]:
        """Times every candidate, and the heuristic's configuration, in milliseconds."""
        configs = dict.fromkeys([*self.candidates, self.heuristic])
        for config in configs:
            function = functools.partial(self.function, config=config)
            configs[config] = median_ms(function, *self.operands, iterations=_ITERATIONS)
        return configs


def case_24(m: int, n: int, k: int) -> Case:
    """Makes the case 2:4 [M, K] x [K, N]."""
    operands = sparse(m, k), dense(k, n)
    return Case("matmul_24", (m, n, k), hopper.matmul_24, operands, CANDIDATES_24, heuristic_24(m, n, k))


def case_venom(t: int, f: int, d: int, v: int, m: int) -> Case:
    """Makes the case V:2:M [T, F] x [F, D]."""
    condensed = sparse(t, 4 * f // m)
    columns = random_columns(t, f, v, m, seed=2)
    a = SparseVenom(condensed.values, condensed.metadata, columns, (t, f), v, m)
    candidates, heuristic = CANDIDATES_VENOM[v], heuristic_venom(t, d, 4 * f // m, v)
    return Case("matmul_venom", (t, d, f, v, m), hopper.matmul_venom, (a, dense(f, d)), candidates, heuristic)


def ffn_cases(t: int, f: int, d: int) -> Iterator[Case]:
    """Yields every product of an FFN of T tokens, F neurons and width D: which operand is 2:4 depends on the recipe."""
    yield case_24(f, t, d)
    yield case_24(t, d, f)
    yield case_24(f, d, t)
    for m in (8, 16):
        yield case_venom(t, f, d, 128, m)
    yield case_venom(t, f, d, 256, 16)


@functools.cache
def _random_matrix() -> Array:
    return random_matrix(_LARGEST, _LARGEST, seed=0)


@functools.cache
def _random_24() -> Sparse24:
    return random_24(_LARGEST, _LARGEST, seed=1)


def dense(rows: int, width: int) -> Array:
    """Cuts a part of one random matrix, which all cases share."""
    return _random_matrix()[:rows, :width]


def sparse(rows: int, width: int) -> Sparse24:
    """Cuts a part of one random 2:4 matrix, in whole tiles."""
    whole = _random_24()
    metadata = whole.metadata[: rows // 64, : width // 64]
    return Sparse24(whole.values[:rows, : width // 2], metadata, (rows, width))


def main(_) -> None:
    rows = []
    for case in itertools.chain(*(ffn_cases(*shape) for shape in UNTUNED_FFN_SHAPES)):
        times = case.times()
        heuristic, best = times[case.heuristic], min(times.values())
        row = dict(kernel=case.kernel, shape=case.shape, heuristic_ms=heuristic, best_ms=best, ratio=heuristic / best)
        print(f"{case.kernel} {case.shape}: heuristic {heuristic:.4f} ms, {row['ratio']:.3f} of the best", flush=True)
        rows.append(row)
    write_results(REPORT.value, dict(untuned=rows, worst=max(row["ratio"] for row in rows)))


if __name__ == "__main__":
    app.run(main)
