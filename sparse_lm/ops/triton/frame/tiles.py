"""Tiles of 64 x 64 in the registers of a thread block: who stores a word of metadata has all that it describes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_lm.ops.formats import TILE
from sparse_lm.ops.triton.frame.two_of_four import pack_words

WARPS = 4
_TILE = gl.constexpr(TILE)
KEPT = gl.constexpr(TILE // 2)
GROUPS = gl.constexpr(TILE // 4)
WORDS = gl.constexpr(2 * TILE)


@gluon.constexpr_function
def tile_layout(columns):
    """Returns the layout of a tile's [64, columns] numbers.

    Lane 4 g + t of a warp has a fourth of the columns of rows g and g + 8, those that its word of metadata is about:
    nothing but loads and stores leaves the registers of a thread.
    """
    fourth = columns // 4
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << bit] for bit in range(fourth.bit_length() - 1)] + [[8, 0]],
        lane_bases=[[0, fourth], [0, 2 * fourth], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[TILE, columns],
    )


@gluon.constexpr_function
def rows_layout(numbers, threads, warps, axis=1):
    """Returns the layout of rows, or columns if `axis` is 0: so many numbers side by side in a thread, of so many
    threads, which are at most a warp."""
    threads = min(32, threads)
    sizes = [1, numbers], [32 // threads, threads], [warps, 1]
    return gl.BlockedLayout(*(size if axis == 1 else size[::-1] for size in sizes), [axis, 1 - axis])


TILE_LAYOUT = gl.constexpr(tile_layout(TILE))
PAIRS_LAYOUT = gl.constexpr(tile_layout(TILE // 2))  # of 16-bit floats in words, or of survivors, two a group
GROUPS_LAYOUT = gl.constexpr(tile_layout(TILE // 4))  # of one number a group
FOUR_GROUPS_LAYOUT = gl.constexpr(tile_layout(TILE // 16))  # of one number for four groups
WORDS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def indices(count: gl.constexpr, layout: gl.constexpr, axis: gl.constexpr):
    """Returns 0, 1, .. as a column (axis 0) or a row (axis 1) of a matrix in a layout."""
    return gl.arange(0, count, gl.SliceLayout(1 - axis, layout)).expand_dims(1 - axis)


@gluon.jit
def offsets(row_tile, tile, columns: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):
    """Computes rows, columns and offsets of a tile of 64 rows and `width` columns in a matrix of `columns`."""
    row, column = row_tile * _TILE + indices(_TILE, layout, 0), tile * width + indices(width, layout, 1)
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
def locate_survivors(values, row_tile, k_tile, K_TILES: gl.constexpr):
    """Computes the pointers to a tile's survivors, [64, 16] words of two each."""
    return as_words(values) + offsets(row_tile, k_tile, K_TILES * GROUPS, GROUPS, GROUPS_LAYOUT)[2]


@gluon.jit
def store_sparse(kept, nibble, values, metadata, row_tile, k_tile, K_TILES: gl.constexpr):
    """Stores a tile's survivors, words [64, 16], and nibbles [64, 16], in a matrix with K_TILES tiles in a row."""
    kept = gl.convert_layout(kept, GROUPS_LAYOUT, assert_trivial=True)
    gl.store(locate_survivors(values, row_tile, k_tile, K_TILES), kept)
    words = gl.convert_layout(pack_words(nibble), WORDS_LAYOUT, assert_trivial=True)
    gl.store(metadata + (row_tile * K_TILES + k_tile) * WORDS + gl.arange(0, WORDS, WORDS_LAYOUT), words)
