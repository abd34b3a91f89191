"""Times sparsifiers and the passes over the hidden layer on Hopper against a copy and the XLA reference.

python -m experiments.kernels.passes --output=experiments/results/sparsify_h100.json
python -m experiments.kernels.passes --tables=e4m3 --output=e4m3.json
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.kernels.timing import median_ms, random_matrix
from experiments.result_files import write_results
from sparse_lm.ops import fp8, hopper, reference
from sparse_lm.ops.formats import Sparse24, SparseVenom

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
ONLY = flags.DEFINE_list("tables", [], "Names of tables; all by default.")

MATRICES = [  # rows, columns, dtype: weights of a 1B and a 7B model, activations of 16,384 tokens
    (8192, 2048, jnp.float32),
    (16384, 4096, jnp.float32),
    (16384, 8192, jnp.bfloat16),
]
HIDDEN = [(16384, 2048), (8192, 8192), (16384, 8192), (8192, 16384)]  # tokens, neurons (of a slice, in the first)
VENOM = [  # tokens, neurons, v, m
    (16384, 8192, 128, 8),
    (16384, 8192, 128, 16),
    (16384, 8192, 128, 32),
    (16384, 8192, 64, 16),
    (16384, 8192, 256, 16),
    (16384, 8192, 256, 32),
    (8192, 16384, 128, 16),
]
E4M3 = [(32768, 2048), (32768, 6144), (32768, 8192)]  # tokens; the width, queries with keys and values, neurons
STACKED_LAYERS = [(1, 8192, 2048), (25, 8192, 2048)]  # layers, neurons, model width


class Pass(NamedTuple):
    """One kernel at one size."""

    op: str
    case: dict[str, Any]  # what tells it from the op's others
    compute: Callable[[types.ModuleType], Callable[..., Any]]  # of a backend: gives no more than what is written
    draw: Callable[[], tuple[Any, ...]]  # gives what is read

    def moved(self) -> int:
        """Counts the bytes read and written, each once."""
        read = jax.eval_shape(self.draw)
        written = jax.eval_shape(self.compute(reference), *read)
        return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves((read, written)))


def sparsifiers() -> Iterator[Pass]:
    """Yields 2:4 along rows and along columns, of weights and of activations."""
    for rows, columns, dtype in MATRICES:
        for method in ("soft_threshold", "magnitude"):
            for axis in (-1, 0):
                options = dict(method=method, axis=axis, scale=1.5, dtype=jnp.bfloat16, key=None)
                yield Pass(
                    "sparsify_24",
                    dict(rows=rows, columns=columns, dtype=jnp.dtype(dtype).name, method=method, axis=axis),
                    lambda backend, options=options: functools.partial(backend.sparsify_24, **options),
                    functools.partial(_operands, rows, columns, dtype),
                )


def random_estimates() -> Iterator[Pass]:
    """Yields stochastic 2:4 along tokens, of the gradients of the hidden layer and of the output."""
    for rows, columns in ((16384, 8192), (16384, 2048)):
        options = dict(method="mvue", axis=0, scale=1.0, dtype=jnp.bfloat16)
        yield Pass(
            "sparsify_24",
            dict(rows=rows, columns=columns, method="mvue", axis=0),
            lambda backend, options=options: lambda x: backend.sparsify_24(x, **options, key=jax.random.key(0)),
            functools.partial(_operands, rows, columns, jnp.bfloat16),
        )


def passes() -> Iterator[Pass]:
    """Yields all others."""
    yield from random_estimates()
    for layers, neurons, dim in STACKED_LAYERS:
        yield Pass(
            "soft_threshold_24",
            dict(rows=layers * neurons, columns=dim, layers=layers),
            lambda backend: functools.partial(backend.soft_threshold_24, dtype=jnp.bfloat16),
            lambda shape=(layers * neurons, dim), layers=layers: (
                random_matrix(*shape, seed=1, dtype=jnp.float32),
                jnp.linspace(1, 2, layers),
            ),
        )
    for tokens, neurons in HIDDEN:
        case = dict(rows=tokens, columns=neurons)
        draw = functools.partial(_operands, tokens, neurons, jnp.bfloat16)
        yield Pass("squared_relu_24", case, lambda backend: backend.squared_relu_24, draw)
        yield Pass("squared_relu_gradients", case, _gradients, functools.partial(_hidden, tokens, neurons))
    for tokens, neurons, v, m in VENOM:
        case, options = dict(rows=tokens, columns=neurons, v=v, m=m), dict(v=v, m=m)
        draw = functools.partial(_operands, tokens, neurons, jnp.bfloat16)
        yield Pass(
            "squared_relu_venom",
            case,
            lambda backend, options=options: functools.partial(backend.squared_relu_venom, **options),
            draw,
        )
        yield Pass(
            "sparsify_venom",
            case,
            lambda backend, options=options: functools.partial(backend.sparsify_venom, **options, dtype=jnp.bfloat16),
            draw,
        )
        yield Pass(
            "squared_relu_gradients", case, _gradients, functools.partial(_hidden, tokens, neurons, venom=(v, m))
        )


def e4m3() -> Iterator[Pass]:
    """Yields rows in e4m3 with their transposes, of an array and of what is computed of products."""
    for rows, columns in E4M3:
        for op, products in (("fp8_rows", 0), ("fp8_squared_relu", 1), ("fp8_squared_relu_gradients", 2)):
            yield Pass(
                op,
                dict(rows=rows, columns=columns),
                lambda backend, op=op: getattr(backend, op),
                functools.partial(_products if products else _operands, rows, columns, products or jnp.bfloat16),
            )


def _products(rows: int, columns: int, count: int) -> tuple[fp8.Unscaled, ...]:
    factor = jnp.full((rows, 1), 0.5, jnp.bfloat16)
    return tuple(fp8.Unscaled(random_matrix(rows, columns, seed=seed), factor) for seed in range(count))


def _operands(rows: int, columns: int, dtype: Any) -> tuple[Array]:
    return (random_matrix(rows, columns, seed=1, dtype=dtype),)


def _hidden(tokens: int, neurons: int, venom: tuple[int, int] | None = None) -> tuple[Array, Sparse24 | SparseVenom]:
    """Draws a gradient of Y, condensed for a Venom one, and Y."""
    h = random_matrix(tokens, neurons, seed=1)
    if venom is None:
        return random_matrix(tokens, neurons, seed=2), jax.jit(reference.squared_relu_24)(h)[0]
    v, m = venom
    y, _ = jax.jit(lambda h: reference.squared_relu_venom(h, v, m))(h)
    return random_matrix(tokens, 4 * neurons // m, seed=2), y


def _gradients(backend: types.ModuleType) -> Callable[..., Any]:
    """Leaves out dH's metadata, which is that of Y."""

    def compute(dy, y):
        dh, dh_t, y_t = backend.squared_relu_gradients(dy, y)
        return dh.values, dh_t, y_t

    return compute


