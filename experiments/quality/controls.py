"""Recipes that are there to be compared with; `register` puts them beside those of sparse_lm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm import ops
from sparse_lm.ops import fp8
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.row_order import RowOrder, dispatch
from sparse_lm.recipes import RECIPES, Slices
from sparse_lm.recipes.base import FfnCall, Stats
from sparse_lm.recipes.slices import RoutedState
from sparse_lm.recipes.weight_forms import Weight, WeightForms


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedQuarter(Slices):
    """`Slices` without a router: all tokens compute the first slice, 1 / E of the neurons in the order they come in.

    No token is nearer to one centroid than to another if all are zero, and of equals the first is taken.
    """

    name = "fixed_quarter"
    leave_reads_inputs = False  # there is no other expert's token
    refreshes = False

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[RoutedState, None]:
        state, _ = super().enter(w1, w2, x)
        return state._replace(centroids=jnp.zeros_like(state.centroids)), None

    def refresh(self, w1: Array, w2: Array, state: RoutedState, x: Array | None = None) -> tuple[RoutedState, Stats]:
        return state, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Slices(Slices):
    """`Slices` with both operands of all six products rounded to e4m3, for a squared ReLU: what it would learn in FP8.

    X and dO have a scale a token where a product contracts their width, and one a column where it contracts tokens.
    Y, dH, their transposes and each weight have one. Tokens are routed by what is rounded. bf16 holds what e4m3 does:
    the kernels are those of `Slices`, and the time says nothing.
    """

    name = "fp8_slices"

    def prepare(self, w1: Array, w2: Array, state: RoutedState, dtype: DTypeLike) -> tuple[WeightForms, WeightForms]:
        up, down = super().prepare(w1, w2, state, dtype)
        return tuple(
            dataclasses.replace(w, along_model=_rounded(w.along_model), dense=_round(w.dense, fp8.whole))
            for w in (up, down)
        )

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        x = _round(x, fp8.by_rows)
        o, stats, saved = super().forward(x, ffn._replace(w2=_OfRounded(*ffn.w2)))
        (y, h), groups = saved.rest
        return o, stats, saved._replace(rest=((_rounded(y), h), groups))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        (y, _), groups = saved
        do, neuron_ids, options = dispatch(do, groups.rows), y.kept_columns(), dict(implementation=ffn.implementation)
        dy = ffn.w2.at_neurons(_round(do, fp8.by_rows), neuron_ids, y.v, y.contiguous)
        condensed = Sparse24(y.values, y.metadata, dy.shape)
        gradients = ops.squared_relu_gradients(dy, condensed, key=ffn.subkey(3), **options)
        dx = _OfRounded(*ffn.w1).over_kept(dataclasses.replace(y, values=gradients.dh.values), groups.rows)

        def sum_over_tokens(transposed: Sparse24, b: Array) -> Array:
            where = neuron_ids, y.v, ffn.w2.neurons
            into = dict(contiguous=y.contiguous, out_dtype=ffn.gradient_dtype, **options)
            return ops.scattered_matmul_24(_rounded(transposed), _round(b, fp8.by_columns), *where, **into)

        return dx, sum_over_tokens(gradients.dh_t, x), sum_over_tokens(gradients.y_t, do)


class _OfRounded(Weight):
    """A weight whose products are of rounded activations."""

    def over_kept(self, y: ops.SparseVenom, rows: RowOrder | None) -> Array:
        return super().over_kept(_rounded(y), rows)


def _rounded(a: Any) -> Any:
    """Rounds a compressed matrix to e4m3 with one scale."""
    return dataclasses.replace(a, values=_round(a.values, fp8.whole))


def _round(x: Array, scaled: Callable[[Array], fp8.Scaled]) -> Array:
    """Brings an array to e4m3 and back; without the barrier XLA may leave out the rounding with the conversions."""
    values, scale = lax.optimization_barrier(scaled(x))
    return values.astype(x.dtype) * scale.astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnturnedSlices(Slices):
    """`Slices` that leave with the weights of the sparse forward, whatever tokens of other experts then meet."""

    name = "unturned_slices"
    leave_reads_inputs = False


CONTROLS = FixedQuarter, Fp8Slices, UnturnedSlices


def register() -> None:
    """Makes the controls known to the configurations of this process."""
    RECIPES.update({control.name: control for control in CONTROLS})
