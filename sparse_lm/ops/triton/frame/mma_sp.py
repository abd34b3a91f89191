"""The sparse tensor-core instruction of a warp, `mma.sp.sync.aligned.m16n8k32`, and the fragments it takes.

Triton passes the registers of a thread to inline assembly in the order in which its layout numbers them. So
the fragments of all operands are brought to one index space, [row tile, pair of column tiles, lane, element]:
a step in it is one lane's share of two instructions, side by side, that read the same 16 x 32 tile of the
2:4 operand. An operand that does not depend on a dimension is broadcast along it, which moves nothing.

With g = lane // 4 and t = lane % 4 (PTX ISA, "matrix fragments for sparse mma.m16n8k32"):

    a      8 elements, bit 0: values 2 t + 0, 1; bit 1: rows g, g + 8; bit 2: values + 0, + 8 (of 16 in a row)
    b      8 elements, bit 0: rows 2 t + 0, 1; bits 1, 2: rows + 0, + 8, + 16, + 24; column g
    sums   4 elements, bit 0: columns 2 t + 0, 1; bit 1: rows g, g + 8
    word   row g in the low half, row g + 8 in the high one; lanes with t = 0, 1 serve the first of two
           steps of 32, those with t = 2, 3 the second: just what `sparse_lm.ops.formats` stores

Values of a and rows of b within 16 are those of the dense instruction m16n8k16, whose layouts Gluon knows and
loads with `ldmatrix`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(16)  # of an instruction
COLUMNS = gl.constexpr(8)
STEP = gl.constexpr(32)  # logical k of an instruction
KEPT = gl.constexpr(16)  # values of it in a row of the 2:4 operand

# Of two instructions: sums out; a, b, b; sums in; and the metadata word, once for each element.
_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 8 + ["r"] * 12 + ["f"] * 8 + ["r"] * 8))


@gluon.constexpr_function
def tile_layout(tiling):
    """Returns the layout of a tile of the result: that of a dense product."""
    warps, shape = [tiling.warps_m, tiling.warps_n], [ROWS.value, COLUMNS.value]
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=warps, instr_shape=shape)


@gluon.constexpr_function
def fragment_layout(tiling):
    """Returns the layout of the index space of fragments."""
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], [tiling.warps_m, tiling.warps_n, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _assembly(dtype, selector):
    def registers(first):
        return "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"

    kind = dtype.name.replace("fp", "f")
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    return "\n".join(
        f"{name} {registers(4 * i)}, {registers(8)}, {registers(12 + 4 * i)}, {registers(20 + 4 * i)}, $28, {selector};"
        for i in range(2)
    )


@gluon.jit
def zeros(tiling: gl.constexpr):
    """Returns accumulators of a tile, zeros."""
    shape: gl.constexpr = [tiling.tile_m // ROWS, tiling.tile_n // (2 * COLUMNS), 32, 8]
    return gl.full(shape, 0.0, gl.float32, fragment_layout(tiling))


@gluon.jit
def load_a(values, tiling: gl.constexpr):
    """Loads fragments of the 2:4 operand's values [tile_m, 16] in shared memory."""
    rows: gl.constexpr = values.shape[0] // ROWS
    a = values.load(gl.DotOperandLayout(0, tile_layout(tiling), k_width=2))
    a = a.reshape([rows, 2, 8, 2, 4, 2]).permute([0, 2, 4, 3, 1, 5]).reshape([rows, 1, 32, 8])
    return gl.convert_layout(a, fragment_layout(tiling), assert_trivial=True)


@gluon.jit
def load_b(b, tiling: gl.constexpr):
    """Loads fragments of the dense operand's [32, tile_n] in shared memory: of the left and right one of each pair."""
    pairs: gl.constexpr = b.shape[1] // (2 * COLUMNS * tiling.warps_n)
    layout: gl.constexpr = fragment_layout(tiling)
    both = b.load(gl.DotOperandLayout(1, tile_layout(tiling), k_width=2))
    both = both.reshape([4, 4, 2, pairs, 2, tiling.warps_n, 8]).permute([3, 5, 6, 1, 0, 2, 4])
    left, right = both.reshape([1, pairs * tiling.warps_n, 32, 8, 2]).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def load_words(metadata, tiling: gl.constexpr):
    """Loads metadata words [tile_m / 16, 32] from shared memory, for two steps of 32."""
    layout: gl.constexpr = fragment_layout(tiling)
    return metadata.load(gl.SliceLayout(1, gl.SliceLayout(3, layout))).expand_dims(1).expand_dims(3)


@gluon.jit
def mma_sp(a, left, right, words, sums, selector: gl.constexpr):
    """Computes sums + a @ b for one step of 32; `selector` is its place, 0 or 1, in the 64 that the words describe."""
    assembly: gl.constexpr = _assembly(a.dtype, selector)
    return gl.inline_asm_elementwise(assembly, _CONSTRAINTS, [a, left, right, sums, words], gl.float32, True, pack=8)


@gluon.jit
def to_tile(sums, tiling: gl.constexpr):
    """Converts accumulators to the tile [tile_m, tile_n] that they are."""
    rows: gl.constexpr = sums.shape[0]
    pairs: gl.constexpr = sums.shape[1] // tiling.warps_n
    tile = sums.reshape([rows, pairs, tiling.warps_n, 8, 4, 2, 2, 2]).permute([0, 6, 3, 1, 5, 2, 4, 7])
    tile = tile.reshape([rows * ROWS, pairs * 2 * COLUMNS * tiling.warps_n])
    return gl.convert_layout(tile, tile_layout(tiling), assert_trivial=True)
