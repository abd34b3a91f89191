"""Compressed sparse matrices, as the sparse tensor cores read them.

Both formats hold the values that survive and, for every group of four along the contracted
dimension, four bits of metadata: `first | second << 2`, the positions of the two survivors in
ascending order. Metadata words are laid out for `wgmma.mma_async.sp` (PTX ISA, "sparse matrix
storage"), so that one coalesced 32-bit load per lane serves two consecutive instructions:

    metadata[row // 64, k // 64, lane]    int32, lane = 32 * warp + 4 * g + t
      bits  0..15   row 16 * warp + g       \\ four groups each: logical k 16 * t .. 16 * t + 15
      bits 16..31   row 16 * warp + g + 8   /

Arrays are padded to whole 64 x 64 tiles. Padding is value zero at positions (0, 1); a padded Venom column is `K`, one
past the last row of the dense operand, which readers take as a row of zeros. `shape` is the logical shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

TILE = 64  # rows, and logical columns, of one metadata tile
EMPTY_GROUP = 0b0100  # metadata of a group with nothing to keep: positions 0 and 1
EMPTY_WORD = EMPTY_GROUP * 0x11111111  # of eight groups


def _metadata_of_mask(mask: int) -> int:
    """Finds the two lowest positions that a group's four bits keep, filled up by the lowest free ones."""
    kept_first = sorted(range(4), key=lambda position: (not mask >> position & 1, position))
    first, second = sorted(kept_first[:2])
    return first | second << 2


