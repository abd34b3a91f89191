"""The `act24` recipe: dense weights, 2:4 activations (2503.16672).

Squared-ReLU activations are 84 to 98% zeros after about 1,000 steps, so that the two largest of each four lose little.
Y keeps two of four along the neurons, and dH has Y's pattern. The weight gradients contract tokens: there Y and dH are
2:4 along tokens, but for the busiest neurons, which lose too much and stay dense. Tokens are shuffled first, because
neighbours fire together.

    up           H   = X W1^T      dense
    down         O   = Y W2        Y 2:4 along F
    grad_hidden  dY  = dO W2^T     dense
    grad_input   dX  = dH W1       dH 2:4 along F, where Y is
    grad_up      dW1 = dH^T X      dH^T 2:4 along T, the two largest
    grad_down    dW2 = Y^T dO      Y^T 2:4 along T, the two largest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm import ops
from sparse_lm.ops import fp8
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.row_order import RowOrder, combine, dispatch, in_rows
from sparse_lm.recipes.base import FfnCall, InSlots, Recipe, Rule, Shape, Stats, hidden_stats

DENSE_FEATURES_MULTIPLE = 128  # dense features are counted in whole tensor-core tiles (2503.16672)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Act24(Recipe):
    """Trains with activations sparsified to 2:4.

    Attributes:
      dense_features: share of the neurons, the busiest, whose weight gradients stay dense; rounded up to 128 neurons.
    """

    dense_features: float = 0.05

    name = "act24"
    products: ClassVar = {"down": "Y 2:4", "grad_input": "dH 2:4", "grad_up": "dH 2:4", "grad_down": "Y 2:4"}
    takes_order = True

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield "dense_features", 0 <= self.dense_features <= 1, "must be in 0..1"

    def work(self) -> dict[str, float]:
        of_gradients = 0.5 + self.dense_features  # all rows 2:4, and the busiest once more
        return super().work() | {"grad_up": of_gradients, "grad_down": of_gradients}

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        rows = None
        if ffn.order is not None:
            position = jnp.zeros_like(ffn.order).at[ffn.order].set(jnp.arange(x.shape[0], dtype=jnp.int32))
            rows = RowOrder(ffn.order, position)
        x = in_rows(dispatch(x, rows))
        with jax.named_scope("up"):
            h, factor = self._dense(x, ffn.w1.dense.T)
        y, seen = ops.squared_relu_24(h, factor=factor, implementation=ffn.implementation)
        with jax.named_scope("down"):
            o = self._sparse(y, ffn.w2.dense, ffn)
        return combine(o, rows), hidden_stats(seen, *h.shape), InSlots(x, (y, rows))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        y, rows = saved
        do = in_rows(dispatch(do, rows))
        with jax.named_scope("grad_hidden"):
            dy, factor = self._dense(do, ffn.w2.dense.T)
        gradients = ops.squared_relu_gradients(dy, y, factor=factor, implementation=ffn.implementation)
        with jax.named_scope("grad_input"):
            dx = self._sparse(gradients.dh, ffn.w1.dense, ffn)
        busy = busiest_neurons(gradients.y_t, self.dense_features)
        with jax.named_scope("grad_up"):
            dw1 = self._weight_gradient(gradients.dh_t, gradients.dh, x, busy, ffn)
        with jax.named_scope("grad_down"):
            dw2 = self._weight_gradient(gradients.y_t, y, do, busy, ffn)
        return combine(dx, rows), dw1, dw2

    def _dense(self, x: Array, w: Array) -> tuple[Array, Array | None]:
        """Computes X W, and what its rows are to be multiplied by."""
        return fp8.product(fp8.by_rows(x), w) if self.in_fp8 else (x @ w, None)

    def _sparse(self, a: Sparse24, w: Array, ffn: FfnCall) -> Array:
        multiply = fp8.times_24 if self.in_fp8 else ops.matmul_24
        return multiply(a, w, implementation=ffn.implementation)

    def _weight_gradient(self, a_t: Sparse24, a: Sparse24, b: Array, busy: Array | None, ffn: FfnCall) -> Array:
        """Computes a^T b [F, D] from the 2:4 form of a^T, but its rows `busy` from all of a, in the dtype of b."""
        multiply = fp8.sum_over_rows_24 if self.in_fp8 else ops.matmul_24
        product = multiply(a_t, b, out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)
        if busy is None:
            return product
        of_busy = in_rows(a.take_columns(busy))
        return product.at[busy].set(jnp.matmul(of_busy.T, b, preferred_element_type=ffn.gradient_dtype))


@jax.named_call
def busiest_neurons(y_t: Sparse24, share: float) -> Array | None:
    """Returns int32[n], the `share` of neurons with the most non-zeros, n rounded up to 128; None for no neurons.

    Counts those that 2:4 along tokens keeps: positions of Y's other form would have to be unpacked.
    """
    neurons = y_t.shape[0]
    multiple = min(DENSE_FEATURES_MULTIPLE, neurons)
    count = min(neurons, -(-round(neurons * share) // multiple) * multiple)
    if count == 0:
        return None
    return lax.top_k(jnp.sum(y_t.values[:neurons] != 0, axis=1), count)[1]
