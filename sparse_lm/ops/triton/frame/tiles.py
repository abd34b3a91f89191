"""Tiles of 64 x 64 in the registers of a thread block: who stores a word of metadata has all that it describes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.triton.frame.two_of_four import interleave, pack_words

WARPS = 4
_TILE = gl.constexpr(TILE)
KEPT = gl.constexpr(TILE // 2)
GROUPS = gl.constexpr(TILE // 4)
WORDS = gl.constexpr(2 * TILE)

# Lane 4 g + t of a warp has 16 elements of rows g and g + 8, those that its word of metadata is about: nothing but
# loads and stores leaves the registers of a thread.
_ROW_LANES = [[1, 0], [2, 0], [4, 0]]
_ROW_WARPS = [[16, 0], [32, 0]]
TILE_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], *_ROW_LANES],
        warp_bases=_ROW_WARPS,
        block_bases=[],
        shape=[TILE, TILE],
    )
)
HALVES_LAYOUT = gl.constexpr(  # of words of metadata, four groups each
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], *_ROW_LANES],
        warp_bases=_ROW_WARPS,
        block_bases=[],
        shape=[TILE, 4],
    )
)
PAIRS_LAYOUT = gl.constexpr(  # of 16-bit floats in words, or of survivors, two a group
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], *_ROW_LANES],
        warp_bases=_ROW_WARPS,
        block_bases=[],
        shape=[TILE, TILE // 2],
    )
)


@gluon.constexpr_function
def groups_layout(warps):
    """Returns the layout of one number a group, [64, 16]; from the fifth on, warps have what the first four have."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], *_ROW_LANES],
        warp_bases=_ROW_WARPS + [[0, 0]] * (warps.bit_length() - 3),
        block_bases=[],
        shape=[TILE, TILE // 4],
    )


GROUPS_LAYOUT = gl.constexpr(groups_layout(WARPS))
PAIRED_GROUPS_LAYOUT = gl.constexpr(  # of one number for two groups
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], *_ROW_LANES],
        warp_bases=_ROW_WARPS,
        block_bases=[],
        shape=[TILE, TILE // 8],
    )
)
WORDS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))  # loads whole rows


@gluon.jit
def indices(count: gl.constexpr, layout: gl.constexpr, axis: gl.constexpr):
    """Returns 0, 1, .. as a column (axis 0) or a row (axis 1) of a matrix in a layout."""
    return gl.arange(0, count, gl.SliceLayout(1 - axis, layout)).expand_dims(1 - axis)


@gluon.jit
def offsets(row_tile, tile, columns: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):
    """Computes rows, columns and offsets of a tile of 64 rows and `width` columns in a matrix of `columns`."""
    row = row_tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, layout))[:, None]
    column = tile * width + gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    return row, column, row.to(gl.int64) * columns + column


@gluon.jit
def load_tile(x, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Loads float32 [64, 64]; zeros past the last row and column."""
    row, column, offset = offsets(row_tile, tile, COLUMNS, _TILE, layout)
    return gl.load(x + offset, mask=(row < ROWS) & (column < COLUMNS), other=0.0).to(gl.float32)


@gluon.jit
def as_words(pointer):
    """Turns a pointer to 16-bit floats into one to pairs of them."""
    return pointer.to(gl.pointer_type(gl.int32))


@gluon.jit
def load_pairs(x, row_tile, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Loads members 0 and 1, and 2 and 3, of the groups of 16-bit floats: words [64, 16] each. COLUMNS is even."""
    row, column, offset = offsets(row_tile, tile, COLUMNS // 2, _TILE // 2, PAIRS_LAYOUT)
    words = gl.load(as_words(x) + offset, mask=(row < ROWS) & (column < COLUMNS // 2), other=0)
    low, high = gl.split(words.reshape([_TILE, GROUPS, 2]))
    low = gl.convert_layout(low, GROUPS_LAYOUT, assert_trivial=True)
    return low, gl.convert_layout(high, GROUPS_LAYOUT, assert_trivial=True)


@gluon.jit
def load_survivors(values, row_tile, k_tile, K_TILES: gl.constexpr):
    """Loads survivors of a tile, words [64, 16] of two each."""
    _, _, offset = offsets(row_tile, k_tile, K_TILES * GROUPS, GROUPS, GROUPS_LAYOUT)
    return gl.load(as_words(values) + offset)


@gluon.jit
def store_survivors(words, values, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores survivors of a tile, words [64, 16] of two each."""
    _, _, offset = offsets(row_tile, k_tile, K_TILES * GROUPS, GROUPS, GROUPS_LAYOUT)
    gl.store(as_words(values) + offset, words)


@gluon.jit
def store_metadata(nibble, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores metadata of a tile, of nibbles [64, 16]."""
    words = gl.convert_layout(pack_words(nibble), WORDS_LAYOUT, assert_trivial=True)
    gl.store(metadata + (row_tile * K_TILES + k_tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT), words)


@gluon.jit
def store_sparse(low, high, nibble, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores survivors [64, 16] of a tile, rounded, and its metadata, of nibbles [64, 16]."""
    _, _, offset = offsets(row_tile, k_tile, K_TILES * KEPT, KEPT, PAIRS_LAYOUT)
    pairs = interleave(low, high).to(values.dtype.element_ty)
    gl.store(values + offset, gl.convert_layout(pairs, PAIRS_LAYOUT, assert_trivial=True))
    store_metadata(nibble, metadata, row_tile, k_tile, K_TILES)
