"""The `slices` recipe: all six products sparse, at neurons that are known before the up product (after 2602.06183).

Each token goes to its nearest of E = m / 4 centroids, which k-means places among the FFN's inputs. Neurons are sorted
once by the expert whose tokens use them most, so that an expert's S = F / E neurons are contiguous. A token computes
its expert's slice and nothing else, 2:4 inside it: V:2:M activations whose V rows are the expert's tokens, decided from
each token alone, hence causal. All six products shrink to 1 / E, and then by 2:4.

Weights are 2:4 by soft threshold (2409.09099). The weight gradients are stochastic (2203.10991). Every
`sparsity.refresh_every` steps a centroid moves to the mean direction of the tokens nearest to it. As the phase is left,
the neurons of each expert are turned away from the tokens of the others, which meet them from then on.

    up           Y   = relu(X W1[slice]^T)^2    W1 2:4 along D
    down         O   = Y W2[slice]              Y 2:4 along S
    grad_hidden  dY  = dO W2[slice]^T           W2 2:4 along D
    grad_input   dX  = dH W1[slice]             dH 2:4 along S, where Y is
    grad_up      dW1[slice] += dH^T X           dH^T 2:4 along T, stochastic
    grad_down    dW2[slice] += Y^T dO           Y^T 2:4 along T, stochastic

Bytes that move around the products on Hopper, bf16: dispatching X and dO moves 4 T D each; one pass reads H, 2 T S, and
writes Y, 1.125 T S; another reads 3.125 T S and writes dH and both transposes, 3.25 T S, and sums that only `experts24`
needs, 0.06 T S. O and dX are combined as the products store them.

With the gate relu(G)^2, `gated_relu2`, Y = relu(G)^2 U is as sparse, and all nine products are 2:4: `up`, `grad_input`
and `grad_up` are two each, computed as one. W1 [2 F, D] has a neuron's gate and its own row by turns, and so has
H [Tp, 2 S] its numbers G and U. By turns a kept neuron's two numbers would be two of four, and two such neurons four:
hence `grad_input` reads dH, and the layer's W1, with all gates first. H is saved whole, as dense gates save it. Gates
that leave no zeros are for `dense_slices`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops.activations import SQUARED_RELU
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.row_order import dispatch
from sparse_lm.recipes import routing
from sparse_lm.recipes.base import FfnCall, InSlots, Rule, Shape, Stats, hidden_stats
from sparse_lm.recipes.dense_slices import DenseSlices
from sparse_lm.recipes.groups import fitting_block, group_by_expert
from sparse_lm.recipes.soft_threshold import Scales, SoftThreshold24, soft_threshold


class RoutedState(NamedTuple):
    scale_up: Array  # f32[], beta of W1
    scale_down: Array  # f32[], beta of W2
    centroids: Array  # f32[E, D], of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices(SoftThreshold24, DenseSlices):
    """Trains each token with one of m / 4 slices of the neurons, 2:4 inside: it keeps 2 of the 4 in every m.

    Experts, knobs and `refresh` are those of `DenseSlices`.
    """

    name = "slices"
    products: ClassVar = {
        "up": "W1 2:4, at the expert's neurons",
        "down": "Y V:2:M",
        "grad_hidden": "W2 2:4, at the expert's neurons",
        "grad_input": "dH V:2:M",
        "grad_up": "dH 2:4, stochastic, at the expert's neurons",
        "grad_down": "Y 2:4, stochastic, at the expert's neurons",
    }
    State = RoutedState
    computes = (SQUARED_RELU, "gated_relu2")
    stochastic = True
    leave_reads_inputs = True

    def rules(self, shape: Shape) -> Iterator[Rule]:
        yield from block_rules(self.v, shape)
        yield from super().rules(shape)

    def work(self) -> dict[str, float]:
        return {product: 0.5 / self.experts for product in self.products}

    def init_state(self, w1: Array, w2: Array) -> RoutedState:
        scales: Scales = super().init_state(w1, w2)
        return RoutedState(*scales, jnp.full((self.experts, w1.shape[1]), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[RoutedState, Array]:
        self.check(w1, w2, x)
        scales = self.fit_scales(w1, w2)
        state, order = DenseSlices.enter(self, scales.scale_up * soft_threshold(w1), w2, x)
        return RoutedState(*scales, state.centroids), order

    def leave(self, w1: Array, w2: Array, state: RoutedState, x: Array | None = None) -> tuple[Array, Array]:
        """Returns the weights that the sparse forward used, with neurons turned away from tokens of other experts.

        A row of W1 (with a gate, the gate's) gets a vector that takes, on average, one standard deviation off its
        products with others' tokens in x, and nothing off those with its own, where tokens cluster. The soft threshold,
        which comes after, leaves about 0.7 of that. Without x it gets none, nor once it has been left: W1 is 2:4
        already, with a scale of 1.
        """
        self.check_entered(w1, w2, state, x)
        if x is not None:
            x = routing.tokens_of(x, "leave(w1, w2, state, x)")
            rows = w1.reshape(w2.shape[0], -1, w1.shape[1])
            deviation = jnp.sqrt(jnp.mean(jnp.square(rows[:, 0])))  # of a product, for |x| = 1
            left = (state.scale_up == 1) & jnp.all(jnp.sum(w1.reshape(-1, 4) != 0, axis=1) <= 2)
            away = jnp.where(left, 0, deviation) * routing.away_from_others(x, state.centroids)
            part = jnp.repeat(away, w2.shape[0] // self.experts // self.shards, axis=0)
            w1 = rows.at[:, 0].add(jnp.tile(part, (self.shards, 1)).astype(w1.dtype)).reshape(w1.shape)
        return super().leave(w1, w2, state)

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        tokens, experts = x.shape[0], routing.assign_tokens(x, ffn.state.centroids)
        # Training has no fewer tokens than a block (`rules`); generation has one.
        v = self.v if tokens >= self.v else fitting_block(self.v, tokens, self.experts)
        groups = group_by_expert(experts[:, None], self.experts, v, ffn.order)
        x = dispatch(x, groups.rows)
        o, stats, hidden = forward_experts(x, ffn._replace(groups=groups), self.parts(ffn.axes))
        return o, stats | {"expert_load": routing.expert_load(experts, self.experts)}, InSlots(x, (hidden, groups))

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        hidden, groups = saved
        dx, dw1, dw2, _ = backward_experts(x, hidden, dispatch(do, groups.rows), ffn._replace(groups=groups))
        return dx, dw1, dw2


Hidden = tuple[SparseVenom, Array | None]
"""The hidden layer in slots: Y as the down product reads it, and with a gate H [Tp, 2 S]."""


def forward_experts(x: Array, ffn: FfnCall, parts: int = 1) -> tuple[Array, Stats, Hidden]:
    """Computes O [T, D] of x [Tp, D] in the slots of the call's groups, statistics, and the hidden layer.

    Neurons are sorted in equal parts, one a device, each of which has a contiguous part of every expert's. A block
    without tokens lists F throughout, no neuron, and products skip it.
    """
    groups, neurons = ffn.groups, ffn.w2.neurons
    v, contiguous = groups.v, neurons // groups.experts // parts
    starts = jnp.arange(0, neurons, neurons // parts, dtype=jnp.int32)  # of the first expert's part in each
    of_first = starts[:, None] + jnp.arange(contiguous, dtype=jnp.int32)
    neuron_ids = groups.block_experts[:, None] * contiguous + of_first.reshape(-1)
    neuron_ids = jnp.where(groups.blocks_with_pairs()[:, None], neuron_ids, neurons)
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    up = ffn.w1.forms.along_model, x, ffn.w1.among_layers(_rows_of_w1(neuron_ids, ffn)), v
    rows_of_neuron = ffn.w1.neurons // neurons
    with jax.named_scope("up"):
        h = ops.sampled_matmul_24(*up, contiguous=rows_of_neuron * contiguous, **options)
    if rows_of_neuron > 1:
        condensed, seen = ops.gated_squared_relu_24(h, **options)
    else:
        (condensed, seen), h = ops.squared_relu_24(h, **options), None
    y = ops.to_venom(condensed, neuron_ids, neurons, v, 4 * neurons // neuron_ids.shape[1], contiguous)
    with jax.named_scope("down"):
        o = ffn.w2.over_kept(y, groups.rows)
    return o, hidden_stats(groups.total(seen), groups.pairs, neuron_ids.shape[1]), (y, h)


def backward_experts(x: Array, hidden: Hidden, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array, Array]:
    """Computes dX [T, D], dW1 and dW2 [F, D], and each slot's sum of Y dY, f32[Tp], of x and dO [Tp, D] in slots."""
    (y, h), rows, neurons = hidden, ffn.groups.rows, ffn.w2.neurons
    options: dict[str, Any] = dict(implementation=ffn.implementation)
    into: dict[str, Any] = dict(out_dtype=ffn.gradient_dtype, **options)
    neuron_ids = y.kept_columns()
    with jax.named_scope("grad_hidden"):
        dy = ffn.w2.at_neurons(do, neuron_ids, y.v, y.contiguous)
    condensed = Sparse24(y.values, y.metadata, dy.shape)
    if h is None:
        gradients = ops.squared_relu_gradients(dy, condensed, key=ffn.subkey(3), **options)
        dh = dataclasses.replace(y, values=gradients.dh.values)
        with jax.named_scope("grad_input"):
            dx = ffn.w1.over_kept(dh, rows)
    else:
        gradients = ops.gated_squared_relu_gradients(dy, h, condensed, key=ffn.subkey(3), **options)
        halves = [jnp.where(neuron_ids == neurons, 2 * neurons, neuron_ids + first) for first in (0, neurons)]
        dh = ops.to_venom(gradients.dh, jnp.concatenate(halves, axis=1), 2 * neurons, y.v, y.m, y.contiguous)
        gates_first = jnp.concatenate([ffn.w1.dense[::2], ffn.w1.dense[1::2]])
        with jax.named_scope("grad_input"):
            dx = ops.matmul_venom(dh, gates_first, rows=rows, **options)
    with jax.named_scope("grad_up"):
        contiguous = ffn.w1.neurons // neurons * y.contiguous
        w1_rows = _rows_of_w1(neuron_ids, ffn)
        dw1 = ops.scattered_matmul_24(gradients.dh_t, x, w1_rows, y.v, ffn.w1.neurons, contiguous=contiguous, **into)
    with jax.named_scope("grad_down"):
        dw2 = ops.scattered_matmul_24(gradients.y_t, do, neuron_ids, y.v, neurons, contiguous=y.contiguous, **into)
    return dx, dw1, dw2, gradients.y_dy


def _rows_of_w1(neuron_ids: Array, ffn: FfnCall) -> Array:
    """Lists the rows of W1 of each block's neurons: with a gate two by turns, [blocks, 2 S]; 2 F for no neuron."""
    if ffn.w1.neurons == ffn.w2.neurons:
        return neuron_ids
    pairs = 2 * neuron_ids[..., None] + jnp.arange(2, dtype=jnp.int32)
    return jnp.minimum(pairs, ffn.w1.neurons).reshape(neuron_ids.shape[0], -1)


def rule_of_v(v: int) -> Rule:
    """Returns what a number of tokens of a block must fulfil for kernels."""
    return "v", v >= 4 and (64 % v == 0 or v % 64 == 0), "must be 4 or more, and divide 64 or be a multiple of it"


def block_rules(v: int, shape: Shape) -> Iterator[Rule]:
    """Yields what v tokens of a block must fulfil for kernels, in training."""
    yield rule_of_v(v)
    allowed = f"must be at most the {shape.tokens} tokens of a microbatch on one device"
    yield "v", not shape.tokens or v <= shape.tokens, allowed
