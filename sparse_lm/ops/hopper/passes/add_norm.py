"""Computes a residual's sum and its RMSNorm in one pass over memory, and the gradients of both in another.

Why this exists: XLA reads a residual once for its mean square and once to scale it, and again for each in the backward
pass, since no fusion of its holds a row between its two reads.

A persistent grid of blocks of one warpgroup, several to a multiprocessor. A block takes one row at a time, a thread
16 bytes at a time, and TMA brings the next rows to shared memory meanwhile. The gradient's kernel computes mean squares
again, which is cheaper than to wait for one number of each row. It sums the scale's gradient in registers, over the
rows of its block.

Numerics: float32. A sum is rounded before it is normed, as the backward pass sees it; all results are rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from sparse_lm.ops.checks import check_hidden_dtype, check_multiples
from sparse_lm.ops.hopper.frame import compat
from sparse_lm.ops.hopper.frame.emit import WARPGROUP_SIZE
from sparse_lm.ops.hopper.frame.schedule import core_count
from sparse_lm.ops.norm import SAVED

_LINE = 256  # elements that TMA copies along one dimension, at most
_LONGEST = 8192  # elements of a row
_STAGES = 4  # rows of a block that are in shared memory
_BLOCKS = 8  # on a multiprocessor, at most
_SHARED_MEMORY = 220_000  # bytes of a multiprocessor, less what Mosaic takes for sums


def add_norm(x: Array, update: Array | None, scale: Array, epsilon: float) -> tuple[Array, Array]:
    """See `ops.add_norm`; refuses an x that is not of 16-bit floats, and a D above 8192 or no multiple of 256."""
    check_hidden_dtype(x.dtype)
    check_multiples({"D": (x.shape[-1], _LINE)})
    if x.shape[-1] > _LONGEST:
        raise NotImplementedError(f"D = {x.shape[-1]} must be at most {_LONGEST}")
    return _add_norm(x, update, scale, epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _add_norm(x, update, scale, epsilon):
    total, normed = forward(_rows(x), None if update is None else _rows(update), scale, epsilon)
    return x if update is None else total.reshape(x.shape), normed.reshape(x.shape)


def _forward(x, update, scale, epsilon):
    total, normed = _add_norm(x.value, None if update is None else update.value, scale.value, epsilon)
    # Unless both are saved, the kernel runs again to make either.
    total = total if update is None else checkpoint_name(total, SAVED)
    return (total, checkpoint_name(normed, SAVED)), (total, scale.value, None if update is None else ())


@functools.partial(jax.named_call, name="add_norm")
def _backward(epsilon, saved, gradients):
    total, scale, update = saved
    of_total, of_normed = (None if isinstance(g, SymbolicZero) else _rows(g) for g in gradients)
    if of_normed is None:
        of_normed = jnp.zeros_like(_rows(total))
    of_x, of_scale = backward(_rows(total), scale, of_normed, of_total, epsilon)
    of_x = of_x.reshape(total.shape)
    return of_x, None if update is None else of_x, of_scale.astype(scale.dtype)


_add_norm.defvjp(_forward, _backward, symbolic_zeros=True)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def forward(x: Array, update: Array | None, scale: Array, epsilon: float) -> tuple[Array, Array]:
    """Computes x + update and its norm, of matrices [T, D]; without an update x and its norm."""

    def body(load, scale, *refs):
        *totals, out = refs[len(arrays) :]
        total = load(refs[0])
        if totals:
            totals[0][...] = rounded = (total + load(refs[1])).astype(x.dtype)
            total = rounded.astype(jnp.float32)
        out[...] = (total * _reciprocal_root(total, epsilon) * load(scale)).astype(x.dtype)

    arrays = [x] if update is None else [x, update]
    *totals, normed = _by_row(body, arrays, scale, results=len(arrays), name="add_norm")
    return totals[0] if totals else x, normed


def backward(
    total: Array, scale: Array, of_normed: Array, of_total: Array | None, epsilon: float
) -> tuple[Array, Array]:
    """Computes the gradients of the sum, [T, D], by both ways, and of the scale, f32[D].

    They follow from the sum `total`, [T, D], the scale, the norm's gradient, and the sum's but for the norm's, or None
    if that is zero.
    """

    def body(load, scale, *refs):
        of_scale, (total_ref, of_normed_ref, *of_total_ref, out) = refs[-1], refs[:-1]
        row = load(total_ref)
        along = _mean(load(of_normed_ref) * load(scale) * row)
        root = _reciprocal_root(row, epsilon)
        # Loaded again, rows need not stay in registers while sums are made.
        normed, gradient = load(total_ref) * root, load(of_normed_ref)
        of_scale += gradient * normed
        gradient = (gradient * load(scale) - normed * (along * root)) * root
        for ref in of_total_ref:
            gradient += load(ref)
        out[...] = gradient.astype(total.dtype)
        return of_scale

    arrays = [total, of_normed] if of_total is None else [total, of_normed, of_total]
    of_x, of_scale = _by_row(body, arrays, scale, results=1, sums=True, name="add_norm_gradients")
    return of_x, jnp.sum(of_scale, axis=0)


def _reciprocal_root(x: Array, epsilon: float) -> Array:
    return lax.rsqrt(_mean(x * x) + epsilon)


def _mean(x: Array) -> Array:
    return jnp.sum(x) * (1 / x.size)


def _by_row(
    body: Callable, arrays: list[Array], scale: Array, *, results: int, name: str, sums: bool = False
) -> list[Array]:
    """Runs `body` on each row of matrices [T, D] of one dtype; returns so many results [T, D], and sums f32[blocks, D].

    The body is called with a function that loads a row in float32, and references to the scale and to the rows of
    `arrays` and of the results; with `sums` also with a float32 row, which it returns with something added.
    """
    (tokens, width), dtype = arrays[0].shape, arrays[0].dtype
    row = width // _LINE, _LINE
    blocks = min(tokens, core_count() * _blocks(width * dtype.itemsize))
    layout = plgpu.Layout.WG_STRIDED(row, vec_size=math.gcd(width // WARPGROUP_SIZE, 16 // dtype.itemsize))

    def load(ref):
        return compat.load(ref, layout).astype(jnp.float32)

    def kernel(*refs):
        inputs, scale_gmem, outputs = refs[: len(arrays)], refs[len(arrays)], refs[len(arrays) + 1 :]
        block = lax.axis_index("block")

        def number(step):
            return block + blocks * step

        def step(indices, *rows_and_sum):
            written = [output.at[number(indices[0])] for output in outputs[:results]]
            total = body(load, scale_gmem, *rows_and_sum[: len(arrays)], *written, *rows_and_sum[len(arrays) :])
            plgpu.commit_smem()  # the copies that follow overwrite what has been read
            return total

        spec = plgpu.BlockSpec((None, *row), lambda step: (number(step), 0, 0), memory_space=plgpu.SMEM)
        total = plgpu.emit_pipeline(
            step,
            grid=(lax.div(tokens - 1 - block, blocks) + 1,),
            in_specs=[spec] * len(arrays),
            max_concurrent_steps=_STAGES,
            init_carry=plgpu.layout_cast(jnp.zeros(row, jnp.float32), layout) if sums else None,
        )(*inputs)
        if sums:
            outputs[-1][block] = total

    out_type = [jax.ShapeDtypeStruct((tokens, *row), dtype)] * results
    out_type += [jax.ShapeDtypeStruct((blocks, *row), jnp.float32)] * sums
    found = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*(array.reshape(-1, *row) for array in arrays), scale.astype(jnp.float32).reshape(row))
    return [array.reshape(-1, width) for array in found]


def _blocks(bytes_of_row: int) -> int:
    """Counts the blocks on a multiprocessor: as many as find shared memory for the gradient's three rows a stage."""
    return max(1, min(_BLOCKS, _SHARED_MEMORY // (3 * _STAGES * bytes_of_row)))
