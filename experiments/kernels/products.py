"""Times a backend's sparse products against cuBLAS (XLA's dense product of the same shape), in one process.

python -m experiments.kernels.products --output=experiments/results/matmul_h100.json
python -m experiments.kernels.products --backend=triton --tables=matmul_24,matmul_venom,slices --output=triton.json
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.kernels.operands import (
    BACKENDS,
    SHAPES_24,
    SHAPES_FP8,
    SHAPES_VENOM,
    SLICES,
    VENOM_BLOCKS,
    VENOM_GROUPS,
    backend,
    random_24,
    random_matrix,
    random_venom,
    slice_ids,
)
from experiments.result_files import show, write_results
from experiments.timing import median_ms
from sparse_lm.model.linear import compiler_options
from sparse_lm.model.loss import chunked_cross_entropy
from sparse_lm.ops import fp8
from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES

Rows = Iterator[dict[str, Any]]


def matmul_24(ops: types.ModuleType) -> Rows:
    """Times 2:4 products; with the result as it comes, and transposed."""
    for m, n, k in SHAPES_24:
        w, b, dense = random_24(m, k, seed=0), random_matrix(k, n, seed=1), random_matrix(m, k, seed=2)
        cublas, ours = median_ms(jnp.matmul, dense, b), median_ms(ops.matmul_24, w, b)
        turned = median_ms(functools.partial(ops.matmul_24, out_transposed=True), w, b)
        times = dict(cublas_ms=cublas, matmul_24_ms=ours, matmul_24_transposed_ms=turned)
        yield dict(m=m, n=n, k=k, **times, speedup=cublas / ours, speedup_transposed=cublas / turned)


def matmul_24_fp8(ops: types.ModuleType) -> Rows:
    """Times products with activations [T, F] (O = Y W2) and with weights (H = X W1^T), dense and 2:4, bf16 and FP8.

    FP8's operands are given in e4m3; "to_e4m3" is what it takes to bring the 2:4, and the dense, operand of the first
    kind to it.
    """
    for t, d, f in SHAPES_FP8:
        for m, n, k in ((t, d, f), (f, t, d)):
            w, dense, b_t = random_24(m, k, seed=0), random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
            w8, dense8, b8_t = (jax.tree.map(_to_e4m3, operand) for operand in (w, dense, b_t))
            row = dict(m=m, n=n, k=k, dense_bf16_ms=median_ms(_times, dense, b_t))
            row["dense_fp8_ms"] = median_ms(_times, dense8, b8_t, compiler_options=fp8.COMPILER_OPTIONS)
            row["sparse_bf16_ms"] = median_ms(ops.matmul_24, w, b_t.T)
            scale = jnp.ones((m, 1), jnp.float32)
            for config in CANDIDATES:
                product = functools.partial(ops.matmul_24_fp8, config=config)
                row[f"sparse_fp8_{config.tile_m}x{config.tile_n}_ms"] = median_ms(product, w8, b8_t, scale)
            row["to_e4m3_24_ms"], row["to_e4m3_ms"] = median_ms(fp8.by_rows, w.values), median_ms(fp8.by_rows, dense)
            yield row


def _to_e4m3(x: Array) -> Array:
    return x.astype(fp8.E4M3) if x.dtype == jnp.bfloat16 else x


def _times(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w.T, preferred_element_type=jnp.bfloat16)


def matmul_venom(ops: types.ModuleType) -> Rows:
    """Times products over listed rows of the dense operand, and of listed rows of the 2:4 one; rows in any order.

    Sampled products are compared with the faster of cuBLAS' products of the two layouts.
    """
    for t, f, d in SHAPES_VENOM:
        b, x, w = random_matrix(f, d, seed=1), random_matrix(t, d, seed=3), random_24(f, d, seed=4)
        cublas = median_ms(jnp.matmul, random_matrix(t, f, seed=2), b)
        cublas_sampled = median_ms(lambda x, w: x @ w.T, x, b)
        for v, m in itertools.product(VENOM_BLOCKS, VENOM_GROUPS):
            a = random_venom(t, f, v, m, seed=0)
            venom = median_ms(ops.matmul_venom, a, b)
            sampled = median_ms(functools.partial(ops.sampled_matmul_24, v=v), w, x, a.columns)
            row = dict(t=t, f=f, d=d, v=v, m=m, cublas_ms=cublas, matmul_venom_ms=venom, speedup=cublas / venom)
            row |= dict(cublas_sampled_ms=cublas_sampled, sampled_matmul_24_ms=sampled)
            yield row | dict(speedup_sampled=min(cublas, cublas_sampled) / sampled)


def slices(ops: types.ModuleType) -> Rows:
    """Times products of slices of neurons against `matmul_24` with the same work in one product.

    Blocks of tokens list their expert's contiguous neurons; tables made of the lists are included.
    """
    for shape in SLICES:
        about, share, kept = shape._asdict(), shape.tokens // shape.experts, shape.kept
        ids, listing = slice_ids(shape, seed=0), dict(v=shape.v, contiguous=kept)
        x, w2 = random_matrix(shape.tokens, shape.dim, seed=1), random_matrix(shape.neurons, shape.dim, seed=3)
        w1, w1_slice = random_24(shape.neurons, shape.dim, seed=0), random_24(kept, shape.dim, seed=0)
        y, y_t = random_24(shape.tokens, kept, seed=2), random_24(kept, shape.tokens, seed=5)
        size, m = (shape.tokens, shape.neurons), 4 * shape.experts
        hidden = SparseVenom(y.values, y.metadata, ids, size, shape.v, m, kept)
        sampled = functools.partial(ops.sampled_matmul_24, **listing)
        scattered = functools.partial(ops.scattered_matmul_24, rows=shape.neurons, **listing)
        transposed = functools.partial(ops.matmul_24, out_transposed=True)
        products = dict(
            sampled=(median_ms(sampled, w1, x, ids), median_ms(transposed, w1_slice, x.T)),
            venom=(median_ms(ops.matmul_venom, hidden, w2), median_ms(ops.matmul_24, y, w2[:kept])),
            scattered=(
                median_ms(scattered, y_t, x, ids),
                median_ms(ops.matmul_24, random_24(shape.neurons, share, seed=4), x[:share]),
            ),
        )
        for product, (ms, ungrouped) in products.items():
            yield dict(product=product, **about, ms=ms, ungrouped_ms=ungrouped, rate=ungrouped / ms)


def loss(_: types.ModuleType, tokens: int = 32_768, dim: int = 2048) -> Rows:
    """Times the loss with its gradients as the model computes it, by chunk: llama1b's vocabulary, then a small one.

    The bound is what its products take at 780 TFLOP/s, about what an H200 reaches in bf16, or at twice that.
    """
    hidden = random_matrix(tokens, dim, seed=1)
    for (vocabulary, chunk), precision in itertools.product(
        ((128_256, 2048), (128_256, 8192), (16_384, 8192), (16_384, 32_768)), ("bf16", "fp8")
    ):
        unembedding = random_matrix(vocabulary, dim, seed=2, dtype=jnp.float32) * 0.02
        targets = jax.random.randint(jax.random.key(3), (tokens,), 0, vocabulary)
        loss = functools.partial(chunked_cross_entropy, chunk=chunk, precision=precision)
        model, options = jax.value_and_grad(loss, argnums=(0, 1)), compiler_options(precision)
        ms = median_ms(model, hidden, unembedding, targets, compiler_options=options)
        bound = 6e3 * tokens * dim * vocabulary / (780e12 if precision == "bf16" else 1560e12)
        about = dict(tokens=tokens, dim=dim, vocabulary=vocabulary, chunk=chunk, precision=precision)
        yield dict(**about, ms=ms, bound_ms=bound)


TABLES = dict(matmul_24=matmul_24, matmul_24_fp8=matmul_24_fp8, matmul_venom=matmul_venom, slices=slices, loss=loss)


def main(_) -> None:
    tables: dict[str, Any] = {}
    ops = backend(flags.FLAGS.backend, flags.FLAGS.tables)
    for name in flags.FLAGS.tables:
        tables[name] = [show(row) for row in TABLES[name](ops)]
        write_results(**tables)


if __name__ == "__main__":
    flags.DEFINE_enum("backend", "hopper", BACKENDS, "Whose kernels.")
    flags.DEFINE_list("tables", list(TABLES), "Tables to make.")
    flags.register_validator("tables", lambda names: set(names) <= set(TABLES), f"must be among {', '.join(TABLES)}")
    app.run(main)
