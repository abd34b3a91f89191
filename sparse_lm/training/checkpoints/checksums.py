"""Checksums of arrays, computed where the arrays are: on their devices, whatever their sharding.

What is summed is what the accelerator holds, so that a mistake anywhere between its memory when an array
is saved and its memory when it is restored is noticed: in a transfer, in a library, on a disk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element


@functools.partial(jax.jit, static_argnames="axes_kept")
def checksums(arrays: Sequence[Array], axes_kept: tuple[int, ...]) -> list[Array]:
    """Computes 64 bits of each array that depend on every bit, on the place of each, and on nothing else.

    Each element is hashed together with its position, and the hashes are added modulo 2^32, twice: integer
    sums are the same in any order and on any mesh. Whatever happens to one element changes the checksum;
    any other change goes unnoticed once in 2^64 times.

    Elements have 1, 2 or 4 bytes. `axes_kept` says how many leading axes of each array to keep: 1 gives the checksum of
    each `x[i]`. Returns uint32[..., 2] for each array.
    """
    return [_checksum(x, kept) for x, kept in zip(arrays, axes_kept, strict=True)]


def _checksum(x: Array, axes_kept: int) -> Array:
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    words = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros((), jnp.uint32)
    for axis in range(axes_kept, words.ndim):  # in place: a flat index would gather a sharded array
        position = _mix(position + lax.broadcasted_iota(jnp.uint32, words.shape, axis) + 1)
    first = _mix(words ^ position)
    second = _mix(first + np.uint32(0x9E3779B9))
    summed = tuple(range(axes_kept, words.ndim))
    return jnp.stack([jnp.sum(part, axis=summed, dtype=jnp.uint32) for part in (first, second)], axis=-1)


def _mix(word: Array) -> Array:
    """Permutes the words as MurmurHash3's last step does: each bit depends on every bit of the argument."""
    word = (word ^ word >> 16) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * np.uint32(0xC2B2AE35)
    return word ^ word >> 16
