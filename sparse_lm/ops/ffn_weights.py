"""FFN weights as the products of a step read them: 2:4 along one dimension or the other, or dense.

The weights of all L layers are brought to these forms at once, outside of the loop over layers, so
that the forward and the backward of a step share them. A form is one matrix with the layers one
under the other: a product finds its layer by row numbers, and nothing is sliced out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm import collectives, ops
from sparse_lm.collectives import Axes
from sparse_lm.ops.formats import TILE, Sparse24
from sparse_lm.ops.plan import GemmPlan, Operand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FfnVariables:
    """What a sparse FFN reads but does not train. `None` where the recipe has no use for it.

    Attributes:
      scale_up: f32[], the soft threshold's beta of W1.
      scale_down: f32[], of W2.
      mask_up: bool[F, D], transposable 2:4 mask of W1.
      mask_down: bool[F, D], of W2.
      centroids: f32[clusters, D], the token clusters' centres.
      columns: int32[clusters, 4F/m], the neurons of each cluster, ascending: four of each m, or runs of
        `GemmPlan.run` of them. Kernels write where these say: other neurons are undefined behaviour.
    """

    scale_up: Array | None = None
    scale_down: Array | None = None
    mask_up: Array | None = None
    mask_down: Array | None = None
    centroids: Array | None = None
    columns: Array | None = None

    def scale(self, name: str) -> Array | None:
        """Of "W1" or "W2"."""
        return self.scale_up if name == "W1" else self.scale_down

    def mask(self, name: str) -> Array | None:
        """Of "W1" or "W2"."""
        return self.mask_up if name == "W1" else self.mask_down


NO_VARIABLES = FfnVariables()


def init_variables(plan: GemmPlan, dim: int, neurons: int) -> FfnVariables:
    """Variables of one FFN for `plan`, of the right shapes, before the sparse phase gives them values."""
    scales = jnp.ones((), jnp.float32) if plan.weights == "soft_threshold" else None
    masks = jnp.ones((neurons, dim), bool) if plan.weights == "transposable" else None
    return FfnVariables(
        scale_up=scales,
        scale_down=scales,
        mask_up=masks,
        mask_down=masks,
        centroids=jnp.zeros((plan.clusters, dim), jnp.float32) if plan.venom else None,
        columns=jnp.zeros((plan.clusters, 4 * neurons // plan.m), jnp.int32) if plan.pattern_known_first else None,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightForms:
    """W1 or W2 of all layers; `None` for a form that no product of the plan reads.

    Attributes:
      along_model: [L F, D], 2:4 along D.
      along_neurons: its layers' transposes, [L Dp, F], 2:4 along F; Dp is D rounded up to 64.
      dense: [L F, D].
    """

    along_model: Sparse24 | None
    along_neurons: Sparse24 | None
    dense: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FfnWeights:
    """W1 (`up`) and W2 (`down`) of all `layers` layers, [`neurons`, `dim`] each."""

    up: WeightForms
    down: WeightForms
    layers: int = dataclasses.field(metadata=dict(static=True))
    neurons: int = dataclasses.field(metadata=dict(static=True))
    dim: int = dataclasses.field(metadata=dict(static=True))


# The two products that read a weight, by the dimension that they contract.
_ALONG_MODEL = {"W1": "up", "W2": "grad_hidden"}
_ALONG_NEURONS = {"W1": "grad_input", "W2": "down"}


@jax.named_call
def prepare_weights(
    up: Array,
    down: Array,
    variables: FfnVariables,
    *,
    plan: GemmPlan,
    dtype: DTypeLike,
    implementation: str | None = None,
) -> FfnWeights:
    """The forms that the plan's products read.

    Args:
      up: W1 of all layers, [L, F, D] float.
      down: W2, likewise.
      variables: with a leading axis L.
      plan: the six products.
      dtype: of the forms.
      implementation: of the sparse operations.

    Returns:
      The forms of all layers, one under the other.
    """
    forms = [_forms(name, w, variables, plan, dtype, implementation) for name, w in (("W1", up), ("W2", down))]
    return FfnWeights(*forms, *up.shape)


def _forms(
    name: str, w: Array, variables: FfnVariables, plan: GemmPlan, dtype: DTypeLike, implementation: str | None
) -> WeightForms:
    sparse, options = Operand(name, "2:4"), dict(dtype=dtype, implementation=implementation)
    model_sparse = plan.operands.get(_ALONG_MODEL[name]) == sparse
    neurons_sparse = plan.operands.get(_ALONG_NEURONS[name]) == sparse
    rows = w.reshape(-1, w.shape[-1])

    along_model = along_neurons = masked = None
    if plan.weights == "transposable" and plan.sparse_weight(name):
        mask = variables.mask(name)
        along_model, along_neurons = _both_ways(w, mask, options)
        masked = jnp.where(mask, w, 0).astype(dtype).reshape(rows.shape)
    elif model_sparse:
        along_model, masked = ops.soft_threshold_24(rows, variables.scale(name), **options)
    elif neurons_sparse:
        along_neurons, masked = _soft_threshold_transposes(w, variables.scale(name), options)
    dense = masked if plan.dense_weights == "masked" and plan.sparse_weight(name) else rows.astype(dtype)
    return WeightForms(
        along_model if model_sparse else None,
        along_neurons if neurons_sparse else None,
        None if model_sparse and neurons_sparse else dense,
    )


def _both_ways(w: Array, mask: Array, options: dict[str, Any]) -> tuple[Sparse24, Sparse24]:
    """Forms along D and along F of [L, F, D] under transposable masks."""
    forms = jax.lax.map(lambda layer: ops.sparsify_24_tiles(*layer, **options), (w, mask))
    along_model, along_neurons = map(_stack, forms)
    return along_model, along_neurons


def _soft_threshold_transposes(w: Array, scale: Array, options: dict[str, Any]) -> tuple[Sparse24, Array]:
    """Form along F of [L, F, D], soft thresholded with each layer's scale, and the same matrix dense, [L F, D]."""

    def transpose(layer):
        w, scale = layer
        return ops.sparsify_24(w, "soft_threshold", 0, scale=scale, **options)

    by_layer = jax.lax.map(transpose, (w, scale))
    dense = jax.vmap(lambda form: form.to_dense().T)(by_layer)
    return _stack(by_layer), dense.reshape(-1, w.shape[-1])


