"""Times a backend's sparsifiers and passes over memory against a copy and the XLA reference.

python -m experiments.kernels.passes --output=experiments/results/passes_h200.json
python -m experiments.kernels.passes --tables=norms --output=norms.json
python -m experiments.kernels.passes --backend=triton --tables=sparsify_24,passes --output=triton.json
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
from jax import Array, lax

from experiments.kernels.operands import BACKENDS, backend, random_matrix
from experiments.result_files import show, write_results
from experiments.timing import median_ms
from sparse_lm.ops import fp8, reference, transposable_mask
from sparse_lm.ops.formats import Sparse24, SparseVenom

HIDDEN = [(16384, 2048), (8192, 8192), (16384, 8192), (8192, 16384)]  # tokens, neurons (of a slice, in the first)
VENOM = [  # tokens, neurons, v, m
    (16384, 8192, 128, 8),
    (16384, 8192, 128, 16),
    (16384, 8192, 128, 32),
    (16384, 8192, 256, 16),
    (16384, 8192, 256, 32),
]
E4M3 = [(32768, 2048), (32768, 6144), (32768, 8192)]  # tokens; the width, queries with keys and values, neurons
NORMS = [(32768, 2048), (32768, 2560)]  # tokens, width
STACKED_LAYERS = [(1, 8192, 2048), (25, 8192, 2048)]  # layers, neurons, model width

Function = Callable[..., Any]


class Pass(NamedTuple):
    """One kernel at one size.

    Attributes:
      op: its name.
      case: what tells it from the op's others.
      draw: gives what is read.
      options: keyword arguments of the op.
      make: gives the function of a backend, which returns no more than what is written; the op itself by default.
    """

    op: str
    case: dict[str, Any]
    draw: Callable[[], tuple[Any, ...]]
    options: dict[str, Any] = {}  # noqa: RUF012 (nothing writes to it)
    make: Callable[[types.ModuleType], Function] | None = None

    def function(self, ops: types.ModuleType) -> Function:
        """Returns the pass as a backend computes it."""
        return self.make(ops) if self.make else functools.partial(getattr(ops, self.op), **self.options)

    def moved(self, ops: types.ModuleType) -> int:
        """Counts the bytes that a backend's function reads and writes, each once."""
        read = jax.eval_shape(self.draw)
        written = jax.eval_shape(self.function(ops), *read)
        return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves((read, written)))


def sparsifiers() -> Iterator[Pass]:
    """Yields 2:4 of activations along rows and along columns, and by chance along tokens."""
    rows, columns = 16384, 8192
    for axis in (-1, 0):
        case = dict(rows=rows, columns=columns, method="magnitude", axis=axis)
        options = dict(method="magnitude", axis=axis, dtype=jnp.bfloat16, key=None)
        yield Pass("sparsify_24", case, functools.partial(_matrix, rows, columns), options)
    for rows, columns in ((16384, 8192), (16384, 2048)):  # gradients of the hidden layer, and of the output
        case, draw = dict(rows=rows, columns=columns, method="mvue", axis=0), functools.partial(_matrix, rows, columns)
        options = dict(method="mvue", axis=0, dtype=jnp.bfloat16, key=jax.random.key(0))
        yield Pass("sparsify_24", case, draw, options)


def masked() -> Iterator[Pass]:
    """Yields both forms of weights under one mask."""
    for rows, columns in ((8192, 2048), (16384, 4096)):
        draw = functools.partial(_matrix, rows, columns, jnp.float32)
        with_mask = lambda draw=draw: (*draw(), jax.jit(transposable_mask)(*draw()))  # noqa: E731
        yield Pass("sparsify_24_tiles", dict(rows=rows, columns=columns), with_mask, dict(dtype=jnp.bfloat16))


def passes() -> Iterator[Pass]:
    """Yields passes over weights and over the hidden layer."""
    for layers, neurons, dim in STACKED_LAYERS:
        case = dict(rows=layers * neurons, columns=dim, layers=layers, axis=-1)
        draw = functools.partial(_matrix, layers * neurons, dim, jnp.float32)
        scaled = lambda draw=draw, layers=layers: (*draw(), jnp.linspace(1, 2, layers))  # noqa: E731
        yield Pass("soft_threshold_24", case, scaled, dict(dtype=jnp.bfloat16, axis=-1))
    rows, columns = 16384, 4096
    one_layer = lambda: (*_matrix(rows, columns, jnp.float32), jnp.ones(1))  # noqa: E731
    case = dict(rows=rows, columns=columns, layers=1, axis=0)
    yield Pass("soft_threshold_24", case, one_layer, dict(dtype=jnp.bfloat16, axis=0))
    for tokens, neurons in HIDDEN:
        case, hidden = dict(rows=tokens, columns=neurons), functools.partial(_hidden, tokens, neurons)
        yield Pass("squared_relu_24", case, functools.partial(_matrix, tokens, neurons))
        yield Pass("squared_relu_gradients", case, hidden, make=_gradients("squared_relu_gradients"))
        stochastic = _gradients("squared_relu_gradients", key=jax.random.key(0))
        yield Pass("squared_relu_gradients", case | dict(method="mvue"), hidden, make=stochastic)


def venom() -> Iterator[Pass]:
    """Yields passes over the hidden layer of `venom`."""
    for tokens, neurons, v, m in VENOM:
        case, draw = dict(rows=tokens, columns=neurons, v=v, m=m), functools.partial(_matrix, tokens, neurons)
        yield Pass("squared_relu_venom", case, draw, dict(v=v, m=m))
        hidden = functools.partial(_hidden, tokens, neurons, venom=(v, m))
        yield Pass("squared_relu_gradients", case, hidden, make=_gradients("squared_relu_gradients"))


