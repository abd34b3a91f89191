"""2:4 matrix times dense matrix.

A persistent grid; per block one producer warpgroup, which keeps a ring of shared-memory stages full,
and two consumer warpgroups, each with the accumulators of half the tile's rows. The two blocks of a
cluster compute tiles under one another, so that they share the tile of the dense operand (multicast).

What limits it is shared memory: an instruction m64nNk32 reads 2 + N / 16 KB in N / 2 cycles, at most
128 bytes each, and the copies write on top of that. So the tile is as large as registers allow.

Numerics: float32 accumulation in the order of k, in up to eight parts in the tiles of the last wave;
one rounding to the result's dtype.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper import compat, split_k, tuning, wgmma_sp
from sparse_lm.ops.hopper.mainloop import accumulate
from sparse_lm.ops.hopper.ring import CLUSTER_AXIS, Copy, Ring, empty_barriers, full_barriers
from sparse_lm.ops.hopper.store import staging, store_tile, stores

CONSUMERS = 2
STEP = wgmma_sp.STEP

_PRODUCER = CONSUMERS  # index of its warpgroup
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 240
_ALIGNMENT = 64  # TMA copies whole tiles of the shared-memory layout


@dataclasses.dataclass(frozen=True)
class Config:
    """How the product is cut up.

    Attributes:
      tile_m: rows of a block's tile, 128 or 256: one or two blocks of 64 rows for each consumer.
      tile_n: columns of a block's tile, a multiple of 64, at most 256. A consumer thread holds
        tile_m * tile_n / 256 accumulators, of its 240 registers.
      stages: of the ring, each of 64 logical columns of the sparse operand.
      cluster: blocks that share the dense operand's tile.
      store_slots: output tiles of 64 rows in shared memory, per consumer.
      raster_along_m: whether the blocks that run together cover a band of `raster_width` tiles along
        M (else along N), so that the L2 cache serves them all.
      raster_width: clusters' tiles in the band.
      split_tail: whether the tiles of the last wave are split along k (split_k.py). The order of
        summation, and so the rounding, then depends on the tiling; without, it does not.
    """

    tile_m: int
    tile_n: int
    stages: int = 4
    cluster: int = 2
    store_slots: int = 2
    raster_along_m: bool = True
    raster_width: int = 8
    split_tail: bool = True


# Best first, with the time of a tile in units of the smaller one's (measured on an H100).
CANDIDATES = ((Config(tile_m=256, tile_n=192), 1.36), (Config(tile_m=128, tile_n=256), 1.0))


def heuristic_config(m: int, n: int, k: int) -> Config:
    """The candidate with the shortest waves: the larger tile is faster, but there are fewer to share out."""

    def time(candidate):
        config, tile_time = candidate
        plan = _plan(config, m, n, pl.cdiv(k, STEP))
        return (plan.waves + (1 / plan.parts if plan.tail_tiles else 0)) * tile_time

    return min(CANDIDATES, key=time)[0]


def matmul_24(
    w: Sparse24,
    b: Array,
    *,
    out_dtype: DTypeLike | None = None,
    b_transposed: bool = False,
    out_transposed: bool = False,
    config: Config | None = None,
) -> Array:
    """w @ b.

    Args:
      w: 2:4 matrix [M, K], bfloat16 or float16.
      b: [K, N], or [N, K] if `b_transposed`, in the dtype of w.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      b_transposed: b's contracted dimension is its last.
      out_transposed: give the result as [N, M].
      config: tiling; the tuned one for the shape and device by default.

    Returns:
      [M, N] or [N, M]. Rows of b at pruned positions are not read: unlike in `w.to_dense() @ b`, an
      inf or nan there does not reach the result.

    Raises:
      NotImplementedError: the dtypes.
    """
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_dtypes(w.dtype, b.dtype, out_dtype)
    (m, k), n = w.shape, b.shape[0 if b_transposed else 1]
    if config is None:
        config = tuning.lookup("matmul_24", (m, n, k), Config) or heuristic_config(m, n, k)
    shape = (n, m) if out_transposed else (m, n)
    # Mosaic's copies ignore the index into a dimension of a single tile instead of clipping it: give it two.
    padded = jax.ShapeDtypeStruct((round_up(shape[0]), max(2 * _ALIGNMENT, round_up(shape[1]))), out_dtype)
    out = _call(config, w, pad(b), padded, b_transposed, out_transposed)
    return out[: shape[0], : shape[1]]


def _call(config: Config, w: Sparse24, b: Array, out: jax.ShapeDtypeStruct, b_transposed, out_transposed):
    steps = w.values.shape[1] // wgmma_sp.KEPT
    tile_m, tile_n = config.tile_m, config.tile_n
    consumer_rows = tile_m // CONSUMERS
    blocks = consumer_rows // wgmma_sp.ROWS
    n = b.shape[0 if b_transposed else 1]
    grid_m, grid_n = _grid(config, w.shape[0], n)
    plan = _plan(config, w.shape[0], n, steps)
    # What every part of a tile but the first leaves: [part, tile, block, consumer, rows / 64, accumulators].
    workspace = (plan.parts - 1, plan.tail_tiles, config.cluster, CONSUMERS, blocks, wgmma_sp.ROWS * tile_n)

    def kernel(values_gmem, metadata_gmem, b_gmem, out_gmem, *workspace_gmem):
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR(workspace[1:4])) if plan.parts > 1 else None

        def scope(values_smem, metadata_smem, b_smem, out_smem, full, empty):
            ring = Ring(full, empty, config.stages)
            ring.initialize()
            warpgroup = lax.axis_index("warpgroup")
            cluster, peer = lax.axis_index("cluster"), lax.axis_index(CLUSTER_AXIS)
            in_tail = cluster < plan.tail_tiles * plan.parts
            tail_step = plan.waves * steps

            def origin(tile):
                minor = 0 if config.raster_along_m else 1
                tile = plgpu.planar_snake(tile, (grid_m, grid_n), minor, config.raster_width)
                return (tile[0] * config.cluster + peer) * tile_m, tile[1] * tile_n

            def for_each_tile(whole, part):
                """`whole(i, row, column)` of this cluster's i-th tile, then `part(tile, index, row, column)`."""

                @pl.loop(0, plan.waves)
                def _whole(i):
                    whole(i, *origin(cluster + i * plan.clusters))

                @pl.when(in_tail)
                def _part():
                    tile = lax.rem(cluster, max(plan.tail_tiles, 1))
                    index = plan.parts - 1 - lax.div(cluster, max(plan.tail_tiles, 1))
                    part(tile, index, *origin(plan.waves * plan.clusters + tile))

            def produce():
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

                def fill(row, column, first_k, count, first_step):
                    @pl.loop(0, count)
                    def _step(i):
                        slot, k = ring.slot(first_step + i), first_k + i
                        values_origin = row, k * wgmma_sp.KEPT
                        b_origin = (column, k * STEP) if b_transposed else (k * STEP, column)
                        copies = [
                            Copy(values_gmem, values_smem.at[slot], values_origin, wgmma_sp.VALUES_TRANSFORMS),
                            Copy(metadata_gmem, metadata_smem.at[slot], (row // wgmma_sp.ROWS, k, jnp.int32(0))),
                            Copy(b_gmem, b_smem.at[slot], b_origin, wgmma_sp.DENSE_TRANSFORMS, config.cluster > 1),
                        ]
                        ring.fill(first_step + i, copies)

                def fill_whole(i, row, column):
                    fill(row, column, 0, steps, i * steps)

                def fill_part(_, index, row, column):
                    fill(row, column, index * plan.part_steps, plan.part_steps, tail_step)

                for_each_tile(fill_whole, fill_part)
                ring.close(tail_step + jnp.where(in_tail, plan.part_steps, 0))

            def consume():
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                rows = pl.ds(warpgroup * consumer_rows, consumer_rows)

                def operands(slot):
                    metadata = metadata_smem.at[slot, pl.ds(warpgroup * blocks, blocks)]
                    return values_smem.at[slot, rows], metadata, b_smem.at[slot]

                def compute(first_step, count):
                    return accumulate(
                        ring, first_step, count, operands, blocks=blocks, n=tile_n, b_transposed=b_transposed
                    )

                def store(accumulators, i, row, column):
                    stores_of_a_block = stores(tile_n, out.dtype)
                    for block, accumulator in enumerate(accumulators):
                        store_tile(
                            accumulator.astype(out_gmem.dtype),
                            out_smem.at[warpgroup],
                            out_gmem,
                            (row + warpgroup * consumer_rows + block * wgmma_sp.ROWS, column),
                            first_store=(i * blocks + block) * stores_of_a_block,
                            transposed=out_transposed,
                        )

                def compute_whole(i, row, column):
                    store(compute(i * steps, steps), i, row, column)

                def compute_part(tile, index, row, column):
                    accumulators = compute(tail_step, plan.part_steps)
                    if plan.parts == 1:
                        return store(accumulators, plan.waves, row, column)
                    semaphore = semaphores.at[tile, peer, warpgroup]

                    def contribution(part):
                        return workspace_gmem[0].at[part - 1, tile, peer, warpgroup]

                    @pl.when(index > 0)
                    def _contribute():
                        split_k.contribute(accumulators, contribution(index), semaphore)

                    @pl.when(index == 0)
                    def _collect():
                        total = split_k.collect(accumulators, contribution, plan.parts, semaphore)
                        store(total, plan.waves, row, column)

                for_each_tile(compute_whole, compute_part)
                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == _PRODUCER, produce, consume)

        b_tile = (tile_n, STEP) if b_transposed else (STEP, tile_n)
        pl.run_scoped(
            scope,
            plgpu.SMEM((config.stages, tile_m, wgmma_sp.KEPT), b.dtype, transforms=wgmma_sp.VALUES_TRANSFORMS),
            plgpu.SMEM((config.stages, tile_m // wgmma_sp.ROWS, 1, 128), jnp.int32),
            plgpu.SMEM((config.stages, *b_tile), b.dtype, transforms=wgmma_sp.DENSE_TRANSFORMS),
            staging(CONSUMERS, config.store_slots, out.dtype, transposed=out_transposed),
            full_barriers(config.stages),
            empty_barriers(config.stages, CONSUMERS),
            collective_axes="warpgroup",
        )

    workspaces = [jax.ShapeDtypeStruct(workspace, jnp.float32)] if plan.parts > 1 else []
    result, *_ = plgpu.kernel(
        kernel,
        out_type=[out, *workspaces],
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=(CLUSTER_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(w.values, w.metadata, b)
    return result


def _grid(config: Config, m: int, n: int) -> tuple[int, int]:
    """Tiles of a cluster along M, and along N."""
    return pl.cdiv(m, config.tile_m * config.cluster), pl.cdiv(n, config.tile_n)


def _plan(config: Config, m: int, n: int, steps: int) -> split_k.Plan:
    clusters = compat.core_count() // config.cluster
    return split_k.plan(math.prod(_grid(config, m, n)), clusters, steps, split=config.split_tail)


def check_dtypes(w: jnp.dtype, b: jnp.dtype, out: jnp.dtype) -> None:
    if w not in (jnp.bfloat16, jnp.float16) or b != w:
        raise NotImplementedError(f"needs both operands in bfloat16 or in float16, not {w} and {b}")
    if out not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"gives bfloat16, float16 or float32, not {out}")


def round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pad(x: Array, *, rows: bool = True) -> Array:
    """Zeros up to whole tiles, of columns and perhaps rows; a copy, if x has a ragged edge."""
    padding = [(0, round_up(size) - size) for size in x.shape]
    if not rows:
        padding[0] = 0, 0
    return jnp.pad(x, padding) if any(after for _, after in padding) else x
