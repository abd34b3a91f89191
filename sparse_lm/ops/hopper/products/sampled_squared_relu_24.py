"""`sampled_matmul_24` with `squared_relu_24` as its epilogue: H is never written.

The accumulators hold H^T, the four neurons of a group in four lanes. So 64 neurons of 64 tokens at a time take
the way through shared memory, rounded, and come back as thread_tile.py has them; the rest is `squared_relu_24`.

Numerics: bit for bit those of the two kernels one after the other, statistics included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.checks import check_product_dtypes
from sparse_lm.ops.formats import TILE, HiddenStats, Sparse24
from sparse_lm.ops.hopper.frame.emit import SCALAR, i32
from sparse_lm.ops.hopper.frame.operands import pad, round_up
from sparse_lm.ops.hopper.frame.store import SWIZZLE, SWIZZLE_CHUNK, load_chunk, transforms, write_tile
from sparse_lm.ops.hopper.frame.thread_tile import HALVES, Thread, Tile
from sparse_lm.ops.hopper.frame.tiling import Epilogue, Tiling
from sparse_lm.ops.hopper.passes.squared_relu_24 import out_types, sparsify, squared_relu_24
from sparse_lm.ops.hopper.products.sampled_matmul_24 import (
    heuristic_config,
    multiply_listed,
    sampled_matmul_24,
    takes_contiguous,
)


def sampled_squared_relu_24(
    w: Sparse24, x: Array, neuron_ids: Array, v: int, *, contiguous: int = 1, config: Tiling | None = None
) -> tuple[Sparse24, HiddenStats]:
    """See `sparse_lm.ops.sampled_squared_relu_24`.

    Runs that no tile of `sampled_matmul_24` fits are left to the two kernels.

    Raises:
      NotImplementedError: the dtypes, or v.
    """
    if not takes_contiguous(contiguous, v):
        return squared_relu_24(sampled_matmul_24(w, x, neuron_ids, v, contiguous=contiguous))
    check_product_dtypes(w.dtype, x.dtype, x.dtype)
    tokens, kept = x.shape[0], neuron_ids.shape[1]
    config = config or heuristic_config(tokens, kept, x.shape[1], v)
    h = jax.ShapeDtypeStruct((round_up(tokens), kept), x.dtype)
    values, metadata, stats = multiply_listed(
        config, w, pad(x), neuron_ids, v, contiguous, h, name="sampled_squared_relu_24", epilogue=_squared_relu(h)
    )
    return Sparse24(values, metadata, (tokens, kept)), HiddenStats(*jnp.sum(stats, axis=(0, 1)))


def _squared_relu(h: jax.ShapeDtypeStruct) -> Epilogue:
    tokens, neurons = h.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms(h.dtype)), *(plgpu.RefType(),) * 3, *(SCALAR,) * 2)
    )
    def select(_, part, slot, values, metadata, stats, neuron_tile, token_tile):
        write_tile(part, slot, transposed=True)
        mgpu_utils.warpgroup_barrier()
        tile = Tile(Thread.current(), token_tile.registers.item(), neuron_tile.registers.item())
        sparsify([_load_words(slot, tile.thread, half) for half in HALVES], tile, values, metadata, stats)

    def store(part: Array, slots: Any, _, outs: Sequence[Any], origin: tuple[Array, Array], number: int) -> None:
        neuron, token = origin

        @pl.when((neuron < neurons) & (token < tokens))
        def _inside():
            # Of two slots that take turns, one may be written while slower threads still read the other.
            slot = slots.at[number % slots.shape[0]]
            select(part, slot, *outs, lax.div(neuron, TILE), lax.div(token, TILE))

    return Epilogue(out_types(tokens, neurons, h.dtype), store)


def _load_words(slot: ir.Value, thread: Thread, half: int) -> list[ir.Value]:
    """Loads the 16 neurons of one of a thread's tokens, eight words, from a staging slot, [tokens, neurons] and
    swizzled."""
    row = arith.addi(thread.row, i32(8 * half))
    first_chunk = arith.divui(thread.column, i32(TILE * SWIZZLE_CHUNK // SWIZZLE))
    return [word for number in range(2) for word in load_chunk(slot, row, arith.addi(first_chunk, i32(number)))]
