"""Dense products of experts: tokens that are sorted by expert, each with its expert's slice of the weights.

A persistent grid of warp-specialised thread blocks: one warpgroup copies, two compute the halves of a tile of 128
tokens (or neurons) by 256 columns. What of the weights a tile needs follows from the expert of its block of tokens,
which is looked up once a tile. An expert's tokens begin at a whole block, so that no tile has two experts.

Numerics: float32 accumulation in the order of the contracted dimension, one rounding to the result's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.checks import check_multiples, product_dtype
from sparse_lm.ops.grouped import group_sizes
from sparse_lm.ops.hopper.frame.operands import swizzled
from sparse_lm.ops.hopper.frame.schedule import core_count

_TILE_M, _TILE_N = 128, 256  # rows and columns of the result in a tile; each consumer computes half of the columns
_STAGES = 4  # steps of the contracted dimension that shared memory holds
_RASTER_WIDTH = 8  # tiles along the rows in the band that the blocks which run together cover
_STEP = 64  # of the contracted dimension: 128 bytes, a line of swizzled shared memory
_CONSUMERS = 2
_ROWS = 64  # of the result that are stored together
_TRANSFORMS = swizzled(jnp.bfloat16)


def grouped_up(x: Array, w: Array, block_experts: Array, v: int, experts: int, *, padded: bool = False) -> Array:
    """See `ops.grouped_up`. The two operands must be bfloat16 or float16, and sizes multiples of the tiles'."""
    neurons, dim = w.shape[0] // experts, x.shape[1]
    check_multiples({"v": (v, _TILE_M), "F / E": (neurons, _TILE_N), "D": (dim, _STEP * _STAGES)})

    def tile(refs, m, n):
        x, w, block_experts = refs
        expert, steps = _expert_and_steps(block_experts[m * _TILE_M // v], experts, dim // _STEP, padded)
        rows = expert * neurons + n * _TILE_N
        return x.at[pl.ds(m * _TILE_M, _TILE_M)], w.at[pl.ds(rows, _TILE_N)], steps

    out = jax.ShapeDtypeStruct((x.shape[0], neurons), x.dtype)
    return _multiply((x, w, block_experts), out, tile, name="grouped_up", b_transposed=True)


def grouped_down(y: Array, w: Array, block_experts: Array, v: int, experts: int, *, padded: bool = False) -> Array:
    """See `ops.grouped_down` and `grouped_up`."""
    neurons, dim = y.shape[1], w.shape[1]
    check_multiples({"v": (v, _TILE_M), "F / E": (neurons, _STEP * _STAGES), "D": (dim, _TILE_N)})

    def tile(refs, m, n):
        y, w, block_experts = refs
        expert, steps = _expert_and_steps(block_experts[m * _TILE_M // v], experts, neurons // _STEP, padded)
        columns = pl.ds(n * _TILE_N, _TILE_N)
        b = w.at[pl.ds(expert * neurons, neurons), columns]
        return y.at[pl.ds(m * _TILE_M, _TILE_M)], b, steps

    out = jax.ShapeDtypeStruct((y.shape[0], dim), y.dtype)
    return _multiply((y, w, block_experts), out, tile, name="grouped_down")


def grouped_weights(y: Array, x: Array, block_experts: Array, v: int, experts: int, *, out_dtype: jnp.dtype) -> Array:
    """See `ops.grouped_weights` and `grouped_up`."""
    neurons, dim = y.shape[1], x.shape[1]
    check_multiples({"v": (v, _STEP), "F / E": (neurons, _TILE_M), "D": (dim, _TILE_N)})
    sizes = group_sizes(block_experts, v, experts)
    starts, steps = jnp.cumsum(sizes) - sizes, sizes // _STEP
    of_expert = neurons // _TILE_M

    def tile(refs, m, n):
        y, x, starts, steps = refs
        expert = lax.div(m, of_expert)
        # As long as all tokens are: the pipeline reads as far as the steps go.
        tokens = pl.ds(pl.multiple_of(starts[expert], _STEP), y.shape[0])
        a = y.at[tokens, pl.ds(lax.rem(m, of_expert) * _TILE_M, _TILE_M)]
        return a, x.at[tokens, pl.ds(n * _TILE_N, _TILE_N)], steps[expert]

    out = jax.ShapeDtypeStruct((experts * neurons, dim), out_dtype)
    return _multiply((y, x, starts, steps), out, tile, name="grouped_weights", a_transposed=True)


def _expert_and_steps(expert: Array, experts: int, steps: int, padded: bool) -> tuple[Array, Array | int]:
    """Returns whose weights a tile reads, and in how many steps: none of padding, whose result is zero."""
    # Without padding the steps are known when the kernel is compiled.
    return (lax.min(expert, experts - 1), jnp.where(expert < experts, steps, 0)) if padded else (expert, steps)


def _multiply(
    operands: tuple[Array, ...],
    out: jax.ShapeDtypeStruct,
    tile: Callable[[Any, Array, Array], tuple[Any, Any, Array | int]],
    *,
    name: str,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> Array:
    """Computes every tile of `out`, a @ b.

    `tile(references to the operands, row, column)` gives slices a and b, [rows, contracted] and [contracted, columns]
    or transposed, and how many steps of the contracted dimension are to be summed up.
    """
    product_dtype(*operands[:2], out.dtype)  # refuses other dtypes
    own_n = _TILE_N // _CONSUMERS
    grid = out.shape[0] // _TILE_M, out.shape[1] // _TILE_N
    a_tile = (_STEP, _TILE_M) if a_transposed else (_TILE_M, _STEP)
    b_tile = (_TILE_N, _STEP) if b_transposed else (_STEP, _TILE_N)
    chunk = 128 // jnp.dtype(out.dtype).itemsize  # columns of a line of shared memory

    def kernel(*refs):
        operands_gmem, out_gmem = refs[:-1], refs[-1]
        consumer = lax.axis_index("warpgroup")

        def pipeline(steps, body, context, state=None):
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(a_tile, lambda k: (k, 0) if a_transposed else (0, k), transforms=_TRANSFORMS),
                    plgpu.BlockSpec(b_tile, lambda k: (0, k) if b_transposed else (k, 0), transforms=_TRANSFORMS),
                ],
                memory_registers=40,
                wg_axis="warpgroup",
                num_compute_wgs=_CONSUMERS,
                max_concurrent_steps=_STAGES,
                compute_context=context,
                pipeline_state=state,
            )

        def scope(out_smem, allocations):
            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="block")
            def _tiles(loop):
                m, n = plgpu.planar_snake(loop.index[0], grid, 0, _RASTER_WIDTH)
                a, b, steps = tile(operands_gmem, m, n)

                def context(run):
                    def accumulate(accumulator):
                        run(accumulator)
                        return accumulator[...]

                    result = pl.run_scoped(accumulate, plgpu.ACC((_TILE_M, own_n), jnp.float32)).astype(out.dtype)
                    first_row, first_column = m * _TILE_M, n * _TILE_N + consumer * own_n
                    pieces = itertools.product(range(0, _TILE_M, _ROWS), range(0, own_n, chunk))
                    for number, (row, column) in enumerate(pieces):
                        piece = out_smem.at[consumer, number % 2]
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        piece[...] = result[row : row + _ROWS, column : column + chunk]
                        plgpu.commit_smem()
                        rows, columns = pl.ds(first_row + row, _ROWS), pl.ds(first_column + column, chunk)
                        plgpu.copy_smem_to_gmem(piece, out_gmem.at[rows, columns])

                def step(_, a_smem, b_smem, accumulator):
                    columns = pl.ds(consumer * own_n, own_n)
                    a = a_smem.transpose((1, 0)) if a_transposed else a_smem
                    b = b_smem.at[columns].transpose((1, 0)) if b_transposed else b_smem.at[:, columns]
                    plgpu.wgmma(accumulator, a, b)
                    plgpu.wgmma_wait(0)
                    return accumulator

                state = None
                if isinstance(steps, int):  # Pallas joins only pipelines of a known number of steps
                    # The next tile's copies begin while this tile is stored. No pipeline is the STOP that Pallas asks
                    # for: it would only wait until all slots are free, and nothing uses these afterwards.
                    states = plgpu.PipelinePipeline
                    state = jnp.where(loop.local_index == 0, states.START, states.STEADY)
                pipeline(steps, step, context, state)(a, b, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        # What the pipeline allocates does not depend on its steps, where they are no fewer than its stages.
        allocations = pipeline(_STAGES, lambda *_: None, lambda _: None).get_allocations(*operands_gmem[:2])
        pl.run_scoped(
            scope,
            plgpu.SMEM((_CONSUMERS, 2, _ROWS, chunk), out.dtype, transforms=swizzled(out.dtype)),
            allocations,
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(core_count(),),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
    )(*operands)
