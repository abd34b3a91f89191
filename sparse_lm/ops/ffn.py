"""The squared-ReLU FFN as six matrix products, each dense or with one sparse operand.

    H = X W1^T    Y = relu(H)^2    O = Y W2             (forward)
    dY = dO W2^T  dH = 2 relu(H) dY  dX = dH W1         (backward)
    dW1 = dH^T X  dW2 = Y^T dO

A `GemmPlan` says which operand of each product is sparse. The six functions `up`, `down`,
`grad_hidden`, `grad_input`, `grad_up` and `grad_down` below are the products; `feed_forward` strings
them together with a hand-written VJP. Only Y is saved of the hidden layer, in its sparse form:
2 relu(H) = 2 sqrt(Y).

With the `venom` recipe a row's hidden vector is *condensed*, [T, 4F/m]: the kept columns of its
block only. Rows of X are then permuted by cluster on the way in and back on the way out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm import ops
from sparse_lm.ops import routing
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.plan import DENSE, DH_MVUE, DO_MVUE, W1_24, W2_24, Y_24, GemmPlan

DENSE_FEATURES_MULTIPLE = 128  # dense features are counted in whole tensor-core tiles (2503.16672)

Hidden = Array | Sparse24 | SparseVenom
"""A hidden-layer tensor (Y or dH): [T, F] dense, 2:4 along F, or Venom along F."""


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
      columns: int32[clusters, 4F/m], the neurons of each cluster, ascending.
    """

    scale_up: Array | None = None
    scale_down: Array | None = None
    mask_up: Array | None = None
    mask_down: Array | None = None
    centroids: Array | None = None
    columns: Array | None = None


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


