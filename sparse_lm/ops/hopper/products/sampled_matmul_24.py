"""Multiplies listed rows of a 2:4 matrix by the rows of a dense one, by block, where listed rows are contiguous.

A tile's rows of the sparse operand are boxes that start where the block's list says; the rest is
`matmul_24` with b and the result transposed. The blocks of a cluster compute tiles under one another,
so that they share the tile of tokens, and blocks that run together cover all listed rows of a few
tiles of tokens.

`sampled_squared_relu_24` has `squared_relu_24` as its epilogue: H is never written. The accumulators hold H^T, the four
neurons of a group in four lanes. So 64 neurons of 64 tokens at a time take the way through shared memory, rounded, and
come back as thread_tile.py has them; the rest is `squared_relu_24`.

Numerics: as `matmul_24`; bit for bit those of the two kernels one after the other, statistics included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.hopper.frame import split_k, wgmma_sp
from sparse_lm.ops.hopper.frame.emit import SCALAR, Number, element_of, scalar
from sparse_lm.ops.hopper.frame.hidden_stats import sum_stats
from sparse_lm.ops.hopper.frame.operands import pad, result_type, round_up, swizzled
from sparse_lm.ops.hopper.frame.persistent import multiply
from sparse_lm.ops.hopper.frame.schedule import rows_in_use
from sparse_lm.ops.hopper.frame.store import SWIZZLE, SWIZZLE_CHUNK, load_chunk, write_tile
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, Thread, Tile
from sparse_lm.ops.hopper.frame.tiling import STEP, Epilogue, Loads, Tiling, check_in_block
from sparse_lm.ops.hopper.passes.squared_relu_24 import out_types, squared_relu, squared_relu_24, store_selected
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24

# M counts listed rows, N tokens. With the time of a tile (measured on an H200).
CANDIDATES = ((Tiling(256, 192), 1.36), (Tiling(128, 256), 1.0), (Tiling(256, 128), 1.04))


def heuristic_config(tokens: int, kept: int, dim: int, v: int) -> Tiling:
    """Chooses the candidate that is done first, of those whose tiles of tokens lie in one block."""
    fitting = [candidate for candidate in CANDIDATES if v % candidate[0].tile_n == 0]
    return split_k.fastest(fitting, kept, tokens, pl.cdiv(dim, STEP))


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    out_dtype: DTypeLike | None = None,
    config: Tiling | None = None,
) -> Array:
    """See `sparse_lm.ops.sampled_matmul_24`; refuses dtypes that are no 16-bit floats, and a v that is no multiple of
    64.

    Neurons whose runs no tile here fits are taken one by one (sampled_rows_24.py); `config` is for contiguous ones: one
    whose clusters' tiles do not lie in one block raises ValueError. Last blocks that list only F cost little if they
    are contiguous.
    """
    if not _takes_contiguous(contiguous, v):
        return sampled_rows_24(w, x, neuron_ids, v, out_dtype=out_dtype)
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    out = result_type(tokens, kept, jnp.dtype(out_dtype or x.dtype))
    (product,) = _multiply_listed(config, w, x, neuron_ids, v, contiguous, out, name="sampled_matmul_24")
    return product[:tokens, :kept]


def sampled_squared_relu_24(
    w: Sparse24, x: Array, neuron_ids: Array, v: int, *, contiguous: int = 1, config: Tiling | None = None
) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_24`; refuses what `sampled_matmul_24` does.

    Runs that no tile of `sampled_matmul_24` fits are left to the two kernels.
    """
    if not _takes_contiguous(contiguous, v):
        return squared_relu_24(sampled_matmul_24(w, x, neuron_ids, v, contiguous=contiguous))
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    h = jax.ShapeDtypeStruct((round_up(tokens), kept), x.dtype)
    values, metadata, stats = _multiply_listed(
        config, w, x, neuron_ids, v, contiguous, h, name="sampled_squared_relu_24", epilogue=_squared_relu(h)
    )
    return Sparse24(values, metadata, (tokens, kept)), sum_stats(stats)


def _takes_contiguous(contiguous: int, v: int) -> bool:
    """Returns True if a tile here fits the contiguous rows and the blocks."""
    return contiguous % wgmma_sp.ROWS == 0 and any(v % candidate.tile_n == 0 for candidate, _ in CANDIDATES)


def _multiply_listed(
    config: Tiling | None,
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    contiguous: int,
    out: jax.ShapeDtypeStruct,
    *,
    name: str,
    epilogue: Epilogue | None = None,
) -> list[Array]:
    """Computes the product `out`, or what the epilogue makes of its transpose, [Kc, T]."""
    check_product_dtypes(w.dtype, x.dtype, out.dtype)
    x = pad(x)
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    config = config or heuristic_config(tokens, kept, x.shape[1], v)
    check_in_block(config.cluster_n, v, "tokens")
    steps = w.values.shape[1] // wgmma_sp.KEPT
    box = math.gcd(contiguous, config.tile_m)

    def in_use(operands, _, token):
        return token < operands[-1][0]  # read for each job anew, from the cache: consumers lack a register for it

    def loads(operands, job):
        values, metadata, x, neuron_ids, _ = operands
        block = lax.div(job.column, v)
        firsts = range(0, config.tile_m, box)
        boxes = [(first, neuron_ids[block, lax.min(job.row + first, kept - box)]) for first in firsts]

        def copies(k, _, stage):
            of_boxes = (stage.copy_sparse(values, metadata, row, k, first, box) for first, row in boxes)
            return [*itertools.chain(*of_boxes), stage.copy_b(x, job.column, k * STEP)]

        return Loads(copies)

    schedule = split_k.schedule_product(config, kept, tokens, steps, in_use)
    padding = rows_in_use(neuron_ids[:, ::contiguous], v, w.shape[0])
    operands, turned = (w.values, w.metadata, x, neuron_ids, padding), dict(b_transposed=True, out_transposed=True)
    return multiply(config, schedule, loads, operands, out, name=name, epilogue=epilogue, **turned)


def _squared_relu(h: jax.ShapeDtypeStruct) -> Epilogue:
    tokens, neurons = h.shape

    staged = plgpu.RefType(swizzled(h.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, staged, *(plgpu.RefType(),) * 3, SCALAR, SCALAR))
    def select(_, part, slot, values, metadata, stats, neuron_tile, token_tile):
        write_tile(part, slot, transposed=True)
        mgpu_utils.warpgroup_barrier()
        tile = Tile(Thread.current(), scalar(token_tile), scalar(neuron_tile))
        words = [_load_words(slot, tile.thread, half) for half in HALVES]
        store_selected(squared_relu(words, element_of(values)), tile, values, metadata, stats, signed=False)

    def store(part: Array, slots: Any, _, outs: Sequence[Any], origin: tuple[Array, Array], number: int) -> None:
        neuron, token = origin

        @pl.when((neuron < neurons) & (token < tokens))
        def _inside():
            # Of two slots that take turns, one may be written while slower threads still read the other.
            slot = slots.at[number % slots.shape[0]]
            select(part, slot, *outs, lax.div(neuron, TILE), lax.div(token, TILE))

    return Epilogue(out_types(tokens, neurons, h.dtype), store)


def _load_words(slot: ir.Value, thread: Thread, half: int) -> list[Number]:
    """Loads the 16 neurons of one of a thread's tokens, eight words, from a staging slot [tokens, neurons]."""
    row = thread.row + 8 * half
    first_chunk = thread.column // (TILE * SWIZZLE_CHUNK // SWIZZLE)
    return [word for number in range(2) for word in load_chunk(slot, row, first_chunk + number)]
