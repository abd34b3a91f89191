"""The squared-ReLU FFN as six matrix products, each dense or with one sparse operand.

    H = X W1^T    Y = relu(H)^2    O = Y W2             (forward)
    dY = dO W2^T  dH = 2 relu(H) dY  dX = dH W1         (backward)
    dW1 = dH^T X  dW2 = Y^T dO

A `GemmPlan` says which operand of each product is sparse. The six functions `up`, `down`,
`grad_hidden`, `grad_input`, `grad_up` and `grad_down` below are the products; `feed_forward` strings
them together with a hand-written VJP. Only Y is saved of the hidden layer, in its sparse form:
2 relu(H) = 2 sqrt(Y).

With the `venom` recipe a row's hidden vector is *condensed*, [T, 4F/m]: the kept columns of its
block only. Rows of X are then permuted by cluster on the way in, and the products that give O and dX put
theirs back.

Bytes that move around the products of one sparse FFN on Hopper, where the pattern is known first and in runs of
neurons, with T tokens, S = 4F/m kept neurons, bf16; experiments/README.md has the measured times:

    permute X and dO                        4 T D each, half of it written
    Y, 2:4, by the up product itself        1.125 T S written
    dH and the transposes of dH and Y       3.125 T S read, 3.25 T S written, drawn or not

O and dX need no pass: the Venom products store rows in the order of the tokens. (Other backends permute them, 4 T D
each.) Of neurons that are chosen one by one the transposes have all F rows, 2.25 T F written; and by magnitude the up
product writes all of Y, 2 T F, of which selection reads 2 T S.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from sparse_lm import collectives, ops
from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.ops import routing, row_order
from sparse_lm.ops.ffn_weights import NO_VARIABLES, FfnVariables, FfnWeights, gather_layer, prepare_weights
from sparse_lm.ops.formats import HiddenGradients, HiddenStats, Sparse24, SparseVenom
from sparse_lm.ops.plan import DENSE, DH_MVUE, DO_MVUE, W1_24, W2_24, Y_24, GemmPlan

DENSE_FEATURES_MULTIPLE = 128  # dense features are counted in whole tensor-core tiles (2503.16672)
RESIDUALS = "ffn_residuals"  # what rematerialisation policies call what the backward pass needs of the hidden layer

_BLOCK = 768  # tokens: a multiple of every kernel's tile, for products that all tokens share

Hidden = Array | Sparse24 | SparseVenom
"""A hidden-layer tensor (Y or dH): [T, F] dense, 2:4 along F, or Venom along F."""


@jax.named_call
def feed_forward(
    x: Array,
    w1: Array,
    w2: Array,
    variables: FfnVariables = NO_VARIABLES,
    key: Array | None = None,
    order: Array | None = None,
    weights: FfnWeights | None = None,
    layer: Array | int = 0,
    *,
    plan: GemmPlan = DENSE,
    implementation: str | None = None,
    axes: Axes = ONE_DEVICE,
) -> tuple[Array, dict[str, Array]]:
    """relu(x W1^T)^2 W2, its products computed as `plan` says (2602.06183, section 3).

    On a mesh, under `shard_map`, x holds this shard's tokens, which all devices along `tensor` have, and
    the weights and masks are this device's rows. Tokens are routed, and share columns, within their shard;
    so do neurons along `tensor`. Weights travel in the forms that the products read.

    Args:
      x: [T, D] in the computation's dtype.
      w1: [F, D] up projection, a neuron a row; any float dtype.
      w2: [F, D] down projection, a neuron a row.
      variables: what the plan's recipe reads besides the weights.
      key: random key; the backward of "mvue" needs one.
      order: int32[T], a permutation: the order in which the tokens of a cluster are taken, or all tokens
        with `shuffle_tokens`. Random in training; their own order by default.
      weights: `prepare_weights` of the weights of all layers, in the dtype of x; made here of w1 and w2 by default.
      layer: number of this FFN among them.
      plan: the six products.
      implementation: "reference", "hopper" or "triton": that one or an error; None: the best.
      axes: of the mesh.

    Returns:
      o: [T, D] in the dtype of x. Gradients of w1 and w2 come in their own dtypes.
      stats: "activation_sparsity" f32[], share of zeros in Y before selection; "kept_energy" f32[],
        share of the sum of Y^2 that selection keeps; "expert_load" f32[clusters], share of the
        tokens in each cluster, if the plan routes; "clusters", `routing.ClusterSums`, if the plan
        measures them. They pass no gradient. With a pattern known first, the first two speak
        of the computed neurons.

    Raises:
      ValueError: the plan reads variables that are not given; in the backward, it draws at random and there is no key.
      NotImplementedError: `implementation` cannot compute one of the products.
    """
    _check_given(variables, plan, prepared=weights is not None)
    layer = jnp.asarray(layer, jnp.int32)
    return _feed_forward(plan, implementation, axes, x, w1, w2, variables, key, order, weights, layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _feed_forward(plan, implementation, axes, x, w1, w2, variables, key, order, weights, layer):
    return _forward(plan, implementation, axes, x, w1, w2, variables, key, order, weights, layer)[0]


class _Saved(NamedTuple):
    """Residuals of the backward pass."""

    x: Array  # [T, D], as it came: permuted again rather than saved twice
    y: Hidden
    rows: routing.Rows | None
    w1: Array
    w2: Array
    variables: FfnVariables
    key: Array | None
    weights: FfnWeights | None
    layer: Array


def _forward(plan, implementation, axes, x, w1, w2, variables, key, order, weights, layer):
    shared = _Shared(
        plan, implementation, *_resolve(weights, layer, w1, w2, variables, plan, x.dtype, implementation, axes)
    )
    rows, load = arrange_rows(x, variables, order, plan)
    if plan.pattern_known_first:
        y, seen = up_listed(_permute(x, rows), listed_neurons(variables, rows, x.shape[0], shared), shared)
    else:
        y, seen = up_activated(_permute(x, rows), shared)
    o = collectives.sum_over_tensor(down(y, rows, shared), axes)
    computed = 4 * shared.neurons // plan.m if plan.pattern_known_first else shared.neurons
    stats = {
        "activation_sparsity": 1 - seen.nonzeros / float(x.shape[0] * computed),  # padded rows are all zero
        "kept_energy": seen.kept_energy / jnp.maximum(seen.energy, jnp.finfo(jnp.float32).tiny),
    }
    if load is not None:
        stats["expert_load"] = load
    if plan.measure:
        stats["clusters"] = measure_clusters(x, y, variables, shared)
    y, rows = jax.tree.map(lambda a: checkpoint_name(a, RESIDUALS), (y, rows))
    return (o, stats), _Saved(x, y, rows, w1, w2, variables, key, weights, layer)


def _backward(plan, implementation, axes, saved, cotangents):
    do, _ = cotangents
    x, y, rows, w1, w2, variables, key, weights, layer = saved
    shared = _Shared(
        plan, implementation, *_resolve(weights, layer, w1, w2, variables, plan, x.dtype, implementation, axes)
    )
    key = collectives.fold_index(key, axes.tensor)
    x, do = _permute(x, rows), _permute(do, rows)
    gradients = hidden_gradients(grad_hidden(do, y, shared), y, _subkey(key, 3), shared)
    dx = collectives.sum_over_tensor(grad_input(gradients.dh, rows, shared), axes)
    busy = busiest_features(y, plan.dense_features)
    dw1 = grad_up(gradients, x, busy, _subkey(key, 1), shared, w1.dtype)
    dw2 = grad_down(gradients, y, do, busy, _subkey(key, 2), shared, w2.dtype)
    dw1, dw2 = (collectives.sum_gradient(dw, axes) for dw in (dw1, dw2))
    return dx, dw1, dw2, None, None, None, None, None


_feed_forward.defvjp(_forward, _backward)


def _check_given(variables: FfnVariables, plan: GemmPlan, *, prepared: bool) -> None:
    """Raises ValueError for a variable that the plan reads and that is not there."""
    of_weights = {"soft_threshold": ("scale_up", "scale_down"), "transposable": ("mask_up", "mask_down")}
    read = {
        "centroids": plan.routed,
        "columns": plan.pattern_known_first,
        **dict.fromkeys(of_weights.get(plan.weights, ()), not prepared),
    }
    for name, is_read in read.items():
        if is_read and getattr(variables, name) is None:
            raise ValueError(f"the plan reads variables.{name}: see ffn_weights.init_variables")


class _Shared(NamedTuple):
    """What all six products of one FFN share."""

    plan: GemmPlan
    implementation: str | None
    weights: FfnWeights
    layer: Array

    @property
    def neurons(self) -> int:
        return self.weights.neurons


def _resolve(weights, layer, w1, w2, variables, plan, dtype, implementation, axes) -> tuple[FfnWeights, Array]:
    """The prepared weights, and the number of the layer in them.

    What is made or gathered here is made or gathered again in the backward pass rather than saved.
    """
    if weights is None:
        one_layer = jax.tree.map(lambda a: a[None], (w1, w2, variables))
        weights = prepare_weights(*one_layer, plan=plan, dtype=dtype, implementation=implementation)
        layer = jnp.int32(0)
    return (gather_layer(weights, layer, axes.fsdp), jnp.int32(0)) if axes.fsdp else (weights, layer)


# The six products.


@jax.named_call
def up(x: Array, shared: _Shared) -> Array:
    """H = X W1^T: [T, F]."""
    forms = shared.weights.up
    if shared.plan.up != W1_24:
        return x @ _of_layer(forms.dense, shared).T
    return _all_rows(forms.along_model, x, shared.neurons, shared)


@jax.named_call
def up_listed(x: Array, columns: Array, shared: _Shared) -> tuple[SparseVenom, HiddenStats]:
    """Y = relu(X W1^T)^2 at the columns that each block lists, as the down product reads it, and what selection saw."""
    plan, w, columns_run = shared.plan, shared.weights.up.along_model, shared.plan.run_length(shared.neurons)
    listed = _among_layers(w, columns, shared)
    y, seen = ops.sampled_squared_relu_24(
        w, x, listed, plan.v, contiguous=columns_run, implementation=shared.implementation
    )
    return ops.to_venom(y, columns, shared.neurons, plan.v, plan.m, columns_run), seen


@jax.named_call
def down(y: Hidden, rows: routing.Rows | None, shared: _Shared) -> Array:
    """O = Y W2: [T, D], in the order of the tokens."""
    forms = shared.weights.down
    if shared.plan.down == W2_24:
        return _unpermute(_all_rows(forms.along_neurons, y, shared.weights.dim, shared), rows)
    return _hidden_matmul(y, forms.dense, rows, shared)


@jax.named_call
def grad_hidden(do: Array, y: Hidden, shared: _Shared) -> Array:
    """dY = dO W2^T: [T, F], or condensed like Y, whose dropped neurons need none."""
    forms = shared.weights.down
    if shared.plan.grad_hidden != W2_24:
        return do @ _of_layer(forms.dense, shared).T
    if isinstance(y, SparseVenom):
        return _listed_rows(forms.along_model, do, y.kept_columns(), y.v, y.contiguous, shared)
    return _all_rows(forms.along_model, do, shared.neurons, shared)


@jax.named_call
def grad_input(dh: Hidden, rows: routing.Rows | None, shared: _Shared) -> Array:
    """dX = dH W1: [T, D], in the order of the tokens."""
    forms = shared.weights.up
    if shared.plan.grad_input == W1_24:
        return _unpermute(_all_rows(forms.along_neurons, dh, shared.weights.dim, shared), rows)
    return _hidden_matmul(dh, forms.dense, rows, shared)


@jax.named_call
def grad_up(gradients: HiddenGradients, x: Array, busy, key, shared: _Shared, dtype: DTypeLike) -> Array:
    """dW1 = dH^T X: [F, D]; the neurons `busy` are computed densely."""
    dh, dh_t = gradients.dh, gradients.dh_t
    if shared.plan.grad_up is None:
        return jnp.matmul(_dense(dh).T, x, preferred_element_type=dtype)
    if shared.plan.grad_up == DH_MVUE and dh_t is None:
        dh_t = ops.sparsify_24(_dense(dh), "mvue", 0, key=key, implementation=shared.implementation)
    return _weight_gradient(dh_t, dh, x, busy, shared, dtype)


@jax.named_call
def grad_down(gradients: HiddenGradients, y: Hidden, do: Array, busy, key, shared: _Shared, dtype: DTypeLike) -> Array:
    """dW2 = Y^T dO: [F, D]; the neurons `busy` are computed densely."""
    if shared.plan.grad_down is None:
        return jnp.matmul(_dense(y).T, do, preferred_element_type=dtype)
    if shared.plan.grad_down == DO_MVUE:  # the sparse operand comes first: dW2^T = dO^T Y
        do_t = ops.sparsify_24(do, "mvue", 0, key=key, implementation=shared.implementation)
        return ops.matmul_24(
            do_t, _dense(y), out_transposed=True, out_dtype=dtype, implementation=shared.implementation
        )
    return _weight_gradient(gradients.y_t, y, do, busy, shared, dtype)


# Between the products.


@jax.named_call
def arrange_rows(
    x: Array, variables: FfnVariables, order: Array | None, plan: GemmPlan
) -> tuple[routing.Rows | None, Array | None]:
    """The order in which the FFN takes its tokens, and the load of each cluster; None where nothing moves."""
    if plan.shuffle_tokens and order is not None:
        return routing.shuffle_rows(order), None
    if not plan.routed:
        return None, None
    clusters = routing.assign_tokens(x, variables.centroids, plan.distance)
    load = routing.expert_load(clusters, plan.clusters)
    if plan.pattern_known_first:
        return routing.group_rows(clusters, plan.clusters, plan.v, order), load
    # Shuffled within a cluster: a block that held consecutive tokens would leak the future.
    return routing.sort_rows(clusters, plan.clusters, order), load


def listed_neurons(variables: FfnVariables, rows: routing.Rows, tokens: int, shared: _Shared) -> Array:
    """int32 [Tp / v, 4F/m]: the neurons of each block of slots.

    Where they come in runs, a block without tokens lists F throughout, no neuron, and products skip it.
    """
    columns = variables.columns[rows.block_clusters]
    if shared.plan.run_length(shared.neurons) == 1:
        return columns
    has_token = rows.slots[:: shared.plan.v, None] < tokens  # a block is filled from its first slot on
    return jnp.where(has_token, columns, shared.neurons)


@jax.named_call
def up_activated(x: Array, shared: _Shared) -> tuple[Hidden, HiddenStats]:
    """The part of Y = relu(X W1^T)^2 that the down product reads, and what its selection saw."""
    plan, w = shared.plan, shared.weights.up.along_model
    if not plan.venom or plan.up != W1_24:
        return activate(up(x, shared), shared)
    listed, block, columns_run = _all_listed(w, x, shared.neurons, shared)
    options = dict(contiguous=columns_run, columns=plan.columns, implementation=shared.implementation)
    return ops.sampled_squared_relu_venom(w, x, listed, block, plan.v, plan.m, **options)


@jax.named_call
def activate(h: Array, shared: _Shared) -> tuple[Hidden, HiddenStats]:
    """The part of Y = relu(H)^2 that the down product reads, and what its selection saw."""
    plan, implementation = shared.plan, shared.implementation
    if plan.venom:
        return ops.squared_relu_venom(h, plan.v, plan.m, columns=plan.columns, implementation=implementation)
    if plan.down == Y_24:
        return ops.squared_relu_24(h, implementation=implementation)
    y = jnp.square(jax.nn.relu(h))
    energy = jnp.sum(jnp.square(y.astype(jnp.float32)))
    return y, HiddenStats(jnp.sum(y != 0, dtype=jnp.float32), energy, energy)


@jax.named_call
def measure_clusters(x: Array, y: Hidden, variables: FfnVariables, shared: _Shared) -> routing.ClusterSums:
    """Sums over each cluster's tokens, x [T, D] in their own order, and if need be over their activations."""
    plan, y_all = shared.plan, None
    if plan.measure == "energy":  # of all neurons, which a sparse Y has not
        y_all = y if plan.down is None else jnp.square(jax.nn.relu(up(x, shared)))
    return routing.cluster_sums(x, y_all, variables.centroids, plan.distance)


