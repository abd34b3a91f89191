"""Dense matrix to its 2:4 form in one pass over memory.

Why: weights are sparsified every step and activations in every layer. XLA reads the matrix once for
the values and again for the metadata, and writes what lies between.

A block is one warpgroup and takes one tile of 64 x 64. Thread 32 w + 4 g + t holds rows 16 w + g and
16 w + g + 8, columns 16 t to 16 t + 15: eight groups of four, whose values are 16 bytes a row and
whose metadata is one word, so that every access is a whole sector and no thread needs another's. For
the transpose (axis 0) a tile takes the way through shared memory, whose odd row length keeps columns
off one bank.

Numerics: those of the reference bit for bit; `sparse_lm.ops.select` has the rules.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import ArrayLike, DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.compress import pad_to_tiles
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.hopper.gather import global_pointer

_THREADS = 128
_INF = 0x7F800000
_NAN_RANK = 0x7FC00000
_RUN = 16  # columns of a row that a thread holds: four groups
_BYTES = 16  # of an access to global memory
_TRANSPOSED_STRIDE = TILE + 1
_SCALAR = plgpu.Layout.WG_SPLAT(())


def sparsify_24(
    x: Array,
    method: str,
    axis: int,
    *,
    scale: ArrayLike,
    dtype: DTypeLike,
    key: Array | None = None,
) -> Sparse24:
    """See `sparse_lm.ops.sparsify_24`.

    Raises:
      NotImplementedError: the method draws at random, or the dtypes.
    """
    del key
    dtype = jnp.dtype(dtype)
    if method == "mvue":
        raise NotImplementedError("does not draw at random")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes float32 or 16-bit floats and gives 16-bit floats, not {x.dtype} to {dtype}")
    padded = pad_to_tiles(x)
    scale = jnp.asarray(scale, jnp.float32).reshape(1)
    values, metadata = _call(padded, scale, method, dtype, transposed=axis == 0)
    return Sparse24(values, metadata, x.shape[::-1] if axis == 0 else x.shape)


def _call(x: Array, scale: Array, method: str, dtype: jnp.dtype, *, transposed: bool) -> tuple[Array, Array]:
    rows, columns = x.shape[::-1] if transposed else x.shape
    row_tiles, column_tiles = rows // TILE, columns // TILE
    out_type = (
        jax.ShapeDtypeStruct((rows, columns // 2), dtype),
        jax.ShapeDtypeStruct((row_tiles, column_tiles, _THREADS), jnp.int32),
    )

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, *(_SCALAR,) * 3))
    def sparsify_tile(_, x_gmem, tile_smem, values_gmem, metadata_gmem, factor, row_tile, column_tile):
        thread = _Thread.current(row_tile.registers.item(), column_tile.registers.item())
        load = _load_transposed if transposed else _load
        _emit_tile(load(x_gmem, tile_smem, thread), values_gmem, metadata_gmem, factor.registers.item(), thread, method)

    def kernel(x_gmem, scale_gmem, values_gmem, metadata_gmem, tile_smem):
        tile = lax.axis_index("row"), lax.axis_index("column")
        sparsify_tile(x_gmem, tile_smem, values_gmem, metadata_gmem, scale_gmem[0], *tile)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(column_tiles, row_tiles),
        grid_names=("column", "row"),
        scratch_types=[plgpu.SMEM((TILE, _TRANSPOSED_STRIDE) if transposed else (1, 1), x.dtype)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(x, scale)


@dataclasses.dataclass(frozen=True)
class _Thread:
    """Where a thread stands: its tile, and its two rows and sixteen columns there (of x, or of its transpose)."""

    row_tile: ir.Value
    column_tile: ir.Value
    index: ir.Value
    row: ir.Value  # the upper one, in the tile
    column: ir.Value  # the first, in the tile

    @classmethod
    def current(cls, row_tile: ir.Value, column_tile: ir.Value) -> _Thread:
        index = arith.remui(mgpu_utils.thread_idx(), _i32(_THREADS))
        lane = arith.remui(index, _i32(32))
        warp_row = arith.muli(arith.divui(index, _i32(32)), _i32(16))
        row = arith.addi(warp_row, arith.divui(lane, _i32(4)))
        return cls(row_tile, column_tile, index, row, arith.muli(arith.remui(lane, _i32(4)), _i32(_RUN)))

    def start(self, half: int, width: int) -> ir.Value:
        """Offset of its columns in its upper (0) or lower (1) row, in a matrix of `width` columns."""
        row = arith.addi(arith.addi(arith.muli(self.row_tile, _i32(TILE)), self.row), _i32(8 * half))
        column = arith.addi(arith.muli(self.column_tile, _i32(TILE)), self.column)
        return arith.addi(_mul64(row, width), arith.extui(_i64_type(), column))


def _load(x: ir.Value, _, thread: _Thread) -> list[list[ir.Value]]:
    """Both rows' columns, float32, from x itself."""
    width = ir.MemRefType(x.type).shape[1]
    return [_to_float32(_load_vectors(x, thread.start(half, width), _RUN)) for half in range(2)]


