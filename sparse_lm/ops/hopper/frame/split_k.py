"""Splitting the last tiles of a persistent grid along k.

When the tiles do not fill the last wave, its few tiles are computed by several clusters each, a part
of the steps apiece. Part 0 belongs to the clusters that start last, so that whoever waits, waits for
clusters that run or have run (partial_sums.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.hopper.frame.schedule import Grid, Job, Jobs, Work, cluster_count
from sparse_lm.ops.hopper.frame.tiling import Tiling

_MAX_PARTS = 8
_MIN_STEPS = 8  # of a part: fewer are not worth the exchange


@dataclasses.dataclass(frozen=True)
class Plan:
    """The share of each cluster in a product's tiles."""

    clusters: int
    waves: int  # whole tiles that every cluster computes
    tail_tiles: int  # tiles that are left over
    parts: int  # along k, of each of those
    steps: int  # of a whole tile
    part_steps: int  # of a part; odd if `steps` is

    @property
    def grid(self) -> Grid:
        """Describes the grid: parts of a tile lie `tail_tiles` clusters apart, part 0 last."""
        contributors = self.tail_tiles * (self.parts - 1)
        return Grid(self.clusters, self.steps % 2 == 1, contributors, contributor_stride=self.tail_tiles)

    @property
    def length(self) -> float:
        """Computes the length of the schedule, in units of a tile's time."""
        return self.waves + (1 / self.parts if self.tail_tiles else 0)

    def jobs(
        self,
        cluster: Array,
        origin: Callable[[Array], tuple[Array, Array]],
        in_use: Callable[[Array, Array], Array] | None = None,
    ) -> Work:
        """Returns the number of jobs of a cluster, and the i-th.

        `origin` gives a tile's first row and column, and `in_use` of those whether the tile has anything to sum up. Of
        others, whose operand is all zeros, as few steps are taken as there may be. By default all have.
        """
        tail_tile = lax.rem(cluster, max(self.tail_tiles, 1))
        part = self.parts - 1 - lax.div(cluster, max(self.tail_tiles, 1))

        def job(i: Array) -> Job:
            in_tail = i == self.waves
            row, column = origin(self.clusters * i + jnp.where(in_tail, tail_tile, cluster))
            contributes = in_tail & (part > 0)
            steps = jnp.where(in_tail, self.part_steps, self.steps)
            if in_use is not None:
                steps = jnp.where(in_use(row, column), steps, 1 if self.grid.odd else 2)
            return Job(
                row=row,
                column=column,
                first_k=jnp.where(in_tail, part * self.part_steps, 0),
                steps=steps,
                contributes=contributes,
                parts=jnp.where(in_tail & ~contributes, self.parts - 1, 0),
            )

        return self.waves + jnp.where(cluster < self.tail_tiles * self.parts, 1, 0), job


def plan_product(tiling: Tiling, m: int, n: int, steps: int) -> Plan:
    """Makes the `plan` for the tiles of a product [m, n] on this process' GPU."""
    return plan(math.prod(tiling.grid(m, n)), cluster_count(), steps)


def schedule_product(
    tiling: Tiling,
    m: int,
    n: int,
    steps: int,
    in_use: Callable[[Any, Array, Array], Array] | None = None,
    *,
    band_axis: int = 0,
) -> tuple[Grid, Jobs]:
    """Returns grid and jobs of a product [m, n] of so many steps along k, its tiles in bands along an axis.

    `in_use` is that of `Plan.jobs`, called with the operands in global memory, too.
    """
    plan, grid = plan_product(tiling, m, n, steps), tiling.grid(m, n)

    def jobs(operands: Any, cluster: Array, peer: Array) -> Work:
        def origin(tile: Array) -> tuple[Array, Array]:
            return tiling.origin(*plgpu.planar_snake(tile, grid, band_axis, tiling.raster_width), peer)

        return plan.jobs(cluster, origin, in_use and functools.partial(in_use, operands))

    return plan.grid, jobs


def fastest(candidates: Sequence[Tiling], m: int, n: int, steps: int) -> Tiling:
    """Chooses the tiling that is done first with a product [m, n] of so many steps along k.

    A larger tile takes less time for its size, but there are fewer to share out.
    """
    return min(candidates, key=lambda tiling: plan_product(tiling, m, n, steps).length * tiling.time)


def plan(tiles: int, clusters: int, steps: int) -> Plan:
    """Cuts each tile of the last wave into as many parts as there are clusters for.

    Where the parts are uneven, the last one's last steps lie past the end, where copies read zeros.
    """
    waves, tail_tiles = divmod(tiles, clusters)
    parts = max(1, min(clusters // tail_tiles, steps // _MIN_STEPS, _MAX_PARTS)) if tail_tiles else 1
    part_steps = -(-steps // parts)
    part_steps += (part_steps - steps) % 2
    parts = -(-steps // part_steps)
    launched = clusters if waves else tail_tiles * parts
    return Plan(launched, waves, tail_tiles, parts, steps, part_steps)
