"""Tokens to experts: centroids, assignment, and the order of rows that follows from it.

A decision that looks at a block of consecutive tokens can leak the future: a token's neurons would then depend on
later tokens of its own sequence. So each token is given its expert alone, and rows are dispatched by expert, at random
within one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.sparse.linalg import cg
from jaxtyping import Float, Int32

from sparse_lm.ops.row_order import RowOrder

ITERATIONS = 10  # of k-means
_SHORTEST = 1e-15  # length of a row whose direction counts: the squares of much shorter ones are 0 in float32
_FAR = 1e30  # of an energy that is NaN: farther than all others, nearer than an expert that has turned a neuron down


def tokens_of(x: Float[Array, "*tokens D"] | None, call: str) -> Float[Array, "T D"]:
    """Returns the batch of inputs that `call`, such as "enter(w1, w2, x)", was given: all leading axes are tokens."""
    if x is None:
        raise ValueError(f"centroids are of the FFN's inputs: {call} needs a batch x [..., D]")
    return x.reshape(-1, x.shape[-1])


def unit(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Scales rows to length 1, in float32; one of zeros or nearly so stays shorter."""
    x = jnp.asarray(x, jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), _SHORTEST)


def assign_tokens(x: Float[Array, "T D"], centroids: Float[Array, "E D"]) -> Int32[Array, " T"]:
    """Assigns each token to the expert whose centroid is nearest in direction, from that token alone.

    Of equally near centroids it takes the lowest, and 0 for a row that holds a NaN.
    """
    # A token's own length does not change which centroid is nearest in direction: x is read once, as it is.
    directions = unit(centroids).astype(x.dtype)
    dots = jnp.dot(x, directions.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.argmax(dots, axis=-1).astype(jnp.int32)


def expert_load(assignment: Int32[Array, " T"], experts: int) -> Float[Array, " E"]:
    """Computes f32[E], the share of tokens that each expert has."""
    return jnp.mean(assignment[:, None] == jnp.arange(experts), axis=0, dtype=jnp.float32)


def dispatch_order(
    assignment: Int32[Array, " T"], experts: int, v: int, order: Int32[Array, " T"] | None
) -> tuple[RowOrder, Int32[Array, " blocks"]]:
    """Orders tokens by expert, every expert from a multiple of v on. A counting sort: no comparisons between tokens.

    Args:
      assignment: in 0 .. E - 1; E for a token that has no expert here, and gets no slot.
      v: rows of a block: no block holds tokens of two experts.
      order: a permutation: the order in which the tokens of an expert are taken. Their own by default.

    Returns:
      The order, with Tp = the largest multiple of v up to T + E (v - 1) slots, whatever the assignment; and
      int32 [Tp / v], the expert of each block. Blocks that no expert needs are padding, given to the last one.
    """
    tokens = assignment.shape[0]
    slot_count = (tokens + experts * (v - 1)) // v * v
    order = jnp.arange(tokens, dtype=jnp.int32) if order is None else order.astype(jnp.int32)
    assignment = assignment[order]
    member = (assignment[:, None] == jnp.arange(experts)).astype(jnp.int32)
    so_far = jnp.cumsum(member, axis=0)
    counts = so_far[-1]
    ends = jnp.cumsum(-(-counts // v) * v)
    starts = ends - -(-counts // v) * v

    slot = jnp.sum(member * (starts + so_far - 1), axis=1, dtype=jnp.int32)
    beyond = slot_count + jnp.arange(tokens, dtype=jnp.int32)
    slot = jnp.where(assignment < experts, slot, beyond)  # none is stored twice
    slots = jnp.full(slot_count, tokens, jnp.int32).at[slot].set(order, unique_indices=True)
    position = jnp.zeros(tokens, jnp.int32).at[order].set(slot, unique_indices=True)
    first_slots = jnp.arange(0, slot_count, v, dtype=jnp.int32)
    block_experts = jnp.sum(first_slots[:, None] >= ends, axis=1, dtype=jnp.int32)
    return RowOrder(slots, position), jnp.minimum(block_experts, experts - 1)


def cluster(rows: Float[Array, "N D"], experts: int) -> Float[Array, "E D"]:
    """Finds f32 centroids by k-means in direction, of tokens or neurons.

    It starts from evenly spaced rows, the first and the last among them: hardly all are then the first tokens of
    sequences, which may be the same. Rows that are not finite count for nothing.
    """
    if rows.shape[0] < experts:
        raise ValueError(f"{rows.shape[0]} tokens or neurons are too few for {experts} experts")
    spread = np.arange(experts) * (rows.shape[0] - 1) // max(experts - 1, 1)
    start = unit(_finite(rows[spread]))
    return lax.fori_loop(0, ITERATIONS, lambda _, centroids: update_centroids(rows, centroids), start)


def update_centroids(rows: Float[Array, "N D"], centroids: Float[Array, "E D"]) -> Float[Array, "E D"]:
    """Moves each centroid to the mean direction of the rows [N, D] nearest to it; one that has none stays.

    Rows that are not finite count for nothing, so that one bad batch cannot spoil centroids for good.
    """
    experts = jnp.arange(centroids.shape[0])[:, None]
    member = (assign_tokens(rows, centroids) == experts) & jnp.isfinite(rows).all(axis=-1)
    member = member.astype(jnp.float32)
    count = jnp.sum(member, axis=1, keepdims=True)
    total = jnp.dot(member, unit(_finite(rows)), precision=lax.Precision.HIGHEST)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), centroids)


def away_from_others(x: Float[Array, "T D"], centroids: Float[Array, "E D"]) -> Float[Array, "E D"]:
    """Fits a vector for each expert, whose product with a token's direction is about 0 for its own and -1 for others'.

    A linear regression with a small ridge, own tokens and others with half of the weight each. Rows of x that are not
    finite count for nothing.
    """
    finite = jnp.isfinite(x).all(axis=-1, keepdims=True)
    directions = unit(jnp.where(finite, x, 0))
    own = assign_tokens(x, centroids)[:, None] == jnp.arange(centroids.shape[0])
    counts = (jnp.sum(side & finite, axis=0, dtype=jnp.float32) for side in (own, ~own))
    of_own, of_others = (0.5 / jnp.maximum(count, 1) for count in counts)
    ridge = 0.03 / x.shape[1]  # of the mean variance along an axis

    def normal(away: Array) -> Array:
        weighted = jnp.where(own, of_own, of_others) * (directions @ away.T)
        return weighted.T @ directions + ridge * away

    with jax.default_matmul_precision("highest"):
        return cg(normal, -jnp.where(own, 0, of_others).T @ directions, tol=1e-2, maxiter=100)[0]


def order_neurons(
    x: Float[Array, "T D"], y: Float[Array, "T F"], centroids: Float[Array, "E D"], parts: int
) -> Int32[Array, " F"]:
    """Orders neurons by the expert whose tokens use them most, by the sum of their Y^2, F / E neurons an expert.

    Each of `parts` equal parts of the order has as many neurons of every expert, sorted by expert. Tokens x are
    assigned by the centroids; the activations y of those that are not finite count for nothing.
    """
    experts = centroids.shape[0]
    member = assign_tokens(x, centroids) == jnp.arange(experts)[:, None]
    y = _finite(y).astype(jnp.float32 if y.dtype == jnp.float16 else y.dtype)  # squares need more than its range
    energy = jnp.matmul(member.astype(y.dtype), jnp.square(y), preferred_element_type=jnp.float32)
    # XLA for CPUs has no bfloat16 product with float32 sums that it transposes.
    owner = assign_neurons(lax.optimization_barrier(energy))
    by_expert = jnp.argsort(owner, stable=True)
    return by_expert.reshape(experts, parts, -1).swapaxes(0, 1).reshape(-1)


def assign_neurons(energy: Float[Array, "E F"]) -> Int32[Array, " F"]:
    """Assigns each neuron to an expert that uses it much; every expert gets F / E neurons.

    Deferred acceptance: in each round a neuron asks the expert that uses it most and has not yet turned it down, and
    an expert that is asked by more than it has room for turns down those that it uses least. Energies are not negative.
    """
    experts, neurons = energy.shape
    room = neurons // experts
    distances = jnp.where(jnp.isnan(energy), _FAR, -energy).T

    def ask(turned_down: Array) -> Array:
        return jnp.argmin(jnp.where(turned_down, jnp.inf, distances), axis=-1).astype(jnp.int32)

    def round_of_offers(state: tuple[Array, Array]) -> tuple[Array, Array]:
        turned_down, _ = state
        asked = ask(turned_down)
        offered = jnp.take_along_axis(distances, asked[:, None], axis=1)[:, 0]
        order = jnp.lexsort((offered, asked))
        first_of_expert = jnp.searchsorted(asked[order], jnp.arange(experts))
        place = jnp.argsort(order) - first_of_expert[asked]
        refused = place >= room
        now_down = turned_down | (refused[:, None] & (asked[:, None] == jnp.arange(experts)))
        return now_down, jnp.any(refused)

    start = jnp.zeros((neurons, experts), bool), jnp.array(True)
    turned_down, _ = lax.while_loop(lambda state: state[1], round_of_offers, start)
    return ask(turned_down)


def sort_neurons(w: Float[Array, "*layers rows D"], order: Int32[Array, "*layers F"]) -> Float[Array, "*layers rows D"]:
    """Puts the rows of W1 or W2, one of a neuron or, with a gate, two side by side, in an order of the neurons."""
    by_neuron = w.reshape(*order.shape, -1, w.shape[-1])
    return jnp.take_along_axis(by_neuron, order[..., None, None], axis=-3).reshape(w.shape)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
