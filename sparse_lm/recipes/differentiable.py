"""Makes one differentiable function of what a recipe writes out as forward and backward.

Around a recipe's products are the collectives of a mesh, the names that rematerialisation policies know what is saved
by, and the weights in their forms, which are made or gathered again rather than saved.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from sparse_lm import collectives
from sparse_lm.collectives import Axes
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.recipes.groups import Groups
from sparse_lm.recipes.weight_forms import Weight, WeightForms

if TYPE_CHECKING:
    from sparse_lm.recipes.base import Recipe

RESIDUALS = "ffn_residuals"  # what rematerialisation policies call what the backward pass needs of the hidden layer
Stats = dict[str, Array]


class FfnCall(NamedTuple):
    """Holds what the products of one FFN read besides its input."""

    w1: Weight
    w2: Weight
    state: Any
    key: Array | None
    order: Array | None
    axes: Axes
    gradient_dtype: DTypeLike  # of dW1 and dW2
    implementation: str | None
    groups: Groups | None = None  # of a mixture's pairs

    def subkey(self, use: int) -> Array:
        """Derives the random key of one of several uses."""
        return jax.random.fold_in(self.key, use)


class InSlots(NamedTuple):
    """Holds what `Recipe.backward` needs of a `forward` that dispatched its tokens: they are not dispatched again."""

    x: Array  # [Tp, D], which `backward` is given in place of x [T, D]
    rest: Any


class _Saved(NamedTuple):
    x: Array  # [T, D] as it came, or of `InSlots`; a mixture's as it came, since k times as much is dispatched of it
    of_forward: Any
    w1: Array
    w2: Array
    state: Any
    key: Array | None
    weights: tuple[WeightForms, WeightForms] | None
    layer: Array
    gates: Array | None = None
    groups: Groups | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ffn(recipe, axes, x, w1, w2, state, key, order, weights, layer):
    """Computes `Recipe.ffn` of x [T, D]."""
    return _forward(recipe, axes, x, w1, w2, state, key, order, weights, layer)[0]


def _forward(recipe: Recipe, axes: Axes, x, w1, w2, state, key, order, weights, layer):
    saved = _Saved(x, None, w1, w2, state, key, weights, layer)
    o, stats, of_forward = recipe.forward(x, _call(recipe, axes, saved, order))
    o = collectives.total(o, axes.tensor)
    of_forward = _named(of_forward)
    if isinstance(of_forward, InSlots):
        x, of_forward = of_forward
    return (o, stats), saved._replace(x=x, of_forward=of_forward)


def _backward(recipe: Recipe, axes: Axes, saved: _Saved, cotangents: tuple[Array, Stats]):
    dx, dw1, dw2 = recipe.backward(saved.x, saved.of_forward, cotangents[0], _call_of_backward(recipe, axes, saved))
    dx = collectives.total(dx, axes.tensor)
    dw1, dw2 = (collectives.sum_gradient(dw, axes) for dw in (dw1, dw2))
    return dx, dw1, dw2.astype(saved.w2.dtype), None, None, None, None, None


ffn.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def experts(recipe, axes, x, w1, w2, gates, groups, state, key, weights, layer):
    """Computes `Recipe.mixture`."""
    return _forward_experts(recipe, axes, x, w1, w2, gates, groups, state, key, weights, layer)[0]


def _forward_experts(recipe: Recipe, axes: Axes, x, w1, w2, gates, groups, state, key, weights, layer):
    saved = _Saved(x, None, w1, w2, state, key, weights, layer, gates, groups)
    x, gates = (collectives.gather(own, groups.axis) for own in (x, gates))  # of [To, n] all [T, n]
    of_pairs, stats, of_forward = recipe.forward_experts(groups.dispatch(x), _call(recipe, axes, saved, None))
    named = dict(of_forward=_named(of_forward), gates=_named(gates), groups=_named(groups))
    return (groups.combine(of_pairs, gates), stats), saved._replace(**named)


def _backward_experts(recipe: Recipe, axes: Axes, saved: _Saved, cotangents: tuple[Array, Stats]):
    call, groups = _call_of_backward(recipe, axes, saved), saved.groups
    x, do = (collectives.gather(own, groups.axis) for own in (saved.x, cotangents[0]))
    do = groups.dispatch(do, saved.gates)
    dx, dw1, dw2, y_dy = recipe.backward_experts(groups.dispatch(x), saved.of_forward, do, call)
    dw1, dw2 = (collectives.sum_gradient(dw, axes.of_experts) for dw in (dw1, dw2))
    dw2, dgates = dw2.astype(saved.w2.dtype), groups.gate_gradients(y_dy, saved.gates)
    return groups.combine(dx), dw1, dw2, dgates, None, None, None, None, None


experts.defvjp(_forward_experts, _backward_experts)


def _named(saved: Any) -> Any:
    """Names what the backward pass needs for rematerialisation policies."""
    return jax.tree.map(lambda a: checkpoint_name(a, RESIDUALS), saved)


def _call(recipe: Recipe, axes: Axes, saved: _Saved, order: Array | None) -> FfnCall:
    weights, layer, implementation = saved.weights, saved.layer, recipe.implementation
    if weights is None:
        w1, w2, state = jax.tree.map(lambda a: a[None], (saved.w1, saved.w2, saved.state))
        weights, layer = recipe.prepare(w1, w2, state, saved.x.dtype), jnp.int32(0)
    elif (dtype := jax.tree.leaves(weights)[0].dtype) != saved.x.dtype:
        raise ValueError(f"weights= are prepared in {dtype}: must be in the dtype of x, {saved.x.dtype}")
    if axes.fsdp:
        weights, layer = gather_layer(weights, layer, axes.fsdp), jnp.int32(0)
    up, down = (Weight(forms, layer, implementation) for forms in weights)
    return FfnCall(up, down, saved.state, saved.key, order, axes, saved.w1.dtype, implementation, saved.groups)


def _call_of_backward(recipe: Recipe, axes: Axes, saved: _Saved) -> FfnCall:
    """Makes or gathers weights again rather than saving them."""
    if recipe.stochastic and saved.key is None:
        raise ValueError(
            f"the weight gradients of recipe {recipe.name!r} are stochastic: to be differentiated it needs key="
        )
    if saved.key is not None and (split := axes.tensor or axes.expert):  # each device draws for its own neurons
        saved = saved._replace(key=jax.random.fold_in(saved.key, collectives.index(split)))
    return _call(recipe, axes, saved, None)


@jax.named_call
def gather_layer(weights: tuple[WeightForms, WeightForms], layer: Array, axis: str) -> tuple[WeightForms, WeightForms]:
    """Gathers one layer's weights, whole, of the neurons that each device along a mesh axis has.

    2:4 forms travel compressed, 9/16 of the bytes in bf16. Their shards are whole tiles of metadata: a ValueError
    refuses one that is no multiple of 64 neurons.
    """

    def gather(x: Array, layers: int, along: int) -> Array:
        rows = x.shape[0] // layers
        return collectives.gather(lax.dynamic_slice_in_dim(x, layer * rows, rows), axis, along)

    def gather_sparse(form: Sparse24 | None, forms: WeightForms, along: int) -> Sparse24 | None:
        if form is None:
            return None
        if forms.neurons % TILE:
            raise ValueError(f"a shard of {forms.neurons} neurons must be a multiple of {TILE} to travel compressed")
        values, metadata = (gather(part, forms.layers, along) for part in (form.values, form.metadata))
        return Sparse24(values, metadata, (values.shape[0], 2 * values.shape[1] if along else form.shape[1]))

    def gather_forms(forms: WeightForms) -> WeightForms:
        dense, dense_transposed = (
            None if form is None else gather(form, forms.layers, along)
            for form, along in ((forms.dense, 0), (forms.dense_transposed, 1))
        )
        sparse = gather_sparse(forms.along_model, forms, 0), gather_sparse(forms.along_neurons, forms, 1)
        return WeightForms(*sparse, dense, dense_transposed, 1, forms.neurons * collectives.size(axis), forms.dim)

    return gather_forms(weights[0]), gather_forms(weights[1])
