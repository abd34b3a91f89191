"""`sampled_matmul_24`, and the Venom form of Y = relu(H)^2, of which only the kept neurons are read again.

The product writes Y transposed, [F, T], and of each neuron the sum of Y^2 over each 64 tokens. A second kernel chooses
each block's neurons by these sums, and reads the block's tokens of those: 2 v neighbouring bytes a neuron, 4 / m of Y.
Where tokens are the rows, memory gives no less than 16 neurons of a token: `squared_relu_venom` reads all of H.

Numerics: those of the two kernels, but for the order in which a norm is summed; so two neurons of nearly equal norm may
rank otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.hopper.frame import packed_24
from sparse_lm.ops.hopper.frame.emit import (
    COMPILER_PARAMS,
    SCALAR,
    WARPGROUP_SIZE,
    f32,
    global_pointer,
    i32,
    i32_type,
    i64_type,
    load_words,
    mul64,
    ptx,
    store_if,
    sum_of,
    vector,
)
from sparse_lm.ops.hopper.frame.hidden_stats import STATS, WARPS, Seen, store_stats
from sparse_lm.ops.hopper.frame.operands import pad_to, result_type, round_up
from sparse_lm.ops.hopper.frame.store import store_tile
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, THREAD_COLUMNS, Thread, groups, store_thread_columns
from sparse_lm.ops.hopper.frame.tiling import Epilogue
from sparse_lm.ops.hopper.passes.sparsify_venom import check_venom, choose_columns, squared_relu_venom
from sparse_lm.ops.hopper.products.sampled_matmul_24 import (
    Config,
    heuristic_config,
    multiply_listed,
    sampled_matmul_24,
    takes_contiguous,
)
from sparse_lm.ops.kernel_dtypes import check_product_dtypes

_CHUNK = 8  # tokens of 16 bytes
_ROWS_AT_ONCE = 16  # of a tile, whatever v, by 2 v threads with a chunk each
_SKEW = 16  # elements between the 16 rows that a thread selects from and the next 16: four threads use other banks


def sampled_squared_relu_venom(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    block: int,
    v: int,
    m: int,
    *,
    contiguous: int = 1,
    config: Config | None = None,
) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_venom`.

    Runs that no tile of `sampled_matmul_24` fits, and blocks that v does not divide, are left to the two kernels.

    Raises:
      NotImplementedError: the dtypes, block, v or m.
    """
    if not takes_contiguous(contiguous, block) or block % v:
        h = sampled_matmul_24(w, x, neuron_ids, block, contiguous=contiguous)
        return squared_relu_venom(h, v, m)
    check_product_dtypes(w.dtype, x.dtype, x.dtype)
    tokens, neurons = x.shape[0], neuron_ids.shape[1]
    check_venom(jax.ShapeDtypeStruct((tokens, neurons), x.dtype), v, m)
    x = pad_to(x, (-(-tokens // v) * v, round_up(x.shape[1])))
    y_type = result_type(neurons, x.shape[0], x.dtype)
    config = config or heuristic_config(x.shape[0], neurons, x.shape[1], block)
    y, norms, nonzeros = multiply_listed(
        config,
        w,
        x,
        neuron_ids,
        block,
        contiguous,
        y_type,
        name="sampled_squared_relu",
        epilogue=_squared_relu(neurons, y_type),
    )
    values, metadata, kept, stats = _select(y, norms, x.shape[0], v, m)
    _, energy, kept_energy = jnp.sum(stats, axis=(0, 1))
    seen = HiddenStats(jnp.sum(nonzeros, dtype=jnp.float32), energy, kept_energy)
    return SparseVenom(values, metadata, kept, (tokens, neurons), v, m), seen


def _squared_relu(neurons: int, y: jax.ShapeDtypeStruct) -> Epilogue:
    """Makes the epilogue: Y^T; float32 [T / 64, F], sums of Y^2; int32 [F / 64, T / 64, 4], non-zeros that each warp
    saw."""
    tokens = y.shape[1]
    out_types = (
        y,
        jax.ShapeDtypeStruct((tokens // TILE, neurons), jnp.float32),
        jax.ShapeDtypeStruct((neurons // TILE, tokens // TILE, WARPS), jnp.int32),
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def measure(_, part, norms, nonzeros, neuron_tile, token_tile):
        tiles = neuron_tile.registers.item(), token_tile.registers.item()
        _store_norms(part, norms, *tiles)
        _store_nonzeros(part, nonzeros, *tiles)

    def store(part: Array, slots: Any, _, outs: Sequence[Any], origin: tuple[Array, Array], number: int) -> None:
        y_gmem, norms, nonzeros = outs
        neuron, token = origin
        relu = jnp.maximum(part, jnp.zeros((), part.dtype))
        part = relu * relu
        store_tile(part, slots, y_gmem, origin, first_store=number, transposed=False)

        @pl.when((neuron < neurons) & (token < tokens))
        def _inside():
            measure(part, norms, nonzeros, lax.div(neuron, TILE), lax.div(token, TILE))

    return Epilogue(out_types, store)


def _store_norms(part: mgpu.FragmentedArray, norms: ir.Value, neuron_tile: ir.Value, token_tile: ir.Value) -> None:
    """Sums of squares along the rows of a tile [64, 64] in layout WGMMA, by the tensor cores.

    A warp's 16 rows are laid out as both operands of m16n8k16, the left one and, by halves, the right one: the sums are
    the diagonal of their product.
    """
    zeros = [f32(0.0)] * 4
    upper, lower = zeros, zeros
    chunks = [[packed_24.as_word(word) for word in words] for words in part.registers.reshape(-1, 2)]
    for (top, bottom), (top_right, bottom_right) in zip(chunks[::2], chunks[1::2], strict=True):  # eight columns each
        rows = top, bottom, top_right, bottom_right
        upper = _multiply_accumulate(rows, (top, top_right), upper, part.mlir_dtype)
        lower = _multiply_accumulate(rows, (bottom, bottom_right), lower, part.mlir_dtype)
    # Four lanes share a row, and have two columns each.
    thread = Thread.current()
    line, lane_of_line = arith.andi(thread.row, i32(7)), arith.andi(thread.index, i32(3))
    on_diagonal = arith.cmpi(arith.CmpIPredicate.eq, lane_of_line, arith.shrui(line, i32(1)))
    odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(line, i32(1)), i32(0))
    for half, (left, right) in enumerate((upper[:2], lower[2:])):
        row = arith.addi(thread.row, i32(8 * half))
        pointer = _norm_pointer(norms, token_tile, arith.addi(arith.muli(neuron_tile, i32(TILE)), row))
        store_if(on_diagonal, pointer, [arith.bitcast(i32_type(), arith.select(odd, right, left))])


def _multiply_accumulate(
    a: Sequence[ir.Value], b: Sequence[ir.Value], sums: Sequence[ir.Value], element: ir.Type
) -> list[ir.Value]:
    """Computes a warp's sums + a b, [16, 16] times [16, 8], in the registers of `mma.m16n8k16` (PTX ISA)."""
    kind = "bf16" if element == ir.BF16Type.get() else "f16"
    registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {registers};"
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    result = ptx(code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *sums], struct)
    return [llvm.extractvalue(ir.F32Type.get(), result, [i]) for i in range(4)]


def _store_nonzeros(
    part: mgpu.FragmentedArray, nonzeros: ir.Value, neuron_tile: ir.Value, token_tile: ir.Value
) -> None:
    """Stores how many of a warp's numbers of a tile [64, 64] are not zero; NaNs are not."""
    kind = "bf16x2" if part.mlir_dtype == ir.BF16Type.get() else "f16x2"
    count = i32(0)  # of either half of the words, in their dtype: exact up to 256
    for register in part.registers.flat:
        code = f"{{ .reg .b32 t; set.neu.{kind}.{kind} t, $1, $3; add.rn.{kind} $0, $2, t; }}"
        count = ptx(code, "=r,r,r,r", [packed_24.as_word(register), count, i32(0)], i32_type())
    low, high = packed_24.unpack(count, part.mlir_dtype)
    count = arith.fptoui(i32_type(), arith.addf(low, high))
    count = ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [count], i32_type())
    token_tiles = ir.MemRefType(nonzeros.type).shape[1]
    tile = arith.addi(arith.muli(neuron_tile, i32(token_tiles)), token_tile)
    warp = arith.divui(Thread.current().index, i32(WARPGROUP_SIZE // WARPS))
    index = arith.addi(mul64(tile, WARPS), arith.extui(i64_type(), warp))
    # Every lane has the count: all write the same.
    llvm.store(count, mgpu_utils.getelementptr(global_pointer(nonzeros), [index], i32_type()))


def _norm_pointer(norms: ir.Value, token_tile: ir.Value, neuron: ir.Value) -> ir.Value:
    width = ir.MemRefType(norms.type).shape[1]
    index = arith.addi(mul64(token_tile, width), arith.extui(i64_type(), neuron))
    return mgpu_utils.getelementptr(global_pointer(norms), [index], ir.F32Type.get())


def _select(y: Array, norms: Array, tokens: int, v: int, m: int) -> list[Array]:
    """Selects the Venom form of Y, with statistics, from Y^T [F, T] and sums of squares.

    A block of threads takes 16 groups of neurons of one block of tokens: 64 rows of Y^T are kept, of v tokens each.
    Of Y^T and the sums, which may be padded, `tokens` are read.
    """
    blocks, tiles, warpgroups = tokens // v, norms.shape[1] // (THREAD_COLUMNS * m), v // TILE
    warps = warpgroups * WARPS

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 8, SCALAR, SCALAR))
    def select_tile(_, y_gmem, norms_gmem, values_gmem, metadata_gmem, columns_gmem, stats_gmem, tile_smem, kept, *at):
        tile_number, block = (number.registers.item() for number in at)
        norm_of = _sums_of_block(norms_gmem, block, tile_number, v, THREAD_COLUMNS * m)
        energy = choose_columns(norm_of, kept, columns_gmem, block, tile_number, m, warps)
        gpu.barrier()
        first_neuron, first_token = arith.muli(tile_number, i32(THREAD_COLUMNS * m)), arith.muli(block, i32(v))
        _load_kept(y_gmem, kept, tile_smem, first_neuron, first_token, v)
        gpu.barrier()
        seen = Seen.nothing()
        first_column, first_token_of_pair = _place_of_thread()
        words = _load_pair_of_tokens(tile_smem, first_column, first_token_of_pair, v)
        for half in HALVES:
            pairs = [packed_24.two_of_four([(word, half) for word in four], signed=False) for four in groups(words)]
            token = arith.addi(arith.addi(first_token, first_token_of_pair), i32(half))
            column = arith.addi(arith.muli(tile_number, i32(TILE)), first_column)
            store_thread_columns(values_gmem, metadata_gmem, token, column, pairs)
            seen = seen.add([], [pair.values for pair in pairs], ir.MemRefType(values_gmem.type).element_type)
        block_number = arith.addi(arith.muli(block, i32(tiles)), tile_number)
        store_stats(stats_gmem, block_number, seen._replace(energy=energy).stats())

    def kernel(*refs):
        select_tile(*refs, lax.axis_index("tile"), lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((tokens, tiles * TILE // 2), y.dtype),
            jax.ShapeDtypeStruct((tokens // TILE, tiles, WARPGROUP_SIZE), jnp.int32),
            jax.ShapeDtypeStruct((blocks, tiles * TILE), jnp.int32),
            jax.ShapeDtypeStruct((blocks * tiles, warps, STATS), jnp.float32),
        ),
        grid=(tiles, blocks),
        grid_names=("tile", "block"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((TILE * v + TILE // THREAD_COLUMNS * _SKEW,), y.dtype),
            plgpu.SMEM((TILE,), jnp.int32),
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="select_venom",
    )(y, norms)


def _sums_of_block(
    norms: ir.Value, block: ir.Value, tile_number: ir.Value, v: int, tile_neurons: int
) -> Callable[[ir.Value], ir.Value]:
    """Returns the sum, of a neuron of the tile, of the squares of a block's tokens."""

    def norm_of(neuron):
        neuron = arith.addi(arith.muli(tile_number, i32(tile_neurons)), neuron)
        token_tiles = (arith.addi(arith.muli(block, i32(v // TILE)), i32(part)) for part in range(v // TILE))
        return sum_of([llvm.load(ir.F32Type.get(), _norm_pointer(norms, tile, neuron)) for tile in token_tiles])

    return norm_of


def _load_kept(
    y: ir.Value, kept: ir.Value, tile_smem: ir.Value, first_neuron: ir.Value, first_token: ir.Value, v: int
) -> None:
    """Loads the kept rows of a tile of Y^T to shared memory; all loads of a thread are under way together."""
    ref = ir.MemRefType(y.type)
    thread = mgpu_utils.thread_idx()
    token = arith.muli(arith.remui(thread, i32(v // _CHUNK)), i32(_CHUNK))
    first_row = arith.divui(thread, i32(v // _CHUNK))
    loaded = []
    for row in (arith.addi(first_row, i32(first)) for first in range(0, TILE, _ROWS_AT_ONCE)):
        place = llvm.load(i32_type(), mgpu_utils.getelementptr(mgpu_utils.memref_ptr(kept), [row], i32_type()))
        start = mul64(arith.addi(first_neuron, place), ref.shape[1])
        start = arith.addi(start, arith.extui(i64_type(), arith.addi(first_token, token)))
        loaded.append((row, load_words(y, start, _CHUNK // 2)))
    for row, words in loaded:
        llvm.store(vector(words), _shared_pointer(tile_smem, row, token, v), alignment=16)


def _place_of_thread() -> tuple[ir.Value, ir.Value]:
    """Returns the first of the 16 kept neurons and of the two tokens, in the tile, that a thread selects from.

    Neighbouring threads have neighbouring neurons, so that they write neighbouring values.
    """
    thread, threads_of_row = mgpu_utils.thread_idx(), TILE // THREAD_COLUMNS
    column = arith.muli(arith.remui(thread, i32(threads_of_row)), i32(THREAD_COLUMNS))
    return column, arith.muli(arith.divui(thread, i32(threads_of_row)), i32(2))


def _load_pair_of_tokens(tile_smem: ir.Value, first_row: ir.Value, token: ir.Value, v: int) -> list[ir.Value]:
    """Loads, of 16 rows of the tile, a word of two tokens each."""
    rows = (arith.addi(first_row, i32(i)) for i in range(THREAD_COLUMNS))
    return [llvm.load(i32_type(), _shared_pointer(tile_smem, row, token, v)) for row in rows]


def _shared_pointer(tile_smem: ir.Value, row: ir.Value, token: ir.Value, v: int) -> ir.Value:
    """Computes where a token of a row of the tile is in shared memory, see `_SKEW`."""
    skew = arith.muli(arith.divui(row, i32(THREAD_COLUMNS)), i32(_SKEW))
    index = arith.addi(arith.addi(arith.muli(row, i32(v)), skew), token)
    return mgpu_utils.getelementptr(
        mgpu_utils.memref_ptr(tile_smem), [index], ir.MemRefType(tile_smem.type).element_type
    )
