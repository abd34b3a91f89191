"""Dense product in the frame of the Triton backend's sparse ones: what its speed is measured against.

The same ring of `cp.async` stages, bands, layouts and store; the instruction is the dense `mma.sync`.
"""

from __future__ import annotations

import math

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparse_lm.ops.triton import mma_sp, product
from sparse_lm.ops.triton.gluon_call import gluon_call
from sparse_lm.ops.triton.product import STEP, Product, Tiling


@gluon.jit
def _copy_a(a, a_smem, tile, step, shape: gl.constexpr):
    tiling: gl.constexpr = shape.tiling
    layout: gl.constexpr = product.copy_layout(None, STEP, 2, tiling.warps)
    row = product.numbers(tile * tiling.tile_m, tiling.tile_m, layout, 0)
    column = product.numbers(step * STEP, STEP, layout, 1)
    source = a + row.to(gl.int64) * shape.k + column
    async_copy.async_copy_global_to_shared(a_smem, source, mask=(row < shape.m) & (column < shape.k))


@gluon.jit
def _dense_kernel(a, b, out, shape: gl.constexpr):
    tiling: gl.constexpr = shape.tiling
    stages: gl.constexpr = tiling.stages
    dtype: gl.constexpr = b.dtype.element_ty
    layout: gl.constexpr = mma_sp.tile_layout(tiling.warps_m, tiling.warps_n)
    a_smem = gl.allocate_shared_memory(dtype, [stages, tiling.tile_m, STEP], product.shared_layout(STEP, 2))
    b_smem = gl.allocate_shared_memory(dtype, [stages, STEP, tiling.tile_n], product.shared_layout(tiling.tile_n, 2))
    tile_m, tile_n = product.tile_of_block(shape)
    for step in gl.static_range(stages - 1):
        _copy_a(a, a_smem.index(step), tile_m, step, shape)
        product.copy_b(b, b_smem.index(step), product.look_up(None, tile_m, step, shape), tile_n, shape)
        async_copy.commit_group()
    sums = gl.full([tiling.tile_m, tiling.tile_n], 0.0, gl.float32, layout)
    slot = 0
    for step in range(shape.steps):
        following = step + stages - 1
        rows = product.look_up(None, tile_m, following, shape)
        async_copy.wait_group(stages - 2)
        for half in gl.static_range(2):
            a_part = a_smem.index(slot).slice(half * mma_sp.STEP, mma_sp.STEP, dim=1)
            b_part = b_smem.index(slot).slice(half * mma_sp.STEP, mma_sp.STEP, dim=0)
            left, right = a_part.load(gl.DotOperandLayout(0, layout, 2)), b_part.load(gl.DotOperandLayout(1, layout, 2))
            sums = mma_v2(left, right, sums)
        free = gl.where(slot == 0, stages - 1, slot - 1)
        _copy_a(a, a_smem.index(free), tile_m, following, shape)
        product.copy_b(b, b_smem.index(free), rows, tile_n, shape)
        async_copy.commit_group()
        slot = gl.where(slot == stages - 1, 0, slot + 1)
    async_copy.wait_group(0)
    product.store_tile(sums, out, tile_m, tile_n, shape)


def dense_matmul(a: Array, b: Array, tiling: Tiling) -> Array:
    """a @ b, [M, K] x [K, N] in 16 bits; K and N multiples of 8."""
    (m, k), n = a.shape, b.shape[1]
    shape = Product(m, n, k, rows=m, steps=-(-k // STEP.value), b_stride=n, tiling=tiling)
    return gluon_call(
        _dense_kernel,
        a,
        b,
        out=jax.ShapeDtypeStruct((m, n), b.dtype),
        blocks=math.prod(shape.grid),
        warps=tiling.warps,
        constants=dict(shape=shape),
    )
