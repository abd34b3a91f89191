"""The squared ReLU of 16-bit floats, two to a word."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from sparse_lm.ops.hopper.frame import packed_24


def squared_relu(word: ir.Value, element: ir.Type) -> ir.Value:
    """Computes relu(h)^2 of two 16-bit floats, rounded to their dtype. NaN stays NaN.

    float32 holds the product of two 16-bit floats exactly, so that the one taken here, rounded once, is the same.
    """
    h = packed_24.as_pair(word, element)
    zero = arith.constant(h.type, ir.DenseElementsAttr.get_splat(h.type, ir.FloatAttr.get(element, 0.0)))
    relu = arith.maximumf(h, zero)
    return packed_24.as_word(arith.mulf(relu, relu))