def copy_bandwidth() -> float:
    """Measures the bytes per second, read and written, of an elementwise pass over 268 MB."""
    x = random_matrix(16384, 8192, seed=0)
    return 2 * x.nbytes / median_ms(lambda x: x + 1, x) * 1e3


def measure(one: Pass, bandwidth: float) -> dict[str, Any]:
    """Times the kernel and XLA's program, and the kernel's share of `bandwidth` in bytes per second."""
    operands, moved = one.draw(), one.moved()
    ours = median_ms(one.compute(hopper), *operands)
    xla = median_ms(one.compute(reference), *operands, iterations=5)
    share = moved / ours * 1e3 / bandwidth
    label = " ".join(f"{name} {value}" for name, value in one.case.items())
    print(f"{one.op}, {label}: {ours:.4f} ms, {share:.0%} of copy; XLA {xla:.4f} ms", flush=True)
    return {**one.case, "bytes": moved, "ms": ours, "xla_ms": xla, "share_of_copy_bandwidth": share}


TABLES = dict(sparsify_24=sparsifiers, passes=passes, e4m3=e4m3)


def main(_) -> None:
    if unknown := set(ONLY.value) - TABLES.keys():
        raise app.UsageError(f"--tables: {sorted(unknown)} must be among {list(TABLES)}")
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    tables = {
        name: [{"op": one.op, **measure(one, bandwidth)} for one in TABLES[name]()] for name in ONLY.value or TABLES
    }
    write_results(OUTPUT.value, dict(copy_bandwidth=bandwidth, **tables))


if __name__ == "__main__":
    app.run(main)