@jax.named_call
def hidden_gradients(dy: Array, y: Hidden, key: Array | None, shared: _Shared) -> HiddenGradients:
    """dH where Y is stored, and the transposes that the weight gradients read, drawn with the key if the plan says so.

    Those of neurons that come in runs stay condensed, for a product that knows where they belong. Of a
    dense Y they are None: few plans read them.
    """
    if shared.plan.draws_hidden and key is None:
        raise ValueError(f"grad_down = {shared.plan.grad_down} draws at random: key must be given")
    options = dict(key=key if shared.plan.draws_hidden else None, implementation=shared.implementation)
    if isinstance(y, SparseVenom) and y.contiguous > 1:
        condensed = Sparse24(y.values, y.metadata, dy.shape)
        dh, dh_t, y_t = ops.squared_relu_gradients(dy, condensed, **options)
        return HiddenGradients(dataclasses.replace(y, values=dh.values), dh_t, y_t)
    if isinstance(y, Sparse24 | SparseVenom):
        return ops.squared_relu_gradients(dy, y, **options)
    return HiddenGradients(dy * 2 * jnp.sqrt(y), None, None)


@jax.named_call
def busiest_features(y: Hidden, share: float) -> Array | None:
    """int32[n]: the `share` of neurons with the most non-zeros, n rounded up to 128; None for no neurons."""
    neurons = y.shape[1]
    multiple = min(DENSE_FEATURES_MULTIPLE, neurons)
    count = min(neurons, -(-round(neurons * share) // multiple) * multiple)
    if count == 0:
        return None
    return lax.top_k(jnp.sum(_dense(y) != 0, axis=0), count)[1]


# Forms of the products, by what is sparse.


def _all_rows(w: Sparse24, x: Array, count: int, shared: _Shared) -> Array:
    """x times the transpose of this layer's `count` rows of w: [T, count]."""
    listed, block, columns_run = _all_listed(w, x, count, shared)
    return ops.sampled_matmul_24(w, x, listed, block, contiguous=columns_run, implementation=shared.implementation)


def _all_listed(w: Sparse24, x: Array, count: int, shared: _Shared) -> tuple[Array, int, int]:
    """This layer's `count` rows of w, listed for one block of all tokens; the block's tokens; and how long runs are."""
    columns = jnp.arange(count, dtype=jnp.int32)[None]
    block = -(-x.shape[0] // _BLOCK) * _BLOCK
    contiguous = shared.weights.layers * count == w.shape[0]  # no padding between layers
    return _among_layers(w, columns, shared), block, count if contiguous else 1


def _listed_rows(w: Sparse24, x: Array, columns: Array, v: int, columns_run: int, shared: _Shared) -> Array:
    """x times the transpose of those of this layer's rows of w that each block of v tokens lists."""
    columns = _among_layers(w, columns, shared)
    return ops.sampled_matmul_24(w, x, columns, v, contiguous=columns_run, implementation=shared.implementation)


def _among_layers(w: Sparse24, rows: Array, shared: _Shared) -> Array:
    """This layer's rows, by their numbers in w, which has those of all layers; one past the end stays that."""
    count = w.shape[0] // shared.weights.layers
    return jnp.where(rows == count, w.shape[0], rows + shared.layer * count)


def _hidden_matmul(hidden: Hidden, w: Array, rows: routing.Rows | None, shared: _Shared) -> Array:
    """hidden times this layer's [F, D] of w, in the order of the tokens."""
    match hidden:
        case SparseVenom():
            columns = jnp.where(
                hidden.columns == shared.neurons, w.shape[0], hidden.columns + shared.layer * shared.neurons
            )
            of_all_layers = dataclasses.replace(hidden, columns=columns, shape=(hidden.shape[0], w.shape[0]))
            return ops.matmul_venom(of_all_layers, w, rows=rows, implementation=shared.implementation)
        case Sparse24():
            return _unpermute(ops.matmul_24(hidden, _of_layer(w, shared), implementation=shared.implementation), rows)
        case _:
            return _unpermute(hidden @ _of_layer(w, shared), rows)


def _weight_gradient(a_t: Sparse24 | None, a: Hidden, b: Array, busy, shared: _Shared, dtype: DTypeLike) -> Array:
    """a^T b: [F, D], from the 2:4 form of a^T, but for its rows `busy`."""
    options = dict(out_dtype=dtype, implementation=shared.implementation)
    if isinstance(a, SparseVenom) and a.contiguous > 1:
        return ops.scattered_matmul_24(
            a_t, b, a.kept_columns(), a.v, shared.neurons, contiguous=a.contiguous, **options
        )
    if a_t is None:
        a_t = ops.sparsify_24(a, "magnitude", 0, implementation=shared.implementation)
    product = ops.matmul_24(a_t, b, **options)
    if busy is None:
        return product
    columns = a.take(busy) if isinstance(a, Sparse24) else _dense(a)[:, busy]
    return product.at[busy].set(jnp.matmul(columns.T, b, preferred_element_type=dtype))


# Small pieces.


def _of_layer(w: Array, shared: _Shared) -> Array:
    """[F, D] of [L F, D]."""
    return (
        w if shared.weights.layers == 1 else lax.dynamic_slice_in_dim(w, shared.layer * shared.neurons, shared.neurons)
    )


def _dense(hidden: Hidden) -> Array:
    return hidden if isinstance(hidden, Array) else hidden.to_dense()


@jax.named_call
def _permute(x: Array, rows: routing.Rows | None) -> Array:
    return x if rows is None else row_order.dispatch(x, rows)


@jax.named_call
def _unpermute(x: Array, rows: routing.Rows | None) -> Array:
    return x if rows is None else row_order.combine(x, rows)


def _subkey(key: Array | None, use: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, use)