def e4m3() -> Iterator[Pass]:
    """Yields rows in e4m3 with their transposes, of an array and of what is computed of products."""
    for rows, columns in E4M3:
        case = dict(rows=rows, columns=columns)
        yield Pass("fp8_rows", case, functools.partial(_matrix, rows, columns))
        for op, count in (("fp8_squared_relu", 1), ("fp8_squared_relu_gradients", 2)):
            yield Pass(op, case, functools.partial(_products, rows, columns, count))


def norms() -> Iterator[Pass]:
    """Yields norms with and without a residual's sum, and the gradients behind a saved sum."""
    for tokens, dim in NORMS:
        case, draw = dict(rows=tokens, columns=dim), functools.partial(_norm_operands, tokens, dim)
        yield Pass("add_norm", case, functools.partial(draw, 2), dict(epsilon=1e-5))
        yield Pass("norm alone", case, functools.partial(draw, 1), make=_norm_alone)
        yield Pass("norm backward", case, functools.partial(draw, 3), make=_norm_backward)


def _norm_operands(tokens: int, dim: int, count: int) -> tuple[Array, ...]:
    return (*_matrices(tokens, dim, count), jnp.ones(dim))


def _norm_alone(ops: types.ModuleType) -> Function:
    return lambda x, scale: ops.add_norm(x, None, scale, 1e-5)[1]


def _norm_backward(ops: types.ModuleType) -> Function:
    """Computes the gradients of the sum, to which the residual's is added, and of the scale."""

    def backward(x: Array, grad_normed: Array, grad_x: Array, scale: Array) -> tuple[Array, ...]:
        (_, normed), vjp = jax.vjp(lambda x, scale: ops.add_norm(x, None, scale, 1e-5), x, scale)
        if ops is not reference:
            return vjp((grad_x, grad_normed))
        # XLA makes the norm again, as weight gradients need it; the kernel's is saved with the sum.
        normed, grad_normed = lax.optimization_barrier((normed, grad_normed))
        return normed, *vjp((grad_x, grad_normed))

    return backward


def _gradients(op: str, **options: Any) -> Callable[[types.ModuleType], Function]:
    """Leaves out dH's metadata, which is that of Y."""

    def of_backend(ops: types.ModuleType) -> Function:
        def compute(*operands):
            gradients = getattr(ops, op)(*operands, **options)
            return gradients._replace(dh=gradients.dh.values)

        return compute

    return of_backend


def _matrix(rows: int, columns: int, dtype: Any = jnp.bfloat16) -> tuple[Array]:
    return (random_matrix(rows, columns, seed=1, dtype=dtype),)


def _matrices(rows: int, columns: int, count: int) -> tuple[Array, ...]:
    return tuple(random_matrix(rows, columns, seed=seed) for seed in range(count))


def _products(rows: int, columns: int, count: int) -> tuple[fp8.Unscaled, ...]:
    factor = jnp.full((rows, 1), 0.5, jnp.bfloat16)
    return tuple(fp8.Unscaled(product, factor) for product in _matrices(rows, columns, count))


def _hidden(tokens: int, neurons: int, venom: tuple[int, int] | None = None) -> tuple[Array, Sparse24 | SparseVenom]:
    """Draws a gradient of Y, condensed for a Venom one, and Y."""
    h = random_matrix(tokens, neurons, seed=1)
    if venom is None:
        return random_matrix(tokens, neurons, seed=2), jax.jit(reference.squared_relu_24)(h)[0]
    v, m = venom
    y, _ = jax.jit(lambda h: reference.squared_relu_venom(h, v, m))(h)
    return random_matrix(tokens, 4 * neurons // m, seed=2), y


def copy_bandwidth() -> float:
    """Measures the bytes per second, read and written, of an elementwise pass over 268 MB."""
    x = random_matrix(16384, 8192, seed=0)
    return 2 * x.nbytes / median_ms(lambda x: x + 1, x) * 1e3


def measure(one: Pass, ops: types.ModuleType, bandwidth: float) -> dict[str, Any]:
    """Times the kernel and XLA's program, and the kernel's share of `bandwidth` in bytes per second."""
    operands, moved = one.draw(), one.moved(ops)
    ours = median_ms(one.function(ops), *operands)
    xla = median_ms(one.function(reference), *operands, iterations=5)
    share = moved / ours * 1e3 / bandwidth
    return dict(op=one.op, **one.case, bytes=moved, ms=ours, xla_ms=xla, share_of_copy_bandwidth=share)


TABLES = dict(sparsify_24=sparsifiers, masked=masked, passes=passes, venom=venom, e4m3=e4m3, norms=norms)


def main(_) -> None:
    ops = backend(flags.FLAGS.backend, flags.FLAGS.tables)
    tables: dict[str, Any] = dict(copy_bandwidth=copy_bandwidth())
    print(f"copy {tables['copy_bandwidth'] / 1e9:.0f} GB/s", flush=True)
    for name in flags.FLAGS.tables:
        tables[name] = [show(measure(one, ops, tables["copy_bandwidth"])) for one in TABLES[name]()]
        write_results(**tables)


if __name__ == "__main__":
    flags.DEFINE_enum("backend", "hopper", BACKENDS, "Whose kernels.")
    flags.DEFINE_list("tables", list(TABLES), "Tables to make.")
    flags.register_validator("tables", lambda names: set(names) <= set(TABLES), f"must be among {', '.join(TABLES)}")
    app.run(main)