def feed_forward(
    x: Array,
    w1: Array,
    w2: Array,
    variables: FfnVariables = FfnVariables(),
    key: Array | None = None,
    *,
    plan: GemmPlan = DENSE,
    implementation: str | None = None,
) -> tuple[Array, dict[str, Array]]:
    """relu(x W1^T)^2 W2, its products computed as `plan` says (2602.06183, section 3).

    Args:
      x: [T, D] in the computation's dtype.
      w1: [F, D] up projection, a neuron a row; any float dtype.
      w2: [F, D] down projection, a neuron a row.
      variables: what the plan's recipe reads besides the weights.
      key: random key. Without one the forward keeps rows of a cluster in order; `shuffle_tokens` and
        the backward of "mvue" need it.
      plan: the six products.
      implementation: "reference", "hopper" or "triton": that one or an error; None: the best.

    Returns:
      o: [T, D] in the dtype of x. Gradients of w1 and w2 come in their own dtypes.
      stats: "activation_sparsity" f32[], share of zeros in Y before selection; "kept_energy" f32[],
        share of the sum of Y^2 that selection keeps; "expert_load" f32[clusters], share of the
        tokens in each cluster, if the plan routes; "cluster_energy" f32[clusters, F], sum of Y^2, if
        the plan measures it. They pass no gradient. With a pattern known first, the first two speak
        of the computed neurons.

    Raises:
      NotImplementedError: `implementation` cannot compute one of the products.
    """
    return _feed_forward(plan, implementation, x, w1, w2, variables, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(plan, implementation, x, w1, w2, variables, key):
    return _forward(plan, implementation, x, w1, w2, variables, key)[0]


class _Saved(NamedTuple):
    """Residuals of the backward pass."""

    x: Array  # [T, D], as it came: permuted again rather than saved twice
    y: Hidden
    rows: routing.Rows | None
    w1: Array
    w2: Array
    variables: FfnVariables
    key: Array | None


def _forward(plan, implementation, x, w1, w2, variables, key):
    run = dict(plan=plan, implementation=implementation)
    rows, load = arrange_rows(x, variables, _subkey(key, 0), plan)
    columns = variables.columns[rows.block_clusters] if plan.pattern_known_first else None
    h = up(_permute(x, rows), w1, variables, columns, **run)
    y_all = jnp.square(jax.nn.relu(h))
    y = select(y_all, columns, neurons=w1.shape[0], **run)
    o = _unpermute(down(y, w2, variables, **run), rows)
    stats = {
        "activation_sparsity": _real_zeros(y_all, tokens=x.shape[0]),
        "kept_energy": _energy(y) / jnp.maximum(_energy(y_all), jnp.finfo(jnp.float32).tiny),
    }
    if load is not None:
        stats["expert_load"] = load
    if plan.measure_energy:
        stats["cluster_energy"] = cluster_energy(x, y_all, variables, plan)
    return (o, stats), _Saved(x, y, rows, w1, w2, variables, key)


def _backward(plan, implementation, saved, cotangents):
    do, _ = cotangents
    x, y, rows, w1, w2, variables, key = saved
    run = dict(plan=plan, implementation=implementation)
    x, do = _permute(x, rows), _permute(do, rows)
    dh = hidden_gradient(grad_hidden(do, w2, variables, y, **run), y)
    dx = _unpermute(grad_input(dh, w1, variables, **run), rows)
    busy = busiest_features(y, plan.dense_features)
    dw1 = grad_up(dh, x, busy, _subkey(key, 1), dtype=w1.dtype, **run)
    dw2 = grad_down(y, do, busy, _subkey(key, 2), dtype=w2.dtype, **run)
    return dx, dw1, dw2, None, None


_feed_forward.defvjp(_forward, _backward)


# The six products.


def up(x, w1, variables, columns, *, plan, implementation) -> Array:
    """H = X W1^T: [T, F]; or [T, 4F/m], the listed columns of each block, if `columns` is given."""
    if plan.up != W1_24:
        return x @ _dense_weight("W1", w1, variables, plan, x.dtype).T
    w = _weight_24("W1", w1, -1, variables, plan, x.dtype, implementation)
    if columns is not None:
        return ops.sampled_matmul_24(w, x, columns, plan.v, implementation=implementation)
    return ops.matmul_24(w, x.T, implementation=implementation).T


def down(y: Hidden, w2, variables, *, plan, implementation) -> Array:
    """O = Y W2: [T, D]."""
    dtype = y.dtype
    if plan.down == W2_24:
        w = _weight_24("W2", w2, 0, variables, plan, dtype, implementation)
        return ops.matmul_24(w, y.T, implementation=implementation).T
    return _hidden_matmul(y, _dense_weight("W2", w2, variables, plan, dtype), implementation)


def grad_hidden(do, w2, variables, y: Hidden, *, plan, implementation) -> Array:
    """dY = dO W2^T: [T, F], or condensed like Y, whose dropped neurons need none."""
    if plan.grad_hidden != W2_24:
        return do @ _dense_weight("W2", w2, variables, plan, do.dtype).T
    w = _weight_24("W2", w2, -1, variables, plan, do.dtype, implementation)
    if isinstance(y, SparseVenom):
        condensed = 4 * y.shape[1] // y.m
        blocks = -(-y.shape[0] // y.v)
        columns = y.columns[:blocks, :condensed]
        return ops.sampled_matmul_24(w, do, columns, y.v, implementation=implementation)
    return ops.matmul_24(w, do.T, implementation=implementation).T


def grad_input(dh: Hidden, w1, variables, *, plan, implementation) -> Array:
    """dX = dH W1: [T, D]."""
    dtype = dh.dtype
    if plan.grad_input == W1_24:
        w = _weight_24("W1", w1, 0, variables, plan, dtype, implementation)
        return ops.matmul_24(w, dh.T, implementation=implementation).T
    return _hidden_matmul(dh, _dense_weight("W1", w1, variables, plan, dtype), implementation)


def grad_up(dh: Hidden, x, busy, key, *, dtype, plan, implementation) -> Array:
    """dW1 = dH^T X: [F, D]; the neurons `busy` are computed densely."""
    dh = _dense(dh)
    if plan.grad_up is None:
        return jnp.matmul(dh.T, x, preferred_element_type=dtype)
    method = "mvue" if plan.grad_up == DH_MVUE else "magnitude"
    return _gradient_24(dh, x, method, busy, key, dtype, implementation)


def grad_down(y: Hidden, do, busy, key, *, dtype, plan, implementation) -> Array:
    """dW2 = Y^T dO: [F, D]; the neurons `busy` are computed densely."""
    y = _dense(y)
    if plan.grad_down is None:
        return jnp.matmul(y.T, do, preferred_element_type=dtype)
    if plan.grad_down == DO_MVUE:  # the sparse operand comes first: dW2^T = dO^T Y
        return _gradient_24(do, y, "mvue", None, key, dtype, implementation).T
    return _gradient_24(y, do, "magnitude", busy, key, dtype, implementation)


# Between the products.


def arrange_rows(x, variables, key, plan) -> tuple[routing.Rows | None, Array | None]:
    """The order in which the FFN takes its tokens, and the load of each cluster; None where nothing moves."""
    if plan.shuffle_tokens:
        return routing.shuffle_rows(x.shape[0], key), None
    if not plan.routed:
        return None, None
    clusters = routing.assign_tokens(x, variables.centroids, plan.distance)
    load = routing.expert_load(clusters, plan.clusters)
    if plan.pattern_known_first:
        return routing.group_rows(clusters, plan.clusters, plan.v, key), load
    # Shuffled within a cluster: a block that held consecutive tokens would leak the future.
    return routing.sort_rows(clusters, key), load


def select(y: Array, columns: Array | None, *, neurons: int, plan, implementation) -> Hidden:
    """The part of Y that the down product reads. `columns` if the pattern was known first."""
    if plan.venom and columns is not None:
        return ops.compress_venom(y, columns, (y.shape[0], neurons), plan.v, plan.m)
    if plan.venom:
        return ops.sparsify_venom(y, plan.v, plan.m, columns=plan.columns, implementation=implementation)
    if plan.down == Y_24:
        return ops.sparsify_24(y, "magnitude", implementation=implementation)
    return y


def hidden_gradient(dy: Array, y: Hidden) -> Hidden:
    """dH = 2 relu(H) dY at the positions that Y stores."""
    if isinstance(y, Sparse24):
        dh = ops.compress_24(dy, y.mask())
    elif isinstance(y, SparseVenom):
        columns = y.columns[: -(-y.shape[0] // y.v), : dy.shape[1]]
        dh = ops.compress_venom(dy, columns, y.shape, y.v, y.m, like=y)
    else:
        return dy * 2 * jnp.sqrt(y)
    return dataclasses.replace(dh, values=dh.values * 2 * jnp.sqrt(y.values))


def busiest_features(y: Hidden, share: float) -> Array | None:
    """int32[n]: the `share` of neurons with the most non-zeros, n rounded up to 128; None for no neurons."""
    neurons = y.shape[1]
    multiple = min(DENSE_FEATURES_MULTIPLE, neurons)
    count = min(neurons, -(-round(neurons * share) // multiple) * multiple)
    if count == 0:
        return None
    return jax.lax.top_k(jnp.sum(_dense(y) != 0, axis=0), count)[1]


def cluster_energy(x: Array, y: Array, variables: FfnVariables, plan: GemmPlan) -> Array:
    """f32[clusters, F]: sum of Y^2 over each cluster's tokens."""
    clusters = routing.assign_tokens(x, variables.centroids, plan.distance)
    members = jax.nn.one_hot(clusters, plan.clusters, dtype=y.dtype)
    return jnp.matmul(members.T, jnp.square(y), preferred_element_type=jnp.float32)


# Weights as the products read them.


def effective_weights(w1: Array, w2: Array, variables: FfnVariables, plan: GemmPlan) -> tuple[Array, Array]:
    """W1 and W2 as the plan's forward reads them, dense, in their own dtypes."""

    def effective(name, w, product):
        if product is not None and product.name == name:
            return _masked(name, w, variables, plan, w.dtype)
        return _dense_weight(name, w, variables, plan, w.dtype)

    return effective("W1", w1, plan.up), effective("W2", w2, plan.down)


def weight_mask(name: str, w: Array, variables: FfnVariables, plan: GemmPlan) -> Array:
    """bool[F, D]: entries of W1 or W2 that its sparse form keeps."""
    if plan.weights == "transposable":
        return variables.mask_up if name == "W1" else variables.mask_down
    axis = plan.weight_axis(name)
    mask = ops.sparsify_24(w, "soft_threshold", axis, implementation="reference").mask()
    return mask.T if axis == 0 else mask


def _weight_24(name, w, axis, variables, plan, dtype, implementation) -> Sparse24:
    """The sparse form of W1 or W2, 2:4 along `axis`; of the transpose if axis is 0."""
    if plan.weights == "transposable":
        return ops.compress_24(w, variables.mask_up if name == "W1" else variables.mask_down, axis, dtype=dtype)
    scale = variables.scale_up if name == "W1" else variables.scale_down
    return ops.sparsify_24(w, "soft_threshold", axis, scale=scale, dtype=dtype, implementation=implementation)


def _masked(name, w, variables, plan, dtype) -> Array:
    """The sparse form of a weight [F, D], as a dense array."""
    if plan.weights == "transposable":
        return jnp.where(variables.mask_up if name == "W1" else variables.mask_down, w, 0).astype(dtype)
    axis = plan.weight_axis(name)
    dense = _weight_24(name, w, axis, variables, plan, dtype, "reference").to_dense()
    return dense.T if axis == 0 else dense


def _dense_weight(name, w, variables, plan, dtype) -> Array:
    """A weight [F, D] for a product that does not take it as its sparse operand."""
    if plan.dense_weights == "masked" and plan.sparse_weight(name):
        return _masked(name, w, variables, plan, dtype)
    return w.astype(dtype)


# Small pieces.


def _hidden_matmul(hidden: Hidden, w: Array, implementation) -> Array:
    match hidden:
        case SparseVenom():
            return ops.matmul_venom(hidden, w, implementation=implementation)
        case Sparse24():
            return ops.matmul_24(hidden, w, implementation=implementation)
        case _:
            return hidden @ w


def _gradient_24(a: Array, b: Array, method, busy, key, dtype, implementation) -> Array:
    """a^T b, both [T, ...], with `a` made 2:4 along T except for its columns `busy`."""
    a_24 = ops.sparsify_24(a, method, 0, key=key, implementation=implementation)
    product = ops.matmul_24(a_24, b, out_dtype=dtype, implementation=implementation)
    if busy is None:
        return product
    return product.at[busy].set(jnp.matmul(a[:, busy].T, b, preferred_element_type=dtype))


def _dense(hidden: Hidden) -> Array:
    return hidden if isinstance(hidden, Array) else hidden.to_dense()


def _energy(hidden: Hidden) -> Array:
    values = hidden if isinstance(hidden, Array) else hidden.values
    return jnp.sum(jnp.square(values.astype(jnp.float32)))


def _real_zeros(y: Array, tokens: int) -> Array:
    """Share of zeros among the rows of `tokens`; the other rows, padding, are all zero."""
    return 1 - jnp.sum(y != 0) / (tokens * y.shape[1])


def _permute(x: Array, rows: routing.Rows | None) -> Array:
    return x if rows is None else routing.permute(x, rows)


def _unpermute(x: Array, rows: routing.Rows | None) -> Array:
    return x if rows is None else routing.unpermute(x, rows)


def _subkey(key: Array | None, use: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, use)
