"""Multiplies a dense matrix by the transpose of the rows of a 2:4 matrix that each block of tokens chooses.

The rows, which are the sparse operand of the instruction, are gathered (gather_24.py); the tokens come
by TMA, and the blocks of a cluster, which compute different rows for the same tokens, share them. The
result is transposed on its way out, so that it is [tokens, rows].

Shared memory limits it: for 64 columns of a tile of 256 x 128 the instructions read 80 KB and copies write
34 KB, and it delivers 128 bytes a cycle.

Numerics: float32 accumulation in the order of the columns, one rounding.
"""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.checks import check_multiples, product_dtype
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import gather_24, wgmma_sp
from sparse_lm.ops.hopper.frame.operands import pad, result_type
from sparse_lm.ops.hopper.frame.persistent import accumulate, launch
from sparse_lm.ops.hopper.frame.ring import CLUSTER_AXIS, Copy, Ring, barriers
from sparse_lm.ops.hopper.frame.schedule import CLUSTER, cluster_count
from sparse_lm.ops.hopper.frame.store import columns_of_store, staging, store_tile
from sparse_lm.ops.hopper.frame.tiling import CONSUMERS, PRODUCER

# Of each thread, together at most the 65,536 of a multiprocessor: a producer's thread keeps the offsets of its copies.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 72, 216

_TILE_ROWS = 256  # of the 2:4 matrix in a block's tile
_CONSUMER_ROWS = _TILE_ROWS // CONSUMERS
_RASTER_WIDTH = 4  # clusters' tiles of rows that run together, before the next tokens
# Of the ring, each of 64 logical columns, by the tokens of a block's tile; at least three, as a gather fills two while
# a third is read.
_STAGES = {128: 5, 64: 6}
CANDIDATES = tuple(_STAGES)  # tokens that share a gathered row, the most first


def sampled_rows_24(
    w: Sparse24, x: Array, neuron_ids: Array, v: int, *, out_dtype: DTypeLike | None = None, config: int | None = None
) -> Array:
    """See sampled_matmul_24.py; neurons may be in any order.

    It refuses dtypes that are no 16-bit floats, and a v that is no multiple of 64. `config` is the tokens of a tile,
    which divide v: the most of `CANDIDATES` by default.
    """
    out_dtype = product_dtype(w, x, out_dtype)
    check_multiples({"v": (v, CANDIDATES[-1])})
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    tile_tokens = config or next(tokens for tokens in CANDIDATES if v % tokens == 0)
    x, out = pad(x), result_type(tokens, kept, out_dtype)
    stages = _STAGES[tile_tokens]
    gathers = pl.cdiv(w.metadata.shape[1], gather_24.STAGES)
    # Past the last step the values are zeros. The tokens need not be: of a D up to 64 their only tile is copied again.
    steps = gathers * gather_24.STAGES
    grid = pl.cdiv(kept, _TILE_ROWS * CLUSTER), pl.cdiv(x.shape[0], tile_tokens)
    clusters = min(grid[0] * grid[1], cluster_count())

    def kernel(values_gmem, metadata_gmem, neuron_ids_gmem, x_gmem, out_gmem):
        def scope(values_smem, metadata_smem, x_smem, out_smem, full, empty):
            ring = Ring(full, empty, stages, gathers=True)
            ring.initialize()
            warpgroup = lax.axis_index("warpgroup")
            first_tile = lax.axis_index("cluster")
            tiles = lax.div(grid[0] * grid[1] - first_tile + clusters - 1, clusters)

            def for_each_tile(body):
                """Calls `body(i, block, row, token)` for this cluster's i-th tile, at neuron_ids[block, row]."""

                @pl.loop(0, tiles)
                def _tile(i):
                    tile = plgpu.planar_snake(first_tile + i * clusters, grid, 0, _RASTER_WIDTH)
                    row = (tile[0] * CLUSTER + lax.axis_index(CLUSTER_AXIS)) * _TILE_ROWS
                    token = tile[1] * tile_tokens
                    body(i, lax.div(token, v), row, token)

            def produce():
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

                def fill(i, block, row, token):
                    """Fills a stage for each step: with tokens by TMA, with listed rows by gathers, which fill two."""
                    sources = values_gmem, metadata_gmem
                    offsets = gather_24.load_offsets(neuron_ids_gmem, *sources, block, row, _TILE_ROWS)

                    @pl.loop(0, gathers)
                    def _gather(gather):
                        first_k = gather * gather_24.STAGES
                        ks = [first_k + stage for stage in range(gather_24.STAGES)]
                        slots = [ring.slot(i * steps + k) for k in ks]
                        for k, slot in zip(ks, slots, strict=True):
                            tile, origin = x_smem.at[slot], (token, k * wgmma_sp.STEP)
                            copy = Copy(x_gmem, tile, origin, wgmma_sp.DENSE_TRANSFORMS, multicast=True)
                            ring.fill(i * steps + k, [copy])
                        targets = tuple(values_smem.at[slot] for slot in slots), metadata_smem.at[slots[0]]
                        gather_24.start_gather(*sources, *targets, offsets, gather)
                        for k in ks:
                            ring.arrive_gathered(i * steps + k)

                for_each_tile(fill)
                ring.close(tiles * steps)

            def consume():
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                own_rows = pl.ds(warpgroup * _CONSUMER_ROWS, _CONSUMER_ROWS)
                sizes = _CONSUMER_ROWS // wgmma_sp.ROWS, tile_tokens
                options = dict(odd=False, b_transposed=True, load_words=gather_24.load_words)

                def operands(slot):
                    return values_smem.at[slot, own_rows], metadata_smem.at[slot, own_rows], x_smem.at[slot]

                def compute(i, block, row, token):
                    row = row + warpgroup * _CONSUMER_ROWS
                    parts = accumulate(ring, i * steps, steps, operands, sizes, **options)
                    for number, part in enumerate(parts):
                        part = part.astype(out.dtype)
                        origin = row + number * wgmma_sp.ROWS, token
                        first_store = (i * len(parts) + number) * (tile_tokens // columns_of_store(out.dtype))
                        store_tile(part, out_smem.at[warpgroup], out_gmem, origin, first_store, transposed=True)

                for_each_tile(compute)
                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == PRODUCER, produce, consume)

        pl.run_scoped(
            scope,
            plgpu.SMEM((stages, _TILE_ROWS, wgmma_sp.KEPT), x.dtype, transforms=wgmma_sp.VALUES_TRANSFORMS),
            # The second stage of a gather leaves its metadata's unused; with an odd number, each is that in turn.
            plgpu.SMEM((stages, _TILE_ROWS, gather_24.WORDS), jnp.int32),
            plgpu.SMEM((stages, tile_tokens, wgmma_sp.STEP), x.dtype, transforms=wgmma_sp.DENSE_TRANSFORMS),
            staging(out.dtype, transposed=True),
            *barriers(stages, CONSUMERS),
            collective_axes="warpgroup",
        )

    run = launch(kernel, out, clusters, "sampled_rows_24")
    return run(w.values, gather_24.metadata_by_rows(w.metadata), neuron_ids, x)[:tokens, :kept]
