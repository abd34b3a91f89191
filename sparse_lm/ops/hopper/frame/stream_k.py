"""Shares of work where tiles have different, even numbers of steps, known at run time only ("stream-K", 2301.03598).

Clusters first take whole tiles in turn, as long as that leaves none with more than its share: tiles
that lie together are then computed together, and the L2 cache serves them. The steps of the other
tiles, one tile after the other, are cut into one stretch for each cluster, just so long that all have
the same to do. A tile that is cut is the sum of several clusters' parts (partial_sums.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.hopper.frame.schedule import Grid, Job, Work

_TILE_COST = 1  # of starting and storing a tile, in pairs of steps
_MIN_PAIRS = 4  # of a part: fewer are not worth the exchange
_SHARE_FIELDS = 6  # of a cluster, see `shares`
_TOLERANCE = 16  # whole tiles may exceed a cluster's share by one part in that many


def grid(clusters: int) -> Grid:
    """Describes the grid: stretches are numbered against the clusters, so that parts come from earlier clusters."""
    return Grid(clusters, odd=False, contributors=clusters - 1, contributor_stride=1)


def shares(clusters: int, pairs: Array) -> Array:
    """Shares out the pairs of steps of each tile, at least one. With the most first, whole tiles go farthest.

    Returns:
      int32 [clusters, 6], each with: number of whole tiles; first tile and first pair of its stretch;
      tile and pair after its last; number of other clusters' parts of its last tile.
    """
    costs = pairs + _TILE_COST
    tiles = costs.shape[0]
    ends = _sums_up_to(costs)
    fair = -(-ends[-1] // clusters)

    wave, cluster = jnp.arange(-(-tiles // clusters))[:, None], jnp.arange(clusters)
    tile = _tile_of_wave(clusters, wave, cluster)
    cost = jnp.where(tile < tiles, costs[jnp.minimum(tile, tiles - 1)], 0)
    fits = jnp.all(_sums_up_to(cost) <= fair + fair // _TOLERANCE, axis=1, keepdims=True)
    load = jnp.sum(jnp.where(fits, cost, 0), axis=0)
    whole = jnp.sum(fits & (tile < tiles), axis=0)

    room = jnp.maximum(fair - load[::-1], 1)
    # One reduction, and so one kernel, for the whole tiles and the stretches before each cut.
    before_cut = cluster < jnp.arange(clusters + 1)[:, None]
    cuts = jnp.minimum(jnp.sum(load + jnp.where(before_cut, room, 0), axis=1), ends[-1])
    tile, pair = _places(cuts, ends, costs)
    part_of = jnp.where(pair > 0, tile, -1)[1:-1]
    parts = jnp.sum((part_of == tile[1:, None]) & (cluster[1:] > cluster[:, None]), axis=1)
    stretches = jnp.stack([tile[:-1], pair[:-1], tile[1:], pair[1:], parts], axis=1)[::-1]
    return jnp.append(whole[:, None], stretches, axis=1).astype(jnp.int32)


def _tile_of_wave(clusters: int, wave: Array, cluster: Array) -> Array:
    """Goes to and fro, so that where tiles get ever smaller, no cluster has the larger one each time."""
    return wave * clusters + jnp.where(wave % 2 == 1, clusters - 1 - cluster, cluster)


def _places(costs_before: Array, ends: Array, costs: Array) -> tuple[Array, Array]:
    """Finds the tile and pair at which so much has been done, or the tile's start or end, if that is near."""
    tile = jnp.sum(ends <= costs_before[:, None], axis=1)
    last = ends.shape[0] - 1
    cost = costs[jnp.minimum(tile, last)]
    left = ends[jnp.minimum(tile, last)] - costs_before
    pair = cost - _TILE_COST - left
    near_start, near_end = pair < _MIN_PAIRS, left < _MIN_PAIRS
    beyond = tile > last
    return tile + (near_end & ~near_start & ~beyond), jnp.where(near_start | near_end | beyond, 0, pair)


def jobs(
    clusters: int, shares: Any, cluster: Array, pairs: Callable[[Array], Array], origin: Callable[[Array], tuple]
) -> Work:
    """Returns the number of jobs of one of so many clusters, and the i-th.

    `shares` are those of the function, in global memory; `pairs` and `origin` give a tile's pairs of steps, and its
    first row and column.
    """

    def job(i: Array) -> Job:
        whole, first_tile, first_pair, last_tile, last_pair, parts = _fields(shares, cluster)
        in_stretch = i >= whole
        tile = jnp.where(in_stretch, first_tile + i - whole, _tile_of_wave(clusters, i, cluster))
        begin = jnp.where(i == whole, first_pair, 0)
        cut = in_stretch & (tile == last_tile)
        end = jnp.where(cut, last_pair, pairs(tile))
        row, column = origin(tile)
        return Job(
            row=row,
            column=column,
            first_k=2 * begin,
            steps=2 * (end - begin),
            contributes=begin > 0,
            parts=jnp.where(cut & (begin == 0), parts, 0),
        )

    whole, first_tile, _, last_tile, last_pair, _ = _fields(shares, cluster)
    return whole + last_tile - first_tile + jnp.where(last_pair > 0, 1, 0), job


def _fields(shares: Any, cluster: Array) -> Iterator[Array]:
    """Reads what `shares` says of one cluster."""
    return (shares[cluster, field] for field in range(_SHARE_FIELDS))


def descending(x: Array) -> tuple[Array, Array]:
    """Sorts a short array int32 [n], largest first, and returns entries and indices; XLA fuses this, unlike a sort."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    before = (x > x[:, None]) | ((x == x[:, None]) & (index < index[:, None]))
    in_place = jnp.sum(before, axis=1) == index[:, None]
    return tuple(jnp.sum(jnp.where(in_place, entry, 0), axis=1, dtype=jnp.int32) for entry in (x, index))


def _sums_up_to(x: Array) -> Array:
    """Sums of x[: i + 1], along the first axis: one fused reduction, unlike a scan, of n^2 numbers."""
    index = jnp.arange(x.shape[0])
    below = (index <= index[:, None]).reshape(x.shape[0], x.shape[0], *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(below, x[None], 0), axis=1)
