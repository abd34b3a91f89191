"""Dense product in the frame of the Triton backend's sparse ones: what its speed is measured against.

The same ring of `cp.async` stages, bands, layouts and store; the instruction is the dense `mma.sync`.
"""

from __future__ import annotations

from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparse_lm.ops.triton.frame import mma_sp, product
from sparse_lm.ops.triton.frame.product import STEP, Product
from sparse_lm.ops.triton.frame.tiling import Tiling


@gluon.jit
def _copy_a(a, a_smem, tile, step, shape: gl.constexpr):
    tiling: gl.constexpr = shape.tiling
    layout: gl.constexpr = product.copy_layout(STEP, 2, tiling.warps)
    row, column = product.numbers(tiling.tile_m, layout, 0), product.numbers(STEP, layout, 1)
    source = a + (tile * tiling.tile_m).to(gl.int64) * shape.k + step * STEP + (row * shape.k + column)
    inside = (row < shape.m - tile * tiling.tile_m) & (column < shape.k - step * STEP)
    async_copy.async_copy_global_to_shared(a_smem, source, mask=inside)


@gluon.jit
def _start_copies(a, b, smem, slot: gl.constexpr, tile_m, tile_n, step, shape: gl.constexpr):
    _copy_a(a, smem[0][slot], tile_m, step, shape)
    product.copy_b(b, smem[1][slot], product.look_up(None, tile_m, step, shape), tile_n, shape)
    async_copy.commit_group()


@gluon.jit
def _advance(a, b, smem, slot: gl.constexpr, tile_m, tile_n, step, sums, shape: gl.constexpr):
    stages: gl.constexpr = shape.tiling.stages
    layout: gl.constexpr = sums.type.layout
    async_copy.wait_group(stages - 2)
    _start_copies(a, b, smem, (slot + stages - 1) % stages, tile_m, tile_n, step + stages - 1, shape)
    for half in gl.static_range(2):
        a_part = smem[0][slot].slice(half * mma_sp.STEP, mma_sp.STEP, dim=1).load(gl.DotOperandLayout(0, layout, 2))
        b_part = smem[1][slot].slice(half * mma_sp.STEP, mma_sp.STEP, dim=0).load(gl.DotOperandLayout(1, layout, 2))
        sums = mma_v2(a_part, b_part, sums)
    return sums


@gluon.jit
def _dense_kernel(a, b, out, shape: gl.constexpr):
    tiling: gl.constexpr = shape.tiling
    stages: gl.constexpr = tiling.stages
    dtype: gl.constexpr = b.dtype.element_ty
    a_smem, b_smem = (), ()
    for _ in gl.static_range(stages):
        a_smem += (gl.allocate_shared_memory(dtype, [tiling.tile_m, STEP], product.shared_layout(STEP)),)
        b_smem += (gl.allocate_shared_memory(dtype, [STEP, tiling.tile_n], product.shared_layout(tiling.tile_n)),)
    smem = (a_smem, b_smem)
    tile_m, tile_n = product.tile_of_block(shape)
    for slot in gl.static_range(stages - 1):
        _start_copies(a, b, smem, slot, tile_m, tile_n, slot, shape)

    layout: gl.constexpr = mma_sp.tile_layout(tiling.warps_m, tiling.warps_n)
    sums = gl.full([tiling.tile_m, tiling.tile_n], 0.0, gl.float32, layout)
    rounds: gl.constexpr = shape.steps // stages
    left: gl.constexpr = shape.steps % stages
    for first in range(0, rounds * stages, stages):
        for slot in gl.static_range(stages):
            sums = _advance(a, b, smem, slot, tile_m, tile_n, first + slot, sums, shape)
    for slot in gl.static_range(left):
        sums = _advance(a, b, smem, slot, tile_m, tile_n, rounds * stages + slot, sums, shape)
    async_copy.wait_group(0)
    product.store_tile(sums, out, tile_m, tile_n, shape)


def dense_matmul(a: Array, b: Array, tiling: Tiling) -> Array:
    """Computes a @ b, [M, K] x [K, N] in 16 bits; K and N multiples of 8."""
    (m, k), n = a.shape, b.shape[1]
    shape = Product(m, n, k, rows=m, steps=-(-k // STEP.value), b_stride=n, tiling=tiling)
    return product.launch(_dense_kernel, a, b, shape=shape, out_dtype=b.dtype)