def _load_transposed(x: ir.Value, tile: ir.Value, thread: _Thread) -> list[list[ir.Value]]:
    """Both rows' columns, float32, of the transpose of x: columns of x, by way of the shared tile."""
    width = ir.MemRefType(x.type).shape[1]
    element = ir.MemRefType(x.type).element_type
    lanes = _BYTES // mgpu_utils.bytewidth(element)
    threads_per_row = TILE // lanes
    rows_at_once = _THREADS // threads_per_row
    row = arith.divui(thread.index, _i32(threads_per_row))
    column = arith.muli(arith.remui(thread.index, _i32(threads_per_row)), _i32(lanes))

    def offset(first_row: int, stride: int) -> ir.Value:
        return arith.addi(arith.muli(arith.addi(row, _i32(first_row)), _i32(stride)), column)

    # A tile's rows are columns of the result: the tile at (column_tile, row_tile) of x.
    x_row = arith.addi(arith.muli(thread.column_tile, _i32(TILE)), row)
    x_column = arith.addi(arith.muli(thread.row_tile, _i32(TILE)), column)
    first_rows = range(0, TILE, rows_at_once)
    loaded = []
    for first_row in first_rows:
        start = arith.addi(_mul64(arith.addi(x_row, _i32(first_row)), width), arith.extui(_i64_type(), x_column))
        loaded.append(_load_vectors(x, start, lanes))
    shared = mgpu_utils.memref_ptr(tile)
    for first_row, values in zip(first_rows, loaded, strict=True):
        start = offset(first_row, _TRANSPOSED_STRIDE)
        for i, value in enumerate(values):
            llvm.store(value, mgpu_utils.getelementptr(shared, [arith.addi(start, _i32(i))], element))
    mgpu_utils.warpgroup_barrier()
    runs = []
    for half in range(2):
        x_column = arith.addi(thread.row, _i32(8 * half))
        run = []
        for i in range(_RUN):
            index = arith.muli(arith.addi(thread.column, _i32(i)), _i32(_TRANSPOSED_STRIDE))
            run.append(llvm.load(element, mgpu_utils.getelementptr(shared, [arith.addi(index, x_column)], element)))
        runs.append(_to_float32(run))
    return runs


