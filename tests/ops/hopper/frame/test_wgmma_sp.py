"""Metadata of instructions in e4m3: the permutation that lanes make of the format's words, in NumPy."""

import jax.numpy as jnp
import numpy as np

from sparse_lm.ops.formats import pack_metadata
from sparse_lm.ops.hopper.frame import wgmma_sp


def prmt(a, b, selector):
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(data[selector >> 4 * i & 7] for i in range(4)), "little")


def test_lanes_of_e4m3_hold_eight_groups_of_a_row_each():
    first, second = np.random.default_rng(0).integers(4, size=(2, 64, 16))
    words = np.asarray(pack_metadata(jnp.asarray(first), jnp.asarray(second))).view(np.uint32).ravel()
    for lane in range(128):
        halves = wgmma_sp._ODD_LANES if lane % 2 else wgmma_sp._EVEN_LANES
        found = prmt(int(words[lane & ~1]), int(words[lane | 1]), halves)
        warp, g, t = lane // 32, lane % 32 // 4, lane % 4
        row, group = 16 * warp + g + 8 * (t % 2), 8 * (t // 2)
        nibbles = (first | second << 2)[row, group : group + 8]
        assert found == sum(int(nibble) << 4 * i for i, nibble in enumerate(nibbles)), lane
