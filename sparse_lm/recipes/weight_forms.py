"""FFN weights as the products of a step read them: 2:4 along one dimension or the other, or dense.

The weights of all L layers are brought to these forms at once, outside of the loop over layers, so that the forward
and the backward of a step share them. A form is one matrix with the layers one under the other: a product finds its
layer by row numbers, and nothing is sliced out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from sparse_lm import ops
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.row_order import RowOrder

_BLOCK = 768  # tokens: a multiple of every kernel's tile, for products that all tokens share


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightForms:
    """W1 or W2 of all layers; None stands for a form that no product of the recipe reads."""

    along_model: Sparse24 | None  # [L F, D], 2:4 along D
    along_neurons: Sparse24 | None  # the layers' transposes, [L Dp, F], 2:4 along F; Dp is D rounded up to 64
    dense: Array | None  # [L F, D]
    dense_transposed: Array | None  # the layers' transposes, [L D, F]
    layers: int = dataclasses.field(metadata=dict(static=True))  # L
    neurons: int = dataclasses.field(metadata=dict(static=True))  # F
    dim: int = dataclasses.field(metadata=dict(static=True))  # D


class Weight(NamedTuple):
    """W [F, D] of one layer."""

    forms: WeightForms
    layer: Array
    implementation: str | None

    @property
    def neurons(self) -> int:
        return self.forms.neurons

    @property
    def dense(self) -> Array:
        """Returns [F, D]: the values that sparse products use, as one dense matrix."""
        return self._of_layer(self.forms.dense)

    @property
    def dense_transposed(self) -> Array:
        """Returns [D, F]."""
        return self._of_layer(self.forms.dense_transposed)

    def over_model(self, x: Array, *, squared_relu: bool = False) -> Array:
        """Computes x W^T, or relu(x W^T)^2: [T, D] -> [T, F], W 2:4 along D."""
        return self._all_rows(self.forms.along_model, x, self.forms.neurons, squared_relu=squared_relu)

    def over_neurons(self, y: Array) -> Array:
        """Computes y W: [T, F] -> [T, D], W 2:4 along F."""
        return self._all_rows(self.forms.along_neurons, y, self.forms.dim)

    def among_layers(self, ids: Array, rows: int | None = None) -> Array:
        """Turns neuron numbers of this layer into those of all layers, whose neurons stand one under the other.

        F, which stands for no neuron, becomes L F. Of a form with more rows a layer, all layers together have `rows`.
        """
        rows = rows or self.forms.layers * self.forms.neurons
        of_layer = rows // self.forms.layers
        return jnp.where(ids == of_layer, rows, ids + self.layer * of_layer)

    def over_kept(self, y: SparseVenom, rows: RowOrder | None) -> Array:
        """Computes y W, stored in the order of the rows: [Tp, F], V:2:M -> [T, D], W dense."""
        forms = self.forms
        columns, shape = self.among_layers(y.columns), (y.shape[0], forms.layers * forms.neurons)
        y = dataclasses.replace(y, columns=columns, shape=shape)
        return ops.matmul_venom(y, forms.dense, rows=rows, implementation=self.implementation)

    def at_neurons(self, x: Array, neuron_ids: Array, v: int, contiguous: int = 1) -> Array:
        """Computes x W^T at the neurons of each block of v rows: [Tp, D] -> [Tp, S], W 2:4 along D."""
        w, ids = self.forms.along_model, self.among_layers(neuron_ids)
        return ops.sampled_matmul_24(w, x, ids, v, contiguous=contiguous, implementation=self.implementation)

    def _of_layer(self, dense: Array) -> Array:
        rows = dense.shape[0] // self.forms.layers
        return dense if self.forms.layers == 1 else lax.dynamic_slice_in_dim(dense, self.layer * rows, rows)

    def _all_rows(self, w: Sparse24, x: Array, count: int, **options: Any) -> Array:
        ids = self.among_layers(jnp.arange(count, dtype=jnp.int32)[None], w.shape[0])
        block = -(-x.shape[0] // _BLOCK) * _BLOCK
        contiguous = count if self.forms.layers * count == w.shape[0] else 1  # else layers are padded
        options |= dict(contiguous=contiguous, implementation=self.implementation)
        return ops.sampled_matmul_24(w, x, ids, block, **options)


def check_layers(w: Array, *of_state: Array) -> None:
    if w.ndim != 3 or any(array.shape[:1] != w.shape[:1] for array in of_state):
        raise ValueError(f"weights {[*w.shape]} must be [L, F, D], those of all layers; the state has an axis L, too")


def dense_forms(w: Array, dtype: DTypeLike) -> WeightForms:
    """Brings weights [L, F, D] to a dtype, dense."""
    check_layers(w)
    return WeightForms(None, None, w.reshape(-1, w.shape[-1]).astype(dtype), None, *w.shape)


@jax.named_call
def soft_threshold_forms(
    w: Array, scale: Array, dtype: DTypeLike, implementation: str | None, *, axis: int = -1
) -> WeightForms:
    """Sparsifies weights [L, F, D] to 2:4 by soft threshold with each layer's scale f32[L] (2409.09099).

    Groups of four run along D, or, for axis 0, along F: the dense form is then the transpose.
    """
    check_layers(w, scale)
    if axis == -1:
        rows = w.reshape(-1, w.shape[-1])
        along_model, dense = ops.soft_threshold_24(rows, scale, dtype=dtype, implementation=implementation)
        return WeightForms(along_model, None, dense, None, *w.shape)

    def along_neurons(layer: tuple[Array, Array]) -> tuple[Sparse24, Array]:
        w, scale = layer
        return ops.soft_threshold_24(w, scale[None], 0, dtype=dtype, implementation=implementation)

    by_layer, dense = lax.map(along_neurons, (w, scale))
    return WeightForms(None, stack_layers(by_layer), None, dense.reshape(-1, w.shape[1]), *w.shape)


def stack_layers(by_layer: Sparse24) -> Sparse24:
    """Turns Sparse24 with a leading axis L into one matrix of the layers one under the other, each in whole tiles."""
    values = by_layer.values.reshape(-1, by_layer.values.shape[-1])
    metadata = by_layer.metadata.reshape(-1, *by_layer.metadata.shape[2:])
    return Sparse24(values, metadata, (values.shape[0], by_layer.shape[1]))