def _stack(by_layer: Sparse24) -> Sparse24:
    """Sparse24 with a leading axis L, to one matrix of the layers one under the other, each in whole tiles."""
    values = by_layer.values.reshape(-1, by_layer.values.shape[-1])
    metadata = by_layer.metadata.reshape(-1, *by_layer.metadata.shape[2:])
    return Sparse24(values, metadata, (values.shape[0], by_layer.shape[1]))


@jax.named_call
def gather_layer(weights: FfnWeights, layer: Array, axis: str) -> FfnWeights:
    """One layer's weights, whole, of the neurons that each device along a mesh axis has.

    2:4 forms travel compressed, 9/16 of the bytes in bf16. Shards are whole tiles of metadata: `neurons`
    is a multiple of 64.

    Args:
      weights: of all layers, `neurons` of each.
      layer: int32[].
      axis: mesh axis that splits the neurons.
    """

    def of_layer(x: Array, along: int) -> Array:
        rows = x.shape[0] // weights.layers
        return collectives.gather(jax.lax.dynamic_slice_in_dim(x, layer * rows, rows), axis, along)

    def sparse(form: Sparse24 | None, along: int) -> Sparse24 | None:
        if form is None:
            return None
        if weights.neurons % TILE:
            raise ValueError(f"a shard of {weights.neurons} neurons must be a multiple of {TILE} to travel compressed")
        values, metadata = of_layer(form.values, along), of_layer(form.metadata, along)
        return Sparse24(values, metadata, (values.shape[0], 2 * values.shape[1] if along else form.shape[1]))

    def gathered(forms: WeightForms) -> WeightForms:
        dense = None if forms.dense is None else of_layer(forms.dense, 0)
        return WeightForms(sparse(forms.along_model, 0), sparse(forms.along_neurons, 1), dense)

    neurons = weights.neurons * collectives.size(axis)
    return FfnWeights(gathered(weights.up), gathered(weights.down), 1, neurons, weights.dim)


def local_columns(variables: FfnVariables, neurons: int, axes: Axes) -> FfnVariables:
    """Variables of the `neurons` that this device along `tensor` has, which its columns count from 0."""
    if variables.columns is None or not axes.tensor:
        return variables
    return dataclasses.replace(variables, columns=variables.columns - collectives.index(axes.tensor) * neurons)


def effective_weights(w1: Array, w2: Array, variables: FfnVariables, plan: GemmPlan) -> tuple[Array, Array]:
    """W1 and W2 [F, D] of one layer as the plan's forward reads them, dense, in their own dtypes."""

    def effective(name, w, product):
        is_operand = product is not None and product.name == name
        masked = is_operand or (plan.dense_weights == "masked" and plan.sparse_weight(name))
        return _masked(name, w, variables, plan) if masked else w

    return effective("W1", w1, plan.up), effective("W2", w2, plan.down)


def soft_threshold_mask(name: str, w: Array, plan: GemmPlan) -> Array:
    """bool[F, D]: entries of W1 or W2 of one layer that its soft threshold keeps."""
    axis = plan.weight_axis(name)
    mask = ops.sparsify_24(w, "soft_threshold", axis, implementation="reference").mask()
    return mask.T if axis == 0 else mask


def _masked(name: str, w: Array, variables: FfnVariables, plan: GemmPlan) -> Array:
    """The sparse form of a weight [F, D], as a dense array."""
    if plan.weights == "transposable":
        return jnp.where(variables.mask(name), w, 0)
    axis, scale = plan.weight_axis(name), variables.scale(name)
    dense = ops.sparsify_24(w, "soft_threshold", axis, scale=scale, implementation="reference").to_dense()
    return dense.T if axis == 0 else dense