METADATA_OF_MASKS = sum(_metadata_of_mask(mask) << 4 * mask for mask in range(16))
"""A table in 64 bits: bits 4 i to 4 i + 3 are the metadata of a group whose mask is i."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse24:
    """An [M, K] matrix with at most two non-zeros in each group of four along K.

    Attributes:
      values: [Mp, Kp / 2], the survivors in order; Mp and Kp are M and K rounded up to 64.
      metadata: [Mp / 64, Kp / 64, 128] int32, laid out as the module docstring says.
      shape: logical (M, K).
    """

    values: Array
    metadata: Array
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    def mask(self) -> Array:
        """Returns bool [M, K]: the positions that are stored, whatever their value."""
        return dataclasses.replace(self, values=jnp.ones_like(self.values, bool)).to_dense()

    def to_dense(self) -> Array:
        """Returns the matrix [M, K], dense, in the dtype of the values."""
        return _scatter_groups(self.values, *unpack_metadata(self.metadata))[: self.shape[0], : self.shape[1]]

    def take_rows(self, rows: Array) -> Array:
        """Takes some rows of the dense matrix, [n, K] for int32 [n]; the others are not unpacked.

        M stands for a row of zeros.
        """
        values = jnp.where((rows < self.shape[0])[:, None], self.values[rows], jnp.zeros((), self.dtype))
        return _scatter_groups(values, *unpack_metadata_rows(self.metadata, rows))[:, : self.shape[1]]

    def take_columns(self, columns: Array) -> Array:
        """Takes some columns of the dense matrix, [M, n] for int32 [n]; the others are not unpacked."""
        first, second = unpack_metadata_columns(self.metadata, columns)
        low, high = (self.values[:, columns // 4 * 2 + member] for member in range(2))
        zero, lane = jnp.zeros((), self.dtype), (columns % 4).astype(jnp.uint32)
        return jnp.where(first == lane, low, jnp.where(second == lane, high, zero))[: self.shape[0]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseVenom:
    """An [M, K] matrix in V:2:M form (2310.02065): V rows share the 4 columns kept of each M.

    The matrix is a 2:4 matrix over *condensed* columns: of block b, condensed column j is the
    logical column `columns[b, j]`. There are Kc = 4 K / m of them. The format does not require
    that a block's columns are four of every m: any Kc distinct columns do, such as one contiguous
    slice of neurons. Products take any; `squared_relu_gradients` says what it requires. `matmul_venom` also takes
    fewer than Kc, such as one layer's where b has the rows of all layers; `condensed` and `kept_columns` do not.

    Attributes:
      values: [Mp, Kcp / 2]; Mp is M rounded up to max(v, 64), Kcp is Kc rounded up to 64.
      metadata: [Mp / 64, Kcp / 64, 128] int32, over condensed columns.
      columns: [Mp / v, Kcp] int32; K where padded. What other numbers outside of 0..K do is not defined.
      shape: logical (M, K).
      v: rows of a block.
      m: columns of a group.
      contiguous: so many columns at a time are consecutive, and start at a multiple of that number. What is gathered is
        then boxes, not single rows. A number above 1 divides Kc. If it is a multiple of 64, no column is padded, but
        for blocks of rows that nobody reads: they list K throughout.
    """

    values: Array
    metadata: Array
    columns: Array
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    v: int = dataclasses.field(metadata=dict(static=True))
    m: int = dataclasses.field(metadata=dict(static=True))
    contiguous: int = dataclasses.field(default=1, metadata=dict(static=True))

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    def condensed(self) -> Array:
        """Returns the kept columns of each row's block, [M, Kc], with zeros where 2:4 dropped a value."""
        condensed = _scatter_groups(self.values, *unpack_metadata(self.metadata))
        return condensed[: self.shape[0], : 4 * self.shape[1] // self.m]

    def kept_columns(self) -> Array:
        """Returns `columns` without the padding, int32 [ceil(M / v), Kc]."""
        return self.columns[: -(-self.shape[0] // self.v), : 4 * self.shape[1] // self.m]

    def to_dense(self) -> Array:
        """Returns the matrix [M, K], dense, in the dtype of the values."""
        condensed = _scatter_groups(self.values, *unpack_metadata(self.metadata))
        rows, kc = condensed.shape
        blocks = condensed.reshape(rows // self.v, self.v, kc)
        dense = jnp.zeros((rows // self.v, self.v, self.shape[1]), condensed.dtype)
        spread = jax.vmap(lambda d, c, x: d.at[:, c].set(x, mode="drop"))(dense, self.columns, blocks)
        return spread.reshape(rows, -1)[: self.shape[0]]


class HiddenStats(NamedTuple):
    """Statistics of a hidden layer Y that selection saw, f32 scalars."""

    nonzeros: Array  # entries of Y that are not zero
    energy: Array  # sum of Y^2
    kept_energy: Array  # sum of Y^2 over the stored entries


class HiddenGradients(NamedTuple):
    """Results that the backward pass reads of the hidden layer."""

    dh: Any  # dH, in the format of Y and stored where Y is
    dh_t: Sparse24  # its transpose, 2:4 along tokens
    y_t: Sparse24  # the transpose of Y, 2:4 along tokens
    y_dy: Array  # sum of Y dY over what is stored of a token's Y, f32[T]


def types_24(rows: int, columns: int, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the types of values and metadata of a 2:4 matrix of this logical shape."""
    row_tiles, column_tiles = -(-rows // TILE), -(-columns // TILE)
    return (
        jax.ShapeDtypeStruct((row_tiles * TILE, column_tiles * TILE // 2), dtype),
        jax.ShapeDtypeStruct((row_tiles, column_tiles, 2 * TILE), jnp.int32),
    )


def pack_metadata(first: Array, second: Array) -> Array:
    """Packs positions of the survivors of each group, [Mp, Kp / 4] each, to words [Mp/64, Kp/64, 128] int32."""
    rows, groups = first.shape
    nibbles = first.astype(jnp.uint32) | second.astype(jnp.uint32) << 2
    shifts = 4 * jnp.arange(4, dtype=jnp.uint32)
    halves = jnp.sum(nibbles.reshape(rows, groups // 4, 4) << shifts, axis=-1, dtype=jnp.uint32)
    # row -> (tile, warp, half of the word, g); 16 logical k -> (tile, t)
    halves = halves.reshape(rows // TILE, 4, 2, 8, groups // 16, 4)
    words = halves[:, :, 0] | halves[:, :, 1] << 16
    words = words.transpose(0, 3, 1, 2, 4).reshape(rows // TILE, groups // 16, 128)
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack_metadata(metadata: Array) -> tuple[Array, Array]:
    """Inverts `pack_metadata`: returns (first, second), uint32 [Mp, Kp / 4] each."""
    row_tiles, k_tiles, _ = metadata.shape
    words = lax.bitcast_convert_type(metadata, jnp.uint32)
    words = words.reshape(row_tiles, k_tiles, 4, 8, 4).transpose(0, 2, 3, 1, 4)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=2)  # tile, warp, half, g, k tile, t
    return _positions(halves.reshape(row_tiles * TILE, k_tiles * 4))


def unpack_metadata_rows(metadata: Array, rows: Array) -> tuple[Array, Array]:
    """Returns what `unpack_metadata` does of some rows int32[n], uint32 [n, Kp / 4] each."""
    tile, row = rows[:, None] // TILE, rows[:, None] % TILE
    lanes = 32 * (row // 16) + 4 * (row % 8) + jnp.arange(4)
    words = lax.bitcast_convert_type(metadata, jnp.uint32)[tile, :, lanes].swapaxes(1, 2)  # row, k tile, t
    halves = words >> (16 * (row // 8 % 2)).astype(jnp.uint32)[..., None] & 0xFFFF
    return _positions(halves.reshape(rows.shape[0], -1))


def unpack_metadata_columns(metadata: Array, columns: Array) -> tuple[Array, Array]:
    """Returns what `unpack_metadata` does of the groups that some columns int32[n] are in, uint32 [Mp, n] each."""
    words = lax.bitcast_convert_type(metadata, jnp.uint32).reshape(*metadata.shape[:2], 4, 8, 4)
    words = words[:, columns // TILE, :, :, columns % TILE // 16]  # column, tile, warp, g
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=3).reshape(columns.shape[0], -1)
    nibbles = halves >> (columns % 16 // 4 * 4).astype(jnp.uint32)[:, None] & 0xF
    return nibbles.T & 3, nibbles.T >> 2


def _positions(halves: Array) -> tuple[Array, Array]:
    """Splits halves of words, of four groups each, uint32 [n, groups / 4], into positions [n, groups]."""
    nibbles = halves[..., None] >> (4 * jnp.arange(4, dtype=jnp.uint32)) & 0xF
    nibbles = nibbles.reshape(halves.shape[0], -1)
    return nibbles & 3, nibbles >> 2


def _scatter_groups(values: Array, first: Array, second: Array) -> Array:
    """Spreads values [n, Kp / 2] to [n, Kp]: the two of each group of four to its positions [n, Kp / 4]."""
    pairs, lane = values.reshape(*first.shape, 2), jnp.arange(4, dtype=jnp.uint32)
    zero = jnp.zeros((), values.dtype)
    second_or_zero = jnp.where(second[..., None] == lane, pairs[..., 1:], zero)
    return jnp.where(first[..., None] == lane, pairs[..., :1], second_or_zero).reshape(values.shape[0], -1)
