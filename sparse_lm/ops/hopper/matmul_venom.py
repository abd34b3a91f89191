"""V:2:M matrix times dense matrix: the 2:4 product over condensed columns, with gathered rows of B.

The producer warpgroup brings in the condensed 2:4 operand by TMA, as for `matmul_24`, and gathers the
64 rows of b of each step (gather.py). A tile has 128 rows, all of one Venom block, so that a gathered
row serves 128 rows of the result. Every 128 rows read their own rows of b: 2 Kc N bytes per 128 rows
come from the L2 cache, which is what limits this product.

Numerics: float32 accumulation in the order of the condensed columns, one rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm.ops.formats import SparseVenom
from sparse_lm.ops.hopper import compat, gather, tuning, wgmma_sp
from sparse_lm.ops.hopper.mainloop import accumulate
from sparse_lm.ops.hopper.matmul_24 import check_dtypes, pad, round_up
from sparse_lm.ops.hopper.matmul_venom_runs import matmul_venom_runs
from sparse_lm.ops.hopper.persistent import CONSUMERS
from sparse_lm.ops.hopper.ring import CLUSTER_AXIS, Copy, Ring, empty_barriers, full_barriers
from sparse_lm.ops.hopper.store import staging, store_tile, stores

TILE_M = CONSUMERS * wgmma_sp.ROWS
TILE_N = gather.COLUMNS

_PRODUCER = CONSUMERS
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 56, 224


@dataclasses.dataclass(frozen=True)
class Config:
    """How the product is cut up.

    Attributes:
      stages: of the ring, each of 64 condensed columns.
      cluster: blocks side by side along N that share the sparse operand's tiles.
      store_slots: output tiles of 64 rows in shared memory, per consumer.
      raster_width: clusters' tiles along N that run together; the L2 cache should hold the part of b under them.
    """

    stages: int = 4
    cluster: int = 2
    store_slots: int = 3
    raster_width: int = 2


def matmul_venom(
    a: SparseVenom, b: Array, *, out_dtype: DTypeLike | None = None, config: Config | None = None
) -> Array:
    """a @ b.

    Args:
      a: V:2:M matrix [M, K], bfloat16 or float16, v a multiple of 128.
      b: [K, N] in the dtype of a.
      out_dtype: bfloat16, float16 or float32; that of b by default.
      config: tiling; the tuned one for the shape and device by default.

    Returns:
      [M, N]. Rows of b that no stored position names are not read.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    if a.run >= wgmma_sp.ROWS:
        return matmul_venom_runs(a, b, out_dtype=out_dtype)
    out_dtype = jnp.dtype(out_dtype or b.dtype)
    check_dtypes(a.dtype, b.dtype, out_dtype)
    if a.v % TILE_M:
        raise NotImplementedError(f"needs v to be a multiple of {TILE_M}, not {a.v}")
    (m, k), n = a.shape, b.shape[1]
    if config is None:
        config = tuning.lookup("matmul_venom", (m, n, k, a.m), Config) or Config()
    # Rows stay as they are: a padded column of a is row k, past the end of b.
    b = pad(b, rows=False)
    out = jax.ShapeDtypeStruct((round_up(m), max(2 * wgmma_sp.ROWS, b.shape[1])), out_dtype)
    return _call(config, a, b, out)[:m, :n]


def _call(config: Config, a: SparseVenom, b: Array, out: jax.ShapeDtypeStruct) -> Array:
    steps = a.values.shape[1] // wgmma_sp.KEPT
    grid_m = pl.cdiv(a.shape[0], TILE_M)
    grid_n = pl.cdiv(b.shape[1], TILE_N * config.cluster)
    clusters = min(grid_m * grid_n, compat.core_count() // config.cluster)
    shared = config.cluster > 1

    def kernel(values_gmem, metadata_gmem, columns_gmem, b_gmem, out_gmem):
        def scope(values_smem, metadata_smem, b_smem, out_smem, full, empty):
            ring = Ring(full, empty, config.stages, gathers=True)
            ring.initialize()
            warpgroup = lax.axis_index("warpgroup")
            first_tile = lax.axis_index("cluster")
            tiles = lax.div(grid_m * grid_n - first_tile + clusters - 1, clusters)

            def for_each_tile(body):
                @pl.loop(0, tiles)
                def _tile(i):
                    tile = plgpu.planar_snake(first_tile + i * clusters, (grid_m, grid_n), 1, config.raster_width)
                    column = (tile[1] * config.cluster + lax.axis_index(CLUSTER_AXIS)) * TILE_N
                    body(i, tile[0] * TILE_M, column)

            def produce():
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

                def fill(i, row, column):
                    block = lax.div(row, a.v)

                    def fill_step(k, row_numbers):
                        step = i * steps + k
                        slot = ring.slot(step)
                        values_origin = row, k * wgmma_sp.KEPT
                        metadata_origin = row // wgmma_sp.ROWS, k, jnp.int32(0)
                        copies = [
                            Copy(values_gmem, values_smem.at[slot], values_origin, wgmma_sp.VALUES_TRANSFORMS, shared),
                            Copy(metadata_gmem, metadata_smem.at[slot], metadata_origin, (), shared),
                        ]
                        ring.fill(step, copies)
                        following = gather.load_row_numbers(columns_gmem, block, lax.min(k + 1, steps - 1))
                        gather.start_gather(b_gmem, b_smem.at[slot], row_numbers, column)
                        ring.arrive_gathered(step)
                        return following

                    lax.fori_loop(0, steps, fill_step, gather.load_row_numbers(columns_gmem, block, jnp.int32(0)))

                for_each_tile(fill)
                ring.close(tiles * steps)

            def consume():
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                rows = pl.ds(warpgroup * wgmma_sp.ROWS, wgmma_sp.ROWS)

                def operands(slot):
                    return values_smem.at[slot, rows], metadata_smem.at[slot, pl.ds(warpgroup, 1)], b_smem.at[slot]

                def compute(i, row, column):
                    (accumulator,) = accumulate(
                        ring, i * steps, steps, operands, blocks=1, n=TILE_N, b_transposed=False
                    )
                    store_tile(
                        accumulator.astype(out_gmem.dtype),
                        out_smem.at[warpgroup],
                        out_gmem,
                        (row + warpgroup * wgmma_sp.ROWS, column),
                        first_store=i * stores(TILE_N, out.dtype),
                        transposed=False,
                    )

                for_each_tile(compute)
                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == _PRODUCER, produce, consume)

        pl.run_scoped(
            scope,
            plgpu.SMEM((config.stages, TILE_M, wgmma_sp.KEPT), b.dtype, transforms=wgmma_sp.VALUES_TRANSFORMS),
            plgpu.SMEM((config.stages, CONSUMERS, 1, 128), jnp.int32),
            plgpu.SMEM((config.stages, wgmma_sp.STEP, TILE_N), b.dtype, transforms=wgmma_sp.DENSE_TRANSFORMS),
            staging(CONSUMERS, config.store_slots, out.dtype, transposed=False),
            full_barriers(config.stages),
            empty_barriers(config.stages, CONSUMERS),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=(CLUSTER_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(a.values, a.metadata, a.columns, b)
