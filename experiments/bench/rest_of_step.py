"""Times loss, norms and rotary positions of a step on one GPU, as the model computes them.

    python -m experiments.bench.rest_of_step --output=experiments/results/rest_of_step_h200.json

A row has kernel times (CUPTI), the time on the clock of a call among many, and a bound: the least bytes at 4.0 TB/s or
the products' FLOPs at 780 TFLOP/s, the larger one, both near what an H200 reaches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array, lax

from experiments.kernels.timing import random_matrix, time_by_kernel
from experiments.result_files import write_results
from sparse_lm import ops
from sparse_lm.model.attention import rotate
from sparse_lm.model.embedding import unembed
from sparse_lm.model.loss import chunked_cross_entropy
from sparse_lm.ops.norm import rms_norm

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
ONLY = flags.DEFINE_list("parts", ["loss", "norm", "rotary"], "Parts of the step to time.")

TOKENS, SEQUENCE, DIM, HEADS = 32_768, 4096, 2048, 16
EPSILON = 1e-5
BYTES_PER_S, FLOPS = 4.0e12, 780e12


class Row(NamedTuple):
    """Holds one function to time; the bound counts `flops` of products and `bytes`."""

    name: str
    function: Callable
    operands: tuple[Array, ...]
    flops: float = 0
    bytes: float = 0


def products_of_loss(hidden: Array, unembedding: Array, grad_logits: Array) -> tuple[Array, ...]:
    """Multiplies as one chunk of the loss does."""
    matrix = unembedding.astype(hidden.dtype)
    logits = unembed(hidden, matrix)
    grad_matrix = jnp.matmul(grad_logits.T, hidden, preferred_element_type=jnp.float32)
    return logits, grad_logits @ matrix, grad_matrix


def losses() -> Iterator[Row]:
    """Yields the loss with its gradients by chunk: llama1b's vocabulary, then a small one."""
    hidden = random_matrix(TOKENS, DIM, 1)
    for vocabulary, chunks in ((128_256, (2048, 8192)), (16_384, (8192, 32_768))):
        unembedding = random_matrix(vocabulary, DIM, 2, jnp.float32) * 0.02
        targets = jax.random.randint(jax.random.key(3), (TOKENS,), 0, vocabulary)
        flops = 6 * TOKENS * DIM * vocabulary
        # Exponentials of logits and gradients are each written once and read once or twice, in bfloat16.
        bound = dict(flops=flops, bytes=TOKENS * vocabulary * (2 + 2 + 2 + 2 + 2))
        of_vocabulary = f"loss V={vocabulary}"
        if vocabulary > TOKENS:
            grad_logits = random_matrix(8192, vocabulary, 4)
            products = products_of_loss, (hidden[:8192], unembedding, grad_logits), flops * 8192 / TOKENS
            yield Row(f"{of_vocabulary} products of 8192", *products)
            del grad_logits, products
        for chunk in chunks:
            model = jax.value_and_grad(functools.partial(chunked_cross_entropy, chunk=chunk), argnums=(0, 1))
            yield Row(f"{of_vocabulary} model chunk={chunk}", model, (hidden, unembedding, targets), **bound)


def _backward(implementation: str | None, x: Array, scale: Array, grad_normed: Array, grad_x: Array) -> tuple:
    """Computes the gradients behind a saved sum `x`; `grad_x` is the residual's."""
    add_norm = functools.partial(ops.add_norm, epsilon=EPSILON, implementation=implementation)
    _, vjp = jax.vjp(lambda x, scale: add_norm(x, None, scale), x, scale)
    return vjp((grad_x, grad_normed))


def _backward_by_xla(x: Array, scale: Array, grad_normed: Array, grad_x: Array) -> tuple:
    """Makes the norm again first, as weight gradients need it."""
    normed = rms_norm(x, scale, EPSILON)
    normed, grad_normed = lax.optimization_barrier((normed, grad_normed))
    return normed, *_backward("reference", x, scale, grad_normed, grad_x)


def norms() -> Iterator[Row]:
    """Yields norms with and without a residual's sum, and backward passes: as the model computes them, and by XLA."""
    for dim in (DIM, 2560):
        x, update, grad_normed, grad_x = (random_matrix(TOKENS, dim, seed) for seed in range(4))
        scale, array = jnp.ones(dim), 2.0 * TOKENS * dim
        backward = x, scale, grad_normed, grad_x
        for name, implementation in (("model", None), ("XLA", "reference")):
            add_norm = functools.partial(ops.add_norm, epsilon=EPSILON, implementation=implementation)
            yield Row(f"norm D={dim} {name} sum", add_norm, (x, update, scale), bytes=4 * array)
            alone = lambda x, scale, add_norm=add_norm: add_norm(x, None, scale)[1]  # noqa: E731
            yield Row(f"norm D={dim} {name} alone", alone, (x, scale), bytes=2 * array)
        of_model = functools.partial(_backward, None)
        yield Row(f"norm D={dim} model backward", of_model, backward, bytes=4 * array)
        yield Row(f"norm D={dim} XLA backward, made again", _backward_by_xla, backward, bytes=5 * array)


def rotations() -> Iterator[Row]:
    """Yields the rotation of queries and keys; their gradients' is the same the other way."""
    q, k = (random_matrix(TOKENS, DIM, seed).reshape(-1, SEQUENCE, HEADS, DIM // HEADS) for seed in range(2))

    def both(q, k):
        return tuple(rotate(x, jnp.arange(SEQUENCE), 500_000.0) for x in (q, k))

    yield Row("rotary model", both, (q, k), bytes=8.0 * TOKENS * DIM)


PARTS = {"loss": losses, "norm": norms, "rotary": rotations}


def measure(row: Row, calls: int = 8) -> dict[str, Any]:
    """Compiles and times one function."""
    start = time.perf_counter()
    compiled = jax.jit(row.function).lower(*row.operands).compile()
    compile_s = time.perf_counter() - start
    kernels_ms, kernels = time_by_kernel(compiled, *row.operands)
    start = time.perf_counter()
    for _ in range(calls):
        result = compiled(*row.operands)
    jax.block_until_ready(result)
    clock_ms = 1e3 * (time.perf_counter() - start) / calls
    bound_ms = 1e3 * max(row.flops / FLOPS, row.bytes / BYTES_PER_S)
    gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    return dict(
        name=row.name,
        kernels_ms=kernels_ms,
        clock_ms=clock_ms,
        bound_ms=bound_ms,
        temporary_gib=gib,
        compile_s=compile_s,
        kernels=kernels,
    )


def main(_) -> None:
    table = []
    for part in ONLY.value:
        for row in PARTS[part]():
            result = measure(row)
            table.append(result)
            print(
                f"{row.name:<45} kernels {result['kernels_ms']:8.3f} ms, clock {result['clock_ms']:8.3f} ms, "
                f"bound {result['bound_ms']:8.3f} ms, {result['temporary_gib']:.1f} GiB, "
                f"compiled in {result['compile_s']:.0f} s",
                flush=True,
            )
            write_results(OUTPUT.value, dict(rest_of_step=table))


if __name__ == "__main__":
    app.run(main)
