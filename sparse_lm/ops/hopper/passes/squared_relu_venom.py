"""Computes the V:2:M form of Y = relu(H)^2 in one pass over memory.

A block takes a tile of v rows and 16 groups of m columns, or 8 groups, if only then a multiprocessor has
room for several blocks, of which one reads while another selects. Its warps read a row each at a time,
sum up the squares of every column as they go, and keep the tile in shared memory. The four columns of
each group that the rows share are those of largest norm; then each thread selects in one or two rows,
gathering 16 kept columns from shared memory.

Numerics: norms in float32, summed by warp, then over warps; so two columns of nearly equal norm may
rank otherwise than in the reference. All else is the reference bit for bit.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math

from sparse_lm.ops.checks import check_hidden_dtype, check_multiples
from sparse_lm.ops.formats import TILE, HiddenStats, SparseVenom, types_24
from sparse_lm.ops.hopper.frame import emit, packed_24
from sparse_lm.ops.hopper.frame.emit import COMPILER_PARAMS, SCALAR, WARP_SIZE, WARPGROUP_SIZE, Number
from sparse_lm.ops.hopper.frame.hidden_stats import Seen, count_nonzeros, stats_type, store_stats
from sparse_lm.ops.hopper.frame.thread_tile import THREAD_COLUMNS, store_thread_columns
from sparse_lm.ops.hopper.frame.two_of_four import groups_of_four, magnitude_rank

_KEPT = 4  # columns of a group
_ROWS_AT_ONCE = 4  # that a warp has under way
_PAD = 8  # elements at the end of a row in shared memory: rows start on different banks, 16 bytes stay aligned
_LARGEST_BLOCK = 512  # rows, of two threads each
_LARGEST_AREA = 12_800  # v m: 200 KiB in 8 groups
_SHARED_TILE = 72 * 2**10  # bytes: two or three blocks have room on a multiprocessor


def squared_relu_venom(h: Array, v: int, m: int) -> tuple[SparseVenom, HiddenStats]:
    """See `sparse_lm.ops.squared_relu_venom`; refuses matrices that are not of 16-bit floats, a v that is no multiple
    of 64, an m that is not 8, 16 or 32, and blocks that shared memory cannot hold."""
    check_hidden_dtype(h.dtype)
    groups = TILE // _KEPT
    groups = groups if v * groups * m * h.dtype.itemsize <= _SHARED_TILE else groups // 2
    tile_columns = groups * m
    if v % TILE or v > _LARGEST_BLOCK or m not in (8, 16, 32) or v * m > _LARGEST_AREA:
        raise NotImplementedError(
            f"needs v to be a multiple of {TILE} up to {_LARGEST_BLOCK}, m 8, 16 or 32, and v m at most "
            f"{_LARGEST_AREA}, not v = {v}, m = {m}"
        )
    shape = rows, width = h.shape
    check_multiples({"F": (width, TILE // _KEPT * m)})
    h = jnp.pad(h, ((0, -rows % v), (0, 0))) if rows % v else h
    warpgroups = v // TILE
    blocks, tiles = h.shape[0] // v, width // tile_columns
    stride = tile_columns + _PAD
    warps = warpgroups * WARPGROUP_SIZE // WARP_SIZE
    kept_columns = groups * _KEPT

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 8, SCALAR, SCALAR))
    def sparsify_tile(_, h_gmem, values_gmem, metadata_gmem, columns_gmem, stats_gmem, tile_smem, norms, kept, *at):
        block, tile_number = map(emit.scalar, at)
        seen = _load_tile(h_gmem, tile_smem, norms, block, tile_number, v, tile_columns, warps)
        gpu.barrier()
        _choose_columns(norms, kept, columns_gmem, block, tile_number, m, warps)
        gpu.barrier()
        # A thread selects from 16 condensed columns, of one or two rows; neighbouring lanes have neighbouring columns.
        threads_of_row, thread = kept_columns // THREAD_COLUMNS, emit.thread_index()
        column, first_row = thread % threads_of_row * THREAD_COLUMNS, thread // threads_of_row
        for row in [first_row + first for first in range(0, v, warps * WARP_SIZE // threads_of_row)]:
            members = [(word, 0) for word in _gather(tile_smem, kept, row, column, stride)]
            pairs = [packed_24.two_of_four(four, signed=False) for four in groups_of_four(members)]
            matrix_row, matrix_column = block * v + row, tile_number * kept_columns + column
            store_thread_columns(values_gmem, metadata_gmem, matrix_row, matrix_column, pairs)
            seen = seen.add([], [pair.values for pair in pairs], emit.element_of(h_gmem))
        store_stats(stats_gmem, block * tiles + tile_number, seen)

    def kernel(*refs):
        sparsify_tile(*refs, lax.axis_index("block"), lax.axis_index("tile"))

    values, metadata, columns, stats = plgpu.kernel(
        kernel,
        out_type=(
            *types_24(h.shape[0], tiles * kept_columns, h.dtype),
            jax.ShapeDtypeStruct((blocks, tiles * kept_columns), jnp.int32),
            stats_type(blocks * tiles, warpgroups),
        ),
        grid=(blocks, tiles),
        grid_names=("block", "tile"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((v * stride,), h.dtype),
            plgpu.SMEM((warps * tile_columns,), jnp.float32),
            plgpu.SMEM((kept_columns,), jnp.int32),
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="squared_relu_venom",
    )(h)
    return SparseVenom(values, metadata, columns, shape, v, m), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def _load_tile(h, tile_smem, norms, block, tile_number, v, tile_columns, warps) -> Seen:
    """Loads the tile's squared relu to shared memory, and sums up each column's squares by warp.

    A lane keeps to its 8 columns; where a row has fewer than 32 lanes' worth of them, a warp takes
    several rows at a time, and of more, the row in parts.
    """
    element = emit.element_of(h)
    lanes = emit.vector_lanes(element)
    thread = emit.thread_index()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    chunks = tile_columns // lanes  # of a row
    across = min(chunks, WARP_SIZE)
    rows_of_warp = 32 // across
    own_row = warp * rows_of_warp + lane // across
    shared = emit.shared_memory(tile_smem)
    rows_per_pass = warps * rows_of_warp
    at_once = min(_ROWS_AT_ONCE, v // rows_per_pass)
    seen = Seen.nothing()
    for part in range(chunks // across):
        column = lane % across * lanes + part * across * lanes
        first = tile_number * tile_columns + column

        # A loop, not its steps in a row: the registers that those fill would leave room for one block at a time.
        @mgpu_utils.fori(emit.i32(v // (rows_per_pass * at_once)), (seen.nonzeros, *[emit.f32(0.0)] * lanes))
        def loop(step, carried, column=column, first=first):
            nonzeros, *squares = map(Number, carried)
            step_row = own_row + Number(step) * (rows_per_pass * at_once)
            rows = [step_row + rows_per_pass * number for number in range(at_once)]
            loaded = []
            for row in rows:
                offset = (block * v + row).wide() * emit.shape_of(h)[1] + first.wide()
                loaded.append(emit.load_words(h, offset, lanes // 2))
            for row, words in zip(rows, loaded, strict=True):
                words = [packed_24.squared_relu(word, element) for word in words]
                nonzeros = nonzeros + count_nonzeros(words)
                numbers = [number for word in words for number in packed_24.unpack(word, element)]
                squares = [math.fma(number, number, sum_) for number, sum_ in zip(numbers, squares, strict=True)]
                index = row * (tile_columns + _PAD) + column
                emit.store_vector(shared.at(index), words)
            return (nonzeros, *squares)

        nonzeros, *squares = map(Number, loop.results)
        seen = Seen(nonzeros, seen.energy + sum(squares[1:], start=squares[0]), seen.kept_energy)
        # Lanes that share columns add up; all of them write the sum.
        distance = across
        while distance < WARP_SIZE:
            squares = [s + mgpu_utils.shfl_bfly(s, distance) for s in squares]
            distance *= 2
        norm_index = warp * tile_columns + column
        emit.store_vector(emit.shared_memory(norms).at(norm_index), squares)
    return seen


def _choose_columns(norms, kept, columns, block: Number, tile_number: Number, m: int, warps: int) -> None:
    """Chooses the four columns of largest norm of each group: their places in the tile go to `kept`, int32 [columns
    kept of the tile] in shared memory, columns to `columns`, int32 [blocks, columns kept] in global memory.

    Lane l of a warp looks after columns l, l + 32, .. of the warp's share; a group's columns are neighbouring lanes
    of one warp, so that a vote tells how many kept ones come before. `norms` are each warp's, of what it loaded.
    """
    norms = emit.shared_memory(norms)
    (kept_columns,) = emit.shape_of(kept)
    tile_columns = kept_columns // _KEPT * m
    thread = emit.thread_index()
    for first in range(0, tile_columns, warps * WARP_SIZE):
        # With more threads than columns the last warps repeat the work of others and write the same.
        column = (thread + first) % tile_columns
        zero = emit.f32(0.0)
        norm = sum([norms.load(column + warp * tile_columns) for warp in range(warps)], start=zero)
        keep, slot = _four_largest(magnitude_rank(norm), column % m, m)
        condensed = column // m * _KEPT + slot
        start = block.wide() * emit.shape_of(columns)[1]
        offset = tile_number * kept_columns + condensed
        target = emit.global_memory(columns).at(start + offset.wide())
        shared = emit.shared_memory(kept).at(condensed)
        absolute = tile_number * tile_columns + column
        emit.store_if(keep, shared, [column], space="shared")
        emit.store_if(keep, target, [absolute])


def _four_largest(rank: Number, place: Number, m: int) -> tuple[Number, Number]:
    """Tells if a lane's rank is one of the four largest of its group of m lanes, and how many of them come before it.

    Of equal ranks that of the lower place is the larger.
    """
    beaten = emit.i32(0)
    for bit in range(m.bit_length() - 1):
        # The lane at a distance comes before this one if this one's place has the highest bit of the distance.
        before = (place >> bit) & 1
        beaten_from = rank + (emit.i32(1) - before)
        for distance in range(1 << bit, 2 << bit):
            beats = Number(mgpu_utils.shfl_bfly(rank, distance)).compare("sge", beaten_from)
            beaten = beaten + arith.extui(emit.i32_type(), beats)
    keep = beaten.compare("ult", _KEPT)
    code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    kept_lanes = emit.ptx(code, "=r,r", [arith.extui(emit.i32_type(), keep)], emit.i32_type())
    lane = emit.thread_index() % WARP_SIZE
    of_group = kept_lanes >> (lane - place)
    before = of_group & ((emit.i32(1) << place) - 1)
    return keep, Number(math.ctpop(before))


def _gather(tile_smem: ir.Value, kept: ir.Value, row: Number, column: Number, stride: int) -> list[Number]:
    """Gathers 16 condensed columns of a row, each in the low half of a word."""
    start = row * stride
    words = []
    for i in range(THREAD_COLUMNS):
        index = column + i
        place = emit.shared_memory(kept).load(index)
        value = llvm.load(ir.IntegerType.get_signless(16), emit.shared_memory(tile_smem).at(start + place))
        words.append(Number(arith.extui(emit.i32_type(), value)))
    return words
