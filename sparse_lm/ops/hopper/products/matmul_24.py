"""Multiplies a 2:4 matrix by a dense one, in 16-bit floats or in FP8: e4m3 times e4m3, summed in float32.

The frame is persistent.py. The two blocks of a cluster compute tiles under one another, so that they
share the tile of the dense operand. The instruction in e4m3 takes twice the columns a step, and wants the contracted
dimension of both operands last; its result is multiplied by a scale for each row, and
perhaps for each column, as it is stored.

Numerics: float32 accumulation in the order of k, in up to eight parts in the tiles of the last wave (split_k.py),
which the tiling and the number of multiprocessors decide; one rounding to the result's dtype. The same bits
come out every time.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_multiples, product_dtype
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.fp8 import E4M3
from sparse_lm.ops.hopper.frame import compat, split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, pad_to, result_type, round_up
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.store import store_tile
from sparse_lm.ops.hopper.frame.tiling import STEP, Loads, Tiling

_FP8_STEP = wgmma_sp.step_columns(E4M3)
_SCALES = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of rows, of columns

CANDIDATES = Tiling(256, 192, time=1.36), Tiling(128, 256)  # best first; times were measured on an H100


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    out_transposed: bool = False,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24`; refuses dtypes that are no 16-bit floats."""
    out_dtype = product_dtype(w, b, out_dtype)
    (m, k), n = w.shape, b.shape[1]
    config = config or split_k.fastest(CANDIDATES, m, n, pl.cdiv(k, STEP))
    shape, b = (n, m) if out_transposed else (m, n), pad(b)
    options = dict(name="matmul_24", out_transposed=out_transposed)
    product = _multiply(config, (m, b.shape[1]), (w.values, w.metadata, b), result_type(*shape, out_dtype), **options)
    return product[: shape[0], : shape[1]]


def matmul_24_fp8(
    a: Sparse24,
    b_t: Array,
    scale: Array,
    columns: Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.matmul_24_fp8`.

    Refuses results that are neither bfloat16 nor float32, and a K that is no multiple of 128.
    """
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"gives bfloat16 or float32, not {out_dtype}")
    (m, k), n = a.shape, b_t.shape[0]
    check_multiples({"K": (k, _FP8_STEP)})
    config = config or split_k.fastest(CANDIDATES, m, n, k // _FP8_STEP)
    b_t = pad_to(b_t, (round_up(n), k))
    sizes = a.values.shape[0], b_t.shape[0]
    # The words of a step's instructions one after the other: what one copy brings.
    metadata = a.metadata.reshape(sizes[0] // TILE, k // _FP8_STEP, -1)
    # Rows and columns past the end are computed, too.
    grid = config.grid(*sizes)
    scales = [pad_to(scale, (grid[0] * config.cluster_m, 1))[:, 0]]
    if columns is not None:
        scales.append(pad_to(columns, (1, grid[1] * config.cluster_n))[0])

    def store(part, slots, operands, out_gmem, origin, number):
        for axis, of_axis in enumerate(operands[-len(scales) :]):
            here = of_axis.at[pl.ds(origin[axis], part.shape[axis])]
            factors = compat.load(here, _SCALES[axis], optimized=False).astype(part.dtype)
            part *= lax.broadcast_in_dim(factors, part.shape, (axis,))
        store_tile(part, slots, out_gmem, origin, first_store=number, transposed=False)

    out = result_type(m, n, out_dtype)
    options = dict(name="matmul_24_fp8", b_transposed=True, store=store)
    return _multiply(config, sizes, (a.values, metadata, b_t, *scales), out, **options)[:m, :n]


def _multiply(
    config: Tiling,
    sizes: tuple[int, int],
    operands: tuple[Array, ...],
    out: jax.ShapeDtypeStruct,
    *,
    b_transposed: bool = False,
    **options,
) -> Array:
    """Computes a product of these sizes of values, metadata and b, which is [K, N], or [N, K] if `b_transposed`."""
    step = wgmma_sp.step_columns(operands[0].dtype)

    def loads(operands, job):
        values, metadata, b, *_ = operands

        def copies(k, _, stage):
            k_of_b = k * step
            of_b = stage.copy_b(b, *((job.column, k_of_b) if b_transposed else (k_of_b, job.column)))
            return [*stage.copy_sparse(values, metadata, job.row, k), of_b]

        return Loads(copies)

    schedule = split_k.schedule_product(config, *sizes, 2 * operands[0].shape[1] // step)
    return multiply(config, schedule, loads, operands, out, b_transposed=b_transposed, **options)
