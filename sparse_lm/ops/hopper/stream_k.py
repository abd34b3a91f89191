"""Shares of work where tiles have different numbers of steps, known at run time only ("stream-K", 2301.03598).

Clusters first take whole tiles in turn, as long as that leaves none with more than its share: tiles
that lie together are then computed together, and the L2 cache serves them. The steps of the other
tiles, one tile after the other, are cut into one stretch for each cluster, just so long that all have
the same to do. A tile that is cut is the sum of several clusters' parts (exchange.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper.schedule import Grid, Job

_TILE_COST = 1  # of starting and storing a tile, in pairs of steps
_MIN_PAIRS = 4  # of a part: fewer are not worth the exchange
_TOLERANCE = 16  # whole tiles may exceed a cluster's share by one part in that many


@dataclasses.dataclass(frozen=True)
class StreamK:
    """Of tiles in rows: those of a row have the same steps, an even number.

    Attributes:
      clusters: in the persistent grid.
      width: tiles of a row.
    """

    clusters: int
    width: int

    @property
    def grid(self) -> Grid:
        """Stretches are numbered against the clusters, so that parts come from clusters that were launched earlier."""
        return Grid(self.clusters, odd=False, contributors=self.clusters - 1, contributor_stride=1)

    def shares(self, pairs: Array) -> Array:
        """What each cluster computes.

        Args:
          pairs: int32 [rows], of steps, of the tiles of each row; at least 1.

        Returns:
          int32 [clusters, 6], each with: number of whole tiles; first tile and first pair of its stretch;
          tile and pair after its last; number of other clusters' parts of its last tile.
        """
        costs = jnp.repeat(pairs + _TILE_COST, self.width)
        tiles = costs.shape[0]
        waves = -(-tiles // self.clusters)
        cluster = jnp.arange(self.clusters)
        fair = -(-jnp.sum(costs) // self.clusters)

        by_wave = jnp.pad(costs, (0, waves * self.clusters - tiles)).reshape(waves, self.clusters)
        load = _sums_up_to(by_wave)
        whole_waves = jnp.sum(jnp.all(load <= fair + fair // _TOLERANCE, axis=1))
        taken = jnp.arange(waves)[:, None] < whole_waves
        whole_tiles = jnp.minimum(whole_waves * self.clusters, tiles)
        room = fair - jnp.sum(jnp.where(taken, by_wave, 0), axis=0)

        ends = _sums_up_to(costs)
        first = jnp.sum(jnp.where(taken, by_wave, 0))
        cuts = jnp.minimum(first + _sums_up_to(jnp.maximum(room[::-1], 1)), ends[-1])
        tile, pair = self._places(jnp.append(first, cuts), ends, costs)
        part_of = jnp.where(pair > 0, tile, -1)[None, 1:-1]
        parts = jnp.sum((part_of == tile[1:, None]) & (cluster[1:] > cluster[:, None]), axis=1)
        stretches = jnp.stack([tile[:-1], pair[:-1], tile[1:], pair[1:], parts], axis=1)[::-1]
        whole = (whole_tiles - 1 - cluster) // self.clusters + 1
        return jnp.append(whole[:, None], stretches, axis=1).astype(jnp.int32)

    def _places(self, costs_before: Array, ends: Array, costs: Array) -> tuple[Array, Array]:
        """The tile and pair at which so much has been done, or the tile's start or end, if that is near."""
        tile = jnp.sum(ends <= costs_before[:, None], axis=1)
        last = ends.shape[0] - 1
        cost = costs[jnp.minimum(tile, last)]
        left = ends[jnp.minimum(tile, last)] - costs_before
        pair = cost - _TILE_COST - left
        near_start, near_end = pair < _MIN_PAIRS, left < _MIN_PAIRS
        beyond = tile > last
        return tile + (near_end & ~near_start & ~beyond), jnp.where(near_start | near_end | beyond, 0, pair)

    def jobs(self, shares: Any, pairs: Any, cluster: Array, origin: Callable[[Array], tuple[Array, Array]]):
        """The number of jobs of a cluster, and the i-th; `origin(tile)` is the tile's first row and column.

        Args:
          shares: of `shares`, in global memory.
          pairs: that it was made from, likewise.
          cluster: which.
          origin: where tiles lie.
        """

        def job(i: Array) -> Job:
            whole, first_tile, first_pair, last_tile, last_pair, parts = (shares[cluster, field] for field in range(6))
            in_stretch = i >= whole
            tile = jnp.where(in_stretch, first_tile + i - whole, cluster + i * self.clusters)
            begin = jnp.where(i == whole, first_pair, 0)
            cut = in_stretch & (tile == last_tile)
            end = jnp.where(cut, last_pair, pairs[lax.div(tile, self.width)])
            row, column = origin(tile)
            return Job(
                row=row,
                column=column,
                first_k=2 * begin,
                steps=2 * (end - begin),
                contributes=begin > 0,
                parts=jnp.where(cut & (begin == 0), parts, 0),
            )

        whole, first_tile, _, last_tile, last_pair, _ = (shares[cluster, field] for field in range(6))
        return whole + last_tile - first_tile + jnp.where(last_pair > 0, 1, 0), job


def _sums_up_to(x: Array) -> Array:
    """Sums of x[: i + 1], along the first axis: one fused reduction, unlike a scan."""
    index = jnp.arange(x.shape[0])
    below = (index <= index[:, None]).reshape(x.shape[0], x.shape[0], *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(below, x[None], 0), axis=1)
