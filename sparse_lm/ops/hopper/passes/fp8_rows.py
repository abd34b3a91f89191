"""Brings rows to e4m3, as they are and transposed, in one pass over memory.

Why this exists: XLA reads an array, or what it is a function of, once for its rows' largest entries and once more to
divide by their scales. Here every input is read once.

A cluster of thread blocks owns 32 rows and keeps them in shared memory, each block some of the columns. A block's two
warpgroups have half of those each, in tiles of 64 columns. They compute their tiles as inputs arrive, exchange rows'
maxima with the rest of the cluster through global memory, and divide. A tile is then read by columns (`ldmatrix`),
too; 32 rows are one sector in each row of the transpose.

Numerics: the reference's, with its roundings to bfloat16: bit for bit. Scales are made of the bits of the maxima.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.checks import check_multiples
from sparse_lm.ops.formats import HiddenStats
from sparse_lm.ops.fp8 import E4M3, LOWEST_EXPONENT, Scaled, Unscaled
from sparse_lm.ops.hopper.frame import compat
from sparse_lm.ops.hopper.frame.emit import ptx
from sparse_lm.ops.hopper.frame.operands import swizzled

_ROWS, _COLUMNS = 32, 64  # of a tile
_WARPGROUPS = 2
_RING = 3  # tiles of a second input in flight; those of the first have a place each
_SLOTS = 2  # tiles on their way to global memory
_CLUSTERS = (1, 2, 4, 8)  # larger ones are not portable
# The most columns of a block, and how many tiles have one barrier. Two of the first kind fit on a multiprocessor;
# a group of barriers has at most 32.
_BLOCKS = ((1024, 1), (2048, 1), (2560, 2))
_LARGEST_FRACTION = 0b11 << 21  # of float32: 448 is 1.75 times 2^8
_TILE = plgpu.Layout.TILED(  # of a tile: each warp has eight rows of its own
    plgpu.Tiling(((_ROWS, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_OF_ROWS = _TILE.reduce(1)
_TRANSPOSED = plgpu.Layout.WGMMA  # of a tile's transpose

BothWays = tuple[Scaled, Scaled]
Function = Callable[..., Array]


def fp8_rows(x: Array) -> BothWays:
    """See `sparse_lm.ops.fp8.rows_both_ways`."""
    return _call(None, [x])[0]


def fp8_squared_relu(h: Unscaled) -> tuple[BothWays, HiddenStats]:
    """See `sparse_lm.ops.fp8.squared_relu`."""
    rows, (nonzeros, energy) = _call(_squared_relu, [h.values], [h.factor], with_stats=True)
    return rows, HiddenStats(nonzeros, energy, energy)


def fp8_squared_relu_gradients(dy: Unscaled, h: Unscaled) -> BothWays:
    """See `sparse_lm.ops.fp8.squared_relu_gradients`."""
    return _call(_gradient, [dy.values, h.values], [dy.factor, h.factor])[0]


def _squared_relu(h: Array) -> Array:
    return jnp.square(jnp.maximum(h, 0))


def _gradient(dy: Array, h: Array) -> Array:
    return dy * 2 * jnp.sqrt(_squared_relu(h).astype(jnp.float32)).astype(h.dtype)


def _call(
    function: Function | None, inputs: Sequence[Array], factors: Sequence[Array] = (), *, with_stats: bool = False
) -> tuple[BothWays, list[Array]]:
    """Brings a function of one or two inputs bfloat16[T, N] times their factors [T, 1], or the only input, to e4m3.

    With `with_stats` it also returns how many entries are not zero, and the sum of their squares. It refuses other
    dtypes, a T that is no multiple of 32, an N that cannot be divided among blocks, and old releases of JAX.
    """
    (tokens, columns), dtype = inputs[0].shape, inputs[0].dtype
    if not compat.TRANSPOSES:
        raise NotImplementedError(f"needs JAX 0.11, not {jax.__version__}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {dtype}")
    check_multiples({"T": (tokens, _ROWS)})
    cluster, together = _blocks(columns)
    parts = cluster * _WARPGROUPS
    tiles = columns // (parts * _COLUMNS)
    of_parts = jax.ShapeDtypeStruct((parts, tokens), jnp.float32)

    def tiles_of(count: int, rows: int, width: int, dtype: jnp.dtype) -> plgpu.SMEM:
        transforms = swizzled(dtype, width * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM((_WARPGROUPS, count, rows, width), dtype, transforms=transforms)

    values, transposed, scales, _, *stats = plgpu.kernel(
        functools.partial(_kernel, function=function, inputs=len(inputs), together=together),
        out_type=(
            jax.ShapeDtypeStruct((tokens, columns), E4M3),
            jax.ShapeDtypeStruct((columns, tokens), E4M3),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            of_parts,
            *([of_parts] * 2 if with_stats else []),
        ),
        grid=(tokens // _ROWS,),
        grid_names=("rows",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(
            kept=tiles_of(tiles, _ROWS, _COLUMNS, dtype),
            ring=tiles_of(_RING if len(inputs) > 1 else 1, _ROWS, _COLUMNS, dtype),
            out=tiles_of(_SLOTS, _ROWS, _COLUMNS, E4M3),
            out_t=tiles_of(_SLOTS, _COLUMNS, _ROWS, E4M3),
            reciprocals=plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.float32),
            arrived=plgpu.Barrier(num_arrivals=together * len(inputs), num_barriers=_WARPGROUPS * tiles // together),
            exchanged=plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=_WARPGROUPS),
        ),
        kernel_name="fp8_rows",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,  # square roots, which bfloat16 rounds to the same
            reduction_scratch_bytes=0,  # a row is in one warp
        ),
    )(*inputs, *(factor[:, 0].astype(jnp.float32) for factor in factors))
    both_ways = Scaled(values, scales[:, None]), Scaled(transposed, scales[None])
    return both_ways, [jnp.sum(of_parts) for of_parts in stats]


def _blocks(columns: int) -> tuple[int, int]:
    """Returns how many blocks share rows of so many columns, and how many tiles have a barrier: few that hold them."""
    unit = _WARPGROUPS * _COLUMNS
    for most, together in _BLOCKS:
        for cluster in _CLUSTERS:
            if columns % (cluster * unit * together) == 0 and columns // cluster <= most:
                return cluster, together
    raise NotImplementedError(
        f"needs N = {columns} to be a multiple of {unit}, of {unit} times 2, 4 or 8 where a block would have more than "
        f"{_BLOCKS[1][0]} columns, and of {unit} times 16 from {_CLUSTERS[-1] * _BLOCKS[1][0]} to "
        f"{_CLUSTERS[-1] * _BLOCKS[-1][0]}, the largest"
    )


def _kernel(
    *refs, kept, ring, out, out_t, reciprocals, arrived, exchanged, function: Function | None, inputs: int, together
):
    xs, refs = refs[:inputs], refs[inputs:]
    factors, refs = (refs[:inputs], refs[inputs:]) if function is not None else ((), refs)
    values, transposed, scales, maxima, *stats = refs
    warpgroup, peer = lax.axis_index("warpgroup"), lax.axis_index("cluster")
    part, tiles = peer * _WARPGROUPS + warpgroup, kept.shape[1]
    rows = pl.ds(lax.axis_index("rows") * _ROWS, _ROWS)

    def columns(tile):
        return pl.ds((part * tiles + tile) * _COLUMNS, _COLUMNS)

    def barrier(tile):
        return arrived.at[warpgroup * (tiles // together) + lax.div(tile, together)]

    def fetch(number, place, tile):
        plgpu.copy_gmem_to_smem(xs[number].at[rows, columns(tile)], place, barrier(tile))

    def fetch_second(tile):
        if inputs > 1:
            fetch(1, ring.at[warpgroup, lax.rem(tile, _RING)], tile)

    def fetch_all(tile, _):
        fetch(0, kept.at[warpgroup, tile], tile)
        pl.when(tile < _RING)(lambda: fetch_second(tile))

    lax.fori_loop(0, tiles, fetch_all, None)
    by_row = [compat.load(ref.at[rows], _OF_ROWS, optimized=False).astype(kept.dtype) for ref in factors]

    def compute(tile, seen):
        place = kept.at[warpgroup, tile]
        pl.when(lax.rem(tile, together) == 0)(lambda: plgpu.barrier_wait(barrier(tile)))
        x = compat.load(place, _TILE)
        if function is not None:
            second = [ring.at[warpgroup, lax.rem(tile, _RING)]] if inputs > 1 else []
            read = [x, *(compat.load(ref, _TILE) for ref in second)]
            x = function(*(x * _spread(factor, 0) for x, factor in zip(read, by_row, strict=True)))
            place[...] = x
        if inputs > 1:
            plgpu.commit_smem()  # what the next copy overwrites has been read

            @pl.when(tile + _RING < tiles)
            def _():
                fetch_second(tile + _RING)

        largest, *sums = seen
        largest = jnp.maximum(largest, jnp.abs(x))
        if stats:
            wide = x.astype(jnp.float32)
            sums = [sums[0] + (wide != 0).astype(jnp.float32), sums[1] + jnp.square(wide)]
        return [largest, *sums]

    dtypes = [kept.dtype] + [jnp.float32] * len(stats)
    nothing = [plgpu.layout_cast(jnp.zeros((_ROWS, _COLUMNS), dtype), _TILE) for dtype in dtypes]
    largest, *sums = lax.fori_loop(0, tiles, compute, nothing)
    maxima[part, rows] = jnp.max(largest.astype(jnp.float32), axis=1)
    for ref, of_tiles in zip(stats, sums, strict=True):
        ref[part, rows] = jnp.sum(of_tiles, axis=1)
    _fence()
    plgpu.barrier_arrive(exchanged)
    plgpu.barrier_wait(exchanged)
    _fence()
    of_parts = [compat.load(maxima.at[number, rows], _OF_ROWS, optimized=False) for number in range(maxima.shape[0])]
    scale, reciprocal = _scale(functools.reduce(jnp.maximum, of_parts))
    reciprocals[warpgroup] = reciprocal

    @pl.when(part == 0)
    def _():
        scales[rows] = scale

    of_rows = _spread(reciprocal.astype(kept.dtype), 0)
    reciprocal = compat.load(reciprocals.at[warpgroup], _TRANSPOSED.reduce(0), optimized=False)
    of_columns = _spread(reciprocal.astype(kept.dtype), 1)

    def divide(tile, _):
        place, slot = kept.at[warpgroup, tile], lax.rem(tile, _SLOTS)
        plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
        x = compat.load(place, _TILE)
        out[warpgroup, slot] = _e4m3(x * of_rows)
        x_t = compat.load(place.transpose((1, 0)), _TRANSPOSED)
        out_t[warpgroup, slot] = _e4m3(x_t * of_columns)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[warpgroup, slot], values.at[rows, columns(tile)], commit_group=False)
        plgpu.copy_smem_to_gmem(out_t.at[warpgroup, slot], transposed.at[columns(tile), rows])

    lax.fori_loop(0, tiles, divide, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scale(largest: Array) -> tuple[Array, Array]:
    """Computes the scale that `fp8.by_rows` gives a row, and its reciprocal, of the largest magnitude in float32."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # With what 1.75 lacks to 2 added, the exponent goes up where the fraction is not below that of 448.
    exponent = ((bits + (1 << 23) - _LARGEST_FRACTION) >> 23) - 127 - 8
    exponent = jnp.maximum(exponent, LOWEST_EXPONENT)

    def power_of_two(exponent: Array) -> Array:
        power = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
        return jnp.where(largest < jnp.inf, power, jnp.nan)

    return power_of_two(exponent), power_of_two(-exponent)


def _spread(of_rows: Array, axis: int) -> Array:
    """Spreads rows' numbers over a tile, or over its transpose (axis 1)."""
    shape, layout = ((_COLUMNS, _ROWS), _TRANSPOSED) if axis else ((_ROWS, _COLUMNS), _TILE)
    return plgpu.layout_cast(lax.broadcast_in_dim(of_rows, shape, [axis]), layout)


def _e4m3(x: Array) -> Array:
    return x.astype(jnp.float32).astype(E4M3)


def _fence() -> None:
    """Orders a thread's accesses to global memory before and after for other blocks: cluster barriers may not."""

    @plgpu.inline_mgpu()
    def fence(_):
        ptx("fence.acq_rel.gpu;", "", [])

    fence()