def _emit_tile(runs, values, metadata, factor: ir.Value, thread: _Thread, method: str) -> None:
    """Selects from a thread's two runs of 16 and stores what survives."""
    width = ir.MemRefType(values.type).shape[1]
    word = _i32(0)
    for half, run in enumerate(runs):
        kept = []
        for group in range(_RUN // 4):
            survivors, nibble = _two_of_four(run[4 * group : 4 * group + 4], method)
            kept += [arith.mulf(survivor, factor) for survivor in survivors]
            word = arith.ori(word, arith.shli(nibble, _i32(_RUN * half + 4 * group)))
        _store_vector(values, arith.shrui(thread.start(half, 2 * width), _i64(1)), kept)
    tiles = ir.MemRefType(metadata.type).shape[1]
    tile = arith.addi(arith.muli(thread.row_tile, _i32(tiles)), thread.column_tile)
    index = arith.addi(_mul64(tile, _THREADS), arith.extui(_i64_type(), thread.index))
    llvm.store(word, mgpu_utils.getelementptr(global_pointer(metadata), [index], word.type))


def _two_of_four(members: list[ir.Value], method: str) -> tuple[list[ir.Value], ir.Value]:
    """The two survivors of a group of float32, in order, and its four bits of metadata."""
    ranks = [_magnitude_rank(member) for member in members]
    wins = {(i, j): arith.cmpi(arith.CmpIPredicate.sge, ranks[i], ranks[j]) for i in range(4) for j in range(i + 1, 4)}

    def kept(i):
        """Whether i wins two of its three comparisons."""
        a, b, c = (wins[i, j] if i < j else _not(wins[j, i]) for j in range(4) if j != i)
        return arith.ori(arith.andi(a, b), arith.andi(c, arith.ori(a, b)))

    keeps = [kept(i) for i in range(4)]

    def low(options):
        return arith.select(keeps[0], options[0], arith.select(keeps[1], options[1], options[2]))

    def high(options):
        return arith.select(keeps[3], options[3], arith.select(keeps[2], options[2], options[1]))

    positions = [_i32(i) for i in range(4)]
    nibble = arith.ori(low(positions), arith.shli(high(positions), _i32(2)))
    survivors = [(low(members), low(ranks)), (high(members), high(ranks))]
    if method == "magnitude":
        return [value for value, _ in survivors], nibble
    threshold = _second_smallest(ranks)
    return [_shrink(value, rank, threshold) for value, rank in survivors], nibble


def _magnitude_rank(x: ir.Value) -> ir.Value:
    """`select.magnitude_rank` of one float32."""
    magnitude = arith.andi(arith.bitcast(_i32_type(), x), _i32(0x7FFFFFFF))
    return arith.select(arith.cmpi(arith.CmpIPredicate.sgt, magnitude, _i32(_INF)), _i32(_NAN_RANK), magnitude)


def _second_smallest(ranks: list[ir.Value]) -> ir.Value:
    a, b, c, d = ranks
    larger_of_smallest = arith.maxsi(arith.minsi(a, b), arith.minsi(c, d))
    return arith.minsi(larger_of_smallest, arith.minsi(arith.maxsi(a, b), arith.maxsi(c, d)))


def _shrink(x: ir.Value, rank: ir.Value, threshold: ir.Value) -> ir.Value:
    """sign(x) max(|x| - threshold, 0); +0 where |x| equals the threshold, unless x is NaN."""
    sign = arith.andi(arith.bitcast(_i32_type(), x), _i32(-(2**31)))
    signed_threshold = arith.bitcast(ir.F32Type.get(), arith.ori(threshold, sign))
    is_nan = arith.cmpi(arith.CmpIPredicate.eq, rank, _i32(_NAN_RANK))
    zero = arith.constant(ir.F32Type.get(), 0.0)
    at_threshold = arith.select(is_nan, x, zero)
    return arith.select(
        arith.cmpi(arith.CmpIPredicate.sle, rank, threshold), at_threshold, arith.subf(x, signed_threshold)
    )


def _load_vectors(x: ir.Value, start: ir.Value, count: int) -> list[ir.Value]:
    """`count` neighbours of global memory, in loads of 16 bytes."""
    element = ir.MemRefType(x.type).element_type
    lanes = _BYTES // mgpu_utils.bytewidth(element)
    run = []
    for first in range(0, count, lanes):
        pointer = mgpu_utils.getelementptr(global_pointer(x), [arith.addi(start, _i64(first))], element)
        loaded = llvm.load(ir.VectorType.get((lanes,), element), pointer, alignment=_BYTES)
        run += [llvm.extractelement(loaded, _i32(i)) for i in range(lanes)]
    return run


def _store_vector(values: ir.Value, start: ir.Value, kept: list[ir.Value]) -> None:
    """Eight neighbours, rounded to the 16-bit dtype, in one store of 16 bytes."""
    element = ir.MemRefType(values.type).element_type
    vector = llvm.mlir_undef(ir.VectorType.get((len(kept),), element))
    for i, value in enumerate(kept):
        vector = llvm.insertelement(vector, arith.truncf(element, value), _i32(i))
    pointer = mgpu_utils.getelementptr(global_pointer(values), [start], element)
    llvm.store(vector, pointer, alignment=_BYTES)


def _to_float32(values: list[ir.Value]) -> list[ir.Value]:
    float32 = ir.F32Type.get()
    return [value if value.type == float32 else arith.extf(float32, value) for value in values]


def _not(a: ir.Value) -> ir.Value:
    return arith.xori(a, arith.constant(ir.IntegerType.get_signless(1), 1))


def _mul64(a: ir.Value, factor: int) -> ir.Value:
    return arith.muli(arith.extui(_i64_type(), a), _i64(factor))


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _i32(value: int) -> ir.Value:
    return arith.constant(_i32_type(), value)


def _i64(value: int) -> ir.Value:
    return arith.constant(_i64_type(), value)
