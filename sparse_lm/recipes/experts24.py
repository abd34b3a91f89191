"""The `experts24` recipe: all six products of a mixture's experts sparse, 2:4 inside (after 2602.06183, 2503.16672).

The router, its gates and the dispatch are the mixture's and stay dense (model/mixture.py). Each of the E experts is an
FFN of Fe neurons. Weights are 2:4 by soft threshold (2409.09099), with one scale beta for each layer's W1 and one for
its W2, fitted over all experts together: beta depends on the shape of the weights' distribution, which they share.
Activations are 2:4 by the two largest of four. The weight gradients are stochastic (2203.10991).

T k pairs of tokens and chosen experts, in blocks of one expert each:

    up           Y   = relu(X W1[expert]^T)^2    W1 2:4 along D
    down         O   = Y W2[expert]              Y 2:4 along Fe
    grad_hidden  dY  = dO W2[expert]^T           W2 2:4 along D
    grad_input   dX  = dH W1[expert]             dH 2:4 along Fe, where Y is
    grad_up      dW1[expert] += dH^T X           dH^T 2:4 along T, stochastic
    grad_down    dW2[expert] += Y^T dO           Y^T 2:4 along T, stochastic

With the gate relu(G)^2, `gated_relu2`, all nine products are 2:4 (slices.py).

Every decision is made from one token alone. Leaving turns the weights into what the sparse forward used; the experts
stay, and dense steps compute them by grouped products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from jax import Array

from sparse_lm.ops.activations import SQUARED_RELU
from sparse_lm.recipes.base import FfnCall, Rule, Shape, Stats
from sparse_lm.recipes.groups import fitting_block
from sparse_lm.recipes.slices import backward_experts, forward_experts, rule_of_v
from sparse_lm.recipes.soft_threshold import SoftThreshold24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts24(SoftThreshold24):
    """Trains a mixture's experts with all six products 2:4.

    Attributes:
      v: the most slots of a block, as kernels take them. An expert's pairs are padded to whole blocks.
    """

    v: int = 256

    name = "experts24"
    computes = ()
    computes_experts = (SQUARED_RELU, "gated_relu2")
    products: ClassVar = {
        "up": "W1 2:4",
        "down": "Y 2:4",
        "grad_hidden": "W2 2:4",
        "grad_input": "dH 2:4",
        "grad_up": "dH 2:4, stochastic",
        "grad_down": "Y 2:4, stochastic",
    }
    takes_order = True
    stochastic = True

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield rule_of_v(self.v)

    def block_of_experts(self, pairs: int, experts: int) -> int:
        return fitting_block(self.v, pairs, experts)

    def forward_experts(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        return forward_experts(x, ffn)

    def backward_experts(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array, Array]:
        return backward_experts(x, saved, do, ffn)
