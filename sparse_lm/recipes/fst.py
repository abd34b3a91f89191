"""The `fst` recipe: 2:4 weights under transposable masks (fully sparse training, 2404.01847).

A mask that has two ones in every row and column of each 4 x 4 tile serves a weight along both of its dimensions, so
that all four products with a weight read it 2:4. The weight gradients' operands are made 2:4 along tokens at random,
without bias and with least variance (MVUE, 2203.10991). Gradients reach all weights; those that the mask prunes decay
(section 4.2), and masks are chosen anew every `sparsity.refresh_every` steps.

    up           H   = X W1^T      W1 2:4 along D
    down         O   = Y W2        W2 2:4 along F
    grad_hidden  dY  = dO W2^T     W2 2:4 along D
    grad_input   dX  = dH W1       W1 2:4 along F
    grad_up      dW1 = dH^T X      dH^T 2:4 along T, stochastic
    grad_down    dW2^T = dO^T Y    dO^T 2:4 along T, stochastic
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm import ops
from sparse_lm.ops.activations import ACTIVATIONS, SQUARED_RELU, activate
from sparse_lm.ops.formats import Sparse24
from sparse_lm.recipes.base import FfnCall, Recipe, Rule, Shape, Stats, hidden_stats
from sparse_lm.recipes.weight_forms import WeightForms, check_layers, stack_layers


class Masks(NamedTuple):
    """Transposable 2:4 masks, bool[F, D], and the factor f32[] of the decay of what they prune."""

    mask_up: Array
    mask_down: Array
    decay: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fst(Recipe):
    """Trains with 2:4 weights under transposable masks.

    Attributes:
      mask_decay: factor of the masked decay. The paper reports 6e-6 to 2e-4, chosen so that masks flip 0.60 to 0.95
        times as often as in dense training (section 4.3).
    """

    mask_decay: float = 6e-5

    name = "fst"
    products: ClassVar = {
        "up": "W1 2:4",
        "down": "W2 2:4",
        "grad_hidden": "W2 2:4",
        "grad_input": "W1 2:4",
        "grad_up": "dH 2:4, stochastic",
        "grad_down": "dO 2:4, stochastic",
    }
    State = Masks
    neuron_major = ("mask_up", "mask_down")
    sparse_weights = True
    stochastic = True
    computes = ACTIVATIONS
    refreshes = True

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield "mask_decay", 0 <= self.mask_decay <= 1, "must be in 0..1"

    def init_state(self, w1: Array, w2: Array) -> Masks:
        # Masks of a state that was never entered keep more than two of four: what reads weights under them is NaN.
        return Masks(jnp.ones(w1.shape, bool), jnp.ones(w2.shape, bool), jnp.full((), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[Masks, None]:
        self.check(w1, w2, x)
        decay = jnp.full((), self.mask_decay, jnp.float32)
        return Masks(ops.transposable_mask(w1), ops.transposable_mask(w2), decay), None

    def refresh(self, w1: Array, w2: Array, state: Masks, x: Array | None = None) -> tuple[Masks, Stats]:
        """Chooses the masks anew; "flip_rate" f32[] is the share of their entries that changed."""
        self.check_entered(w1, w2, state, x)
        new, _ = self.enter(w1, w2)
        flips = jnp.mean(state.mask_up ^ new.mask_up) + jnp.mean(state.mask_down ^ new.mask_down)
        return new, {"flip_rate": flips / 2}

    def leave(self, w1: Array, w2: Array, state: Masks, x: Array | None = None) -> tuple[Array, Array]:
        self.check_entered(w1, w2, state, x)
        return jnp.where(state.mask_up, w1, 0), jnp.where(state.mask_down, w2, 0)

    def adjust_gradients(self, dw1: Array, dw2: Array, w1: Array, w2: Array, state: Masks) -> tuple[Array, Array]:
        """Adds the masked decay to clipped gradients, before Adam, whose normalisation so applies to it."""
        self.check_entered(w1, w2, state)
        up, down = state.decay * w1 * ~state.mask_up, state.decay * w2 * ~state.mask_down
        return dw1 + up.astype(dw1.dtype), dw2 + down.astype(dw2.dtype)

    def prepare(self, w1: Array, w2: Array, state: Masks, dtype: DTypeLike) -> tuple[WeightForms, WeightForms]:
        up = masked_forms(w1, state.mask_up, dtype, self.implementation)
        return up, masked_forms(w2, state.mask_down, dtype, self.implementation)

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        squared = self.activation == SQUARED_RELU
        with jax.named_scope("up"):
            h = ffn.w1.over_model(x, squared_relu=squared)
        y, seen, saved = activate(h, self.activation, squared=squared)
        with jax.named_scope("down"):
            o = ffn.w2.over_neurons(y)
        return o, hidden_stats(seen, *y.shape), saved

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        with jax.named_scope("grad_hidden"):
            dy = ffn.w2.over_model(do)
        options: dict[str, Any] = dict(key=ffn.subkey(1), implementation=ffn.implementation)
        dh, dh_t, y = ops.hidden_gradients(dy, saved, self.activation, **options)
        with jax.named_scope("grad_input"):
            dx = ffn.w1.over_neurons(dh)
        return dx, grad_up_from_dh(dh_t, x, ffn), grad_down_from_do(y, do, ffn)


@jax.named_call
def masked_forms(w: Array, mask: Array, dtype: DTypeLike, implementation: str | None) -> WeightForms:
    """Compresses weights [L, F, D] along D and along F under transposable masks (2404.01847)."""
    check_layers(w, mask)
    options: dict[str, Any] = dict(dtype=dtype, implementation=implementation)
    along_model, along_neurons = lax.map(lambda layer: ops.sparsify_24_tiles(*layer, **options), (w, mask))
    return WeightForms(stack_layers(along_model), stack_layers(along_neurons), None, None, *w.shape)


@jax.named_call
def grad_up_from_dh(dh_t: Sparse24, x: Array, ffn: FfnCall) -> Array:
    """Computes dW1 = dH^T X [F, D] of dH^T, 2:4 along tokens."""
    return ops.matmul_24(dh_t, x, out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)


@jax.named_call
def grad_down_from_do(y: Array, do: Array, ffn: FfnCall) -> Array:
    """Computes dW2 = Y^T dO [F, D] as (dO^T Y)^T, since the sparse operand, dO^T 2:4 along tokens, comes first."""
    do_t = ops.sparsify_24(do, "mvue", 0, key=ffn.subkey(2), implementation=ffn.implementation)
    options: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, implementation=ffn.implementation)
    return ops.matmul_24(do_t, y, out_transposed=True, **options)
