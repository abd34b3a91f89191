"""An epilogue (persistent.py) that adds a product to a total, and stores the sum, as a rule in the total's place.

There TMA adds to what it finds, in the L2 cache, which is faster than to read it. But XLA may give a kernel slices of
larger arrays without copying them. Where the total is a slice of one array and the result a slice of another, they are
two places, although the call makes them one (dynamic-slice fusions of XLA in JAX 0.11). Then threads read the total,
and TMA writes the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir.dialects import arith, llvm

from sparse_lm.ops.hopper.frame import wgmma_sp
from sparse_lm.ops.hopper.frame.emit import SCALAR, i32_type, i64_type
from sparse_lm.ops.hopper.frame.store import store_tile
from sparse_lm.ops.hopper.frame.tiling import Epilogue


def store_sum(total: jax.ShapeDtypeStruct, *, transposed: bool) -> Epilogue:
    """total + product, as a rule in the place of the total, which is the last operand.

    Args:
      total: float32, [rows, columns] of the product or, if `transposed`, [columns, rows]; multiples of 64.
      transposed: whether the total is.
    """
    rows, columns = total.shape[::-1] if transposed else total.shape

    def store(
        part: Array,
        slots: Any,
        operands: Sequence[Any],
        outs: Sequence[Any],
        origin: tuple[Array, Array],
        number: int,
    ) -> None:
        source, (out,) = operands[-1], outs
        in_place = _same_place(source, out)

        @pl.when(in_place)
        def _accumulate():
            store_tile(part, slots, out, origin, first_store=number, transposed=transposed, accumulate=True)

        @pl.when(~in_place)
        def _add_first():
            height, width = part.shape
            # A part lies inside or outside as a whole. What is read instead of one that lies outside is not stored.
            row = pl.ds(lax.min(origin[0], rows - height), height)
            column = pl.ds(lax.min(origin[1], columns - width), width)
            addend = source.at[column, row] if transposed else source.at[row, column]
            whole = _add(part, addend, transposed=transposed)
            store_tile(whole, slots, out, origin, first_store=number, transposed=transposed)

    return Epilogue((total,), store, in_place=True)


def _same_place(source: Any, out: Any) -> Array:
    """Whether two arrays of global memory are one."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def emit(_, source, out):
        addresses = [llvm.ptrtoint(i64_type(), mgpu_utils.memref_ptr(ref)) for ref in (source, out)]
        return wgmma_sp.splat(arith.extui(i32_type(), arith.cmpi(arith.CmpIPredicate.eq, *addresses)))

    return emit(source, out) == 1


def _add(part: Array, addend: Any, *, transposed: bool) -> Array:
    """part + addend: float32 [64, columns] in layout WGMMA, and of global memory, [columns, 64] if `transposed`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(part.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(_, part, addend):
        layout = part.layout
        if transposed:
            addend = mgpu_utils.memref_transpose(addend, (1, 0))
            # Two neighbours in a row are no vector in a column: load single elements.
            part = part.to_layout(mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        loaded = mgpu.FragmentedArray.load_untiled(addend, layout=part.layout, optimized=False)
        return (part + loaded).to_layout(layout)

    return emit(part, addend)
