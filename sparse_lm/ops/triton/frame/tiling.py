"""Tilings of the products with a 2:4 operand, and which of several a GPU should take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.triton.frame import device


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A way to cut up a product with a 2:4 operand of its rows.

    A thread holds tile_m tile_n / (32 warps) sums; more than 128 do not fit.
    """

    tile_m: int  # rows of a thread block's tile, a power of two from 64 on
    tile_n: int  # columns of it, a power of two from 32 on
    warps_m: int  # along M
    warps_n: int  # along N, 16 columns each at least
    stages: int = 4  # of shared memory
    raster_width: int = 8  # tiles along M of a band

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Counts tiles along M and N."""
        return -(-m // self.tile_m), -(-n // self.tile_n)

    @property
    def shared_bytes(self) -> int:
        """Counts the bytes of the stages: values, metadata and the dense operand, two bytes a number."""
        return self.stages * (self.tile_m * TILE + self.tile_m * 8 + 2 * TILE * self.tile_n)


def largest_that_occupies(
    candidates: Sequence[Tiling], m: int, n: int, *, block_m: int = 0, block_n: int = 0
) -> Tiling:
    """Chooses, of tilings, largest first, the first of which every core of this GPU gets a tile, or else the last.

    Passes over those that need more shared memory than it has, or whose sides do not divide those of blocks.

    Raises:
      NotImplementedError: no tile divides a block, or none that does fits the shared memory.
    """
    candidates = [tiling for tiling in candidates if block_m % tiling.tile_m == block_n % tiling.tile_n == 0]
    if not candidates:
        raise NotImplementedError(f"needs v to be a multiple of {TILE}, not {block_m or block_n}")
    available = device.shared_bytes(device.compute_capability())
    fitting = [tiling for tiling in candidates if tiling.shared_bytes <= available]
    if not fitting:
        least = min(tiling.shared_bytes for tiling in candidates)
        raise NotImplementedError(f"needs {least} bytes of shared memory in a thread block, which has {available}")
    enough = [tiling for tiling in fitting if math.prod(tiling.grid(m, n)) >= device.core_count()]
    return (enough or fitting[-1:])[0]
