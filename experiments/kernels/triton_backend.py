"""Times the Triton backend against cuBLAS and against a dense product of the same style, in one process.

    python -m experiments.kernels.triton_backend --output=experiments/results/triton_h200.json

The dense product is that of dense_gluon.py: the frame, the copies and the layouts of the sparse ones, with the
dense `mma.sync`. On Hopper neither comes near what `wgmma` reaches, so there the first comparison tells what the
sparse instruction is worth in this style, and the second what a user gets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton as triton_package
from absl import app, flags

from experiments.kernels.dense_gluon import dense_matmul
from experiments.kernels.shapes import SHAPES_24, SHAPES_VENOM, SLICES, VENOM_BLOCKS, VENOM_GROUPS
from experiments.kernels.timing import median_ms, random_24, random_matrix, random_venom, slice_ids
from experiments.result_files import write_results
from sparse_lm.ops import triton
from sparse_lm.ops.triton.frame.tiling import Tiling

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

DENSE = [Tiling(128, 128, warps_m=2, warps_n=2, stages=3), Tiling(128, 256, warps_m=2, warps_n=4, stages=3)]
_ITERATIONS = 9


def best_ms(product: Callable, options: Sequence[dict[str, Any]], *operands: Any) -> tuple[float, dict[str, Any]]:
    """Returns the shortest time, and the options that gave it."""
    times = [median_ms(functools.partial(product, **o), *operands, iterations=_ITERATIONS) for o in options]
    return min(zip(times, options, strict=True), key=lambda pair: pair[0])


def bench_matmul_24() -> list[dict]:
    """Times 2:4 products against cuBLAS and against the dense product of the same style."""
    table = []
    for m, n, k in SHAPES_24:
        w, b, dense = random_24(m, k, seed=0), random_matrix(k, n, seed=1), random_matrix(m, k, seed=2)
        cublas = median_ms(jnp.matmul, dense, b)
        same_style, dense_options = best_ms(dense_matmul, [dict(tiling=tiling) for tiling in DENSE], dense, b)
        ours = median_ms(triton.matmul_24, w, b)
        turned = functools.partial(triton.matmul_24, out_transposed=True)
        row = dict(m=m, n=n, k=k, cublas_ms=cublas, dense_ms=same_style, matmul_24_ms=ours)
        row["matmul_24_transposed_ms"] = median_ms(turned, w, b)
        row["dense_tiling"] = dataclasses.asdict(dense_options["tiling"])
        row["speedup_over_same_style"], row["speedup_over_cublas"] = same_style / ours, cublas / ours
        print(row, flush=True)
        table.append(row)
    return table


def bench_matmul_venom() -> list[dict]:
    """Times products over the rows that blocks list, and of the rows that they list, likewise."""
    table = []
    for t, f, d in SHAPES_VENOM[:1]:
        y, b = random_matrix(t, f, seed=2), random_matrix(f, d, seed=1)
        w, x = random_24(f, d, seed=4), random_matrix(t, d, seed=3)
        cublas = median_ms(jnp.matmul, y, b)
        same_style, _ = best_ms(dense_matmul, [dict(tiling=tiling) for tiling in DENSE], y, b)
        for v in VENOM_BLOCKS:
            for m in VENOM_GROUPS:
                a = random_venom(t, f, v, m, seed=0)
                ours = median_ms(triton.matmul_venom, a, b)
                row = dict(t=t, f=f, d=d, v=v, m=m, cublas_ms=cublas, dense_ms=same_style, matmul_venom_ms=ours)
                row["speedup_over_same_style"], row["speedup_over_cublas"] = same_style / ours, cublas / ours
                sampled = functools.partial(triton.sampled_matmul_24, v=v)
                row["sampled_matmul_24_ms"] = median_ms(sampled, w, x, a.columns)
                print(row, flush=True)
                table.append(row)
    return table


def bench_scattered_matmul_24() -> list[dict]:
    """Times weight gradients of slices, tables made of the lists included, and the same operations in one product."""
    shape = SLICES[0]
    ids, share = slice_ids(shape, seed=0), shape.tokens // shape.experts
    x, y = random_matrix(shape.tokens, shape.dim, seed=1), random_24(shape.kept, shape.tokens, seed=5)
    listing = dict(v=shape.v, rows=shape.neurons, contiguous=shape.kept)
    row = dataclasses.asdict(shape)
    row["scattered_matmul_24_ms"] = median_ms(functools.partial(triton.scattered_matmul_24, **listing), y, x, ids)
    row["matmul_24_ms"] = median_ms(triton.matmul_24, random_24(shape.neurons, share, seed=4), x[:share])
    print(row, flush=True)
    return [row]


def _selections() -> dict[str, tuple]:
    """Returns the passes over memory: of each a function and its operands."""
    h, w = random_matrix(16384, 8192, seed=3), random_matrix(16384, 4096, seed=4, dtype=jnp.float32)
    weights = dict(method="soft_threshold", scale=1.5, dtype=jnp.bfloat16)
    draws = dict(method="mvue", axis=0, scale=1.0, dtype=h.dtype)
    draw_24 = lambda x: triton.sparsify_24(x, **draws, key=jax.random.key(0))  # noqa: E731
    draw_gradients = lambda dy, y: triton.squared_relu_gradients(dy, y, key=jax.random.key(0))  # noqa: E731
    y = triton.squared_relu_24(h)[0]
    cases: dict[str, tuple] = {
        "sparsify_24 of weights": (functools.partial(triton.sparsify_24, axis=-1, **weights), w),
        "sparsify_24 of weights, transposed": (functools.partial(triton.sparsify_24, axis=0, **weights), w),
        "sparsify_24 mvue, transposed": (draw_24, h),
        "squared_relu_24": (triton.squared_relu_24, h),
        "squared_relu_gradients": (triton.squared_relu_gradients, h, y),
        "squared_relu_gradients mvue": (draw_gradients, h, y),
    }
    y, _ = triton.squared_relu_venom(h, 128, 16)
    dy = random_matrix(16384, 2048, seed=5)
    cases["squared_relu_gradients of 128:2:16"] = triton.squared_relu_gradients, dy, y
    cases["squared_relu_gradients mvue of 128:2:16"] = draw_gradients, dy, y
    for m in VENOM_GROUPS:
        blocks = dict(v=128, m=m)
        select = functools.partial(triton.sparsify_venom, dtype=h.dtype, **blocks)
        cases[f"sparsify_venom 128:2:{m}"] = select, h
        cases[f"squared_relu_venom 128:2:{m}"] = functools.partial(triton.squared_relu_venom, **blocks), h
    return cases


def bench_selections() -> list[dict]:
    """Times passes over memory: the share that their bytes, each moved once, take of a copy's bandwidth."""
    h = random_matrix(16384, 8192, seed=3)
    bandwidth = 2 * h.nbytes / median_ms(lambda x: x + 1, h)
    table = []
    for name, (function, *operands) in _selections().items():
        ms = median_ms(function, *operands)
        touched = jax.tree.leaves((operands, jax.eval_shape(function, *operands)))
        moved = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in touched)
        x = operands[0]
        row = dict(name=name, shape=x.shape, dtype=str(x.dtype), ms=ms, share_of_copy=moved / ms / bandwidth)
        print(row, flush=True)
        table.append(row)
    return table


def main(_) -> None:
    tables: dict[str, Any] = dict(triton=triton_package.__version__)
    for bench in (bench_selections, bench_matmul_24, bench_scattered_matmul_24, bench_matmul_venom):
        tables[bench.__name__.removeprefix("bench_")] = bench()
        write_results(OUTPUT.value, tables)


if __name__ == "__main__":
    app.run(main)
