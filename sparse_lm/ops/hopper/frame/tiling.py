"""Defines tilings of a product with a 2:4 operand, and what a kernel tells persistent.py to copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper.frame import wgmma_sp
from sparse_lm.ops.hopper.frame.ring import Copy
from sparse_lm.ops.hopper.frame.schedule import CLUSTER

STEP = wgmma_sp.STEP
CONSUMERS = 2  # warpgroups of a block, which multiply
PRODUCER = CONSUMERS  # index of the warpgroup that copies
STAGES = 4  # of the ring, each of 64 logical columns of the sparse operand, 128 in e4m3


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A way to cut up a product, of which the 2:4 operand has the rows and the dense one the columns.

    Of 128 or 256 rows each consumer computes half, one or two blocks of 64; of 64 rows, half of the columns. A thread
    of it holds tile_m * tile_n / 256 accumulators, of its 240 registers.

    The blocks of a cluster compute tiles under one another if they share that of the dense operand, else side by side.
    Blocks that run together cover a band of tiles, so that the L2 cache serves them all.
    """

    tile_m: int  # rows of a block's tile: 64, 128 or 256
    tile_n: int  # columns of it, a multiple of 64 (128 if tile_m is 64), at most 256
    share_b: bool = True  # whether the blocks of a cluster share the dense operand's tile, or else the sparse one's
    raster_width: int = 8  # clusters' tiles across the band: along M, but where a kernel says otherwise
    time: float = 1.0  # of a tile, beside those of a product's other candidates

    def __post_init__(self):
        columns = wgmma_sp.ROWS * (CONSUMERS if self.tile_m == wgmma_sp.ROWS else 1)
        if self.tile_m not in (64, 128, 256) or self.tile_n % columns or not 0 < self.tile_n <= 256:
            raise ValueError(f"tile_m must be 64, 128 or 256, and tile_n a multiple of {columns} up to 256: {self}")

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """Returns rows and columns of the part of a tile that a consumer computes."""
        if self.tile_m == wgmma_sp.ROWS:
            return self.tile_m, self.tile_n // CONSUMERS
        return self.tile_m // CONSUMERS, self.tile_n

    @property
    def cluster_m(self) -> int:
        """Counts the rows of a cluster's tiles."""
        return self.tile_m * (CLUSTER if self.share_b else 1)

    @property
    def cluster_n(self) -> int:
        """Counts the columns of a cluster's tiles."""
        return self.tile_n * (1 if self.share_b else CLUSTER)

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Counts the clusters' tiles that cover m rows, and n columns."""
        return pl.cdiv(m, self.cluster_m), pl.cdiv(n, self.cluster_n)

    def origin(self, row: Array, column: Array, peer: Array) -> tuple[Array, Array]:
        """Returns first row and column of a block's tile, where the cluster's is number (row, column) of the grid."""
        row_in_cluster, column_in_cluster = (peer, 0) if self.share_b else (0, peer)
        return (
            row * self.cluster_m + row_in_cluster * self.tile_m,
            column * self.cluster_n + column_in_cluster * self.tile_n,
        )


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the ring, in shared memory: values [tile_m, 32], metadata [tile_m / 64, 1, 128], b [64, tile_n].

    b is [tile_n, 64] if the dense operand is stored with the contracted dimension last. In e4m3 all have twice the
    columns, since a step takes twice as many.
    """

    values: Any
    metadata: Any
    b: Any
    tiling: Tiling

    def copy_sparse(
        self, values: Any, metadata: Any, row: Array, k: Array, first: int = 0, rows: int | None = None
    ) -> list[Copy]:
        """Copies rows of the sparse operand from `row` on, by default as many as the stage has, and their metadata, of
        step k, to rows of the stage from `first` on. Numbers of rows are multiples of 64."""
        rows = rows or self.tiling.tile_m
        first_tile, tiles = first // wgmma_sp.ROWS, rows // wgmma_sp.ROWS
        values_origin = row, k * self.values.shape[1]
        # Past the end words are zeros, which are no valid positions; values are zeros there, too, and nothing is added.
        metadata_origin = lax.div(row, wgmma_sp.ROWS), k, jnp.int32(0)
        transforms = wgmma_sp.values_transforms(values.dtype)
        return [
            Copy(values, self.values.at[pl.ds(first, rows)], values_origin, transforms, not self.tiling.share_b),
            Copy(metadata, self.metadata.at[pl.ds(first_tile, tiles)], metadata_origin, (), not self.tiling.share_b),
        ]

    def copy_b(self, source: Any, *origin: Array) -> Copy:
        """Copies the dense operand's tile, from `origin` in the source on, to the stage's."""
        return Copy(source, self.b, origin, wgmma_sp.dense_transforms(source.dtype), self.tiling.share_b)


@dataclasses.dataclass(frozen=True)
class Loads:
    """The copies of one job."""

    # From a step along k, what `look_up` gave for it, and the stage, what to copy.
    copies: Callable[[Array, Any, Stage], Sequence[Copy]]
    # From a step along k, what its copies need to read first, some steps ahead: perhaps of the step after the last.
    look_up: Callable[[Array], Any] = lambda k: ()
    # From what `look_up` gave and the stage, starts further copies, with `cp.async`.
    gather: Callable[[Any, Stage], None] | None = None
