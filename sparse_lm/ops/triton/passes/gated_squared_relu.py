"""Computes the 2:4 form of Y = relu(G)^2 U and hidden layers' gradients: XLA's around `sparsify_24`, which refuses."""

from __future__ import annotations

import functools

from sparse_lm.ops import reference
from sparse_lm.ops.triton.passes.sparsify_24 import sparsify_24

gated_squared_relu_24 = functools.partial(reference.gated_squared_relu_24, sparsify=sparsify_24)
gated_squared_relu_gradients = functools.partial(reference.gated_squared_relu_gradients, sparsify=sparsify_24)
hidden_gradients = functools.partial(reference.hidden_gradients, sparsify=sparsify_24)
