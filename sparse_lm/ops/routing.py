"""Tokens to clusters of neurons: clustering, assignment, and the row order that follows from it.

Blocks of consecutive tokens must not choose their neurons together, since a token's neurons would
then depend on later tokens of its own sequence. Rows are therefore permuted first: shuffled, or
sorted by a cluster that each token is given alone, at random within a cluster.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm import collectives
from sparse_lm.ops.columns import absolute_columns
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.ops.select import largest

DISTANCES = ("l2", "cosine")
_FAR = 1e30  # farther than any centre, nearer than one that is full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows(RowOrder):
    """An order of tokens, and the cluster of each block of slots.

    Attributes:
      block_clusters: int32 [Tp / v], the cluster of each block of v slots, where rows are grouped.
    """

    block_clusters: Array | None = None


def cluster_neurons(
    w: Array, clusters: int, *, key: Array, balanced: bool, iterations: int = 10, distance: str = "cosine"
) -> tuple[Array, Array]:
    """k-means over neurons.

    Args:
      w: [F, D], one row a neuron.
      clusters: E, their number.
      key: PRNG key: which neurons the centres start from.
      balanced: every cluster has exactly F / E neurons: of all pairs of a neuron and a cluster that
        still has room, the closest is taken first, as often as there are neurons.
      iterations: of assignment and update.
      distance: "l2" or "cosine" (rows and centres have length 1).

    Returns:
      (centroids float32 [E, D], the means of their neurons; assignment int32 [F]).

    Raises:
      ValueError: more clusters than neurons, `balanced` and E does not divide F, or an unknown
        distance.
    """
    neurons = w.shape[0]
    if clusters > neurons or (balanced and neurons % clusters):
        raise ValueError(f"clusters = {clusters} must {'divide' if balanced else 'be at most'} {neurons}")
    w = _oriented(w, distance)
    nearest = _assign_balanced if balanced else _assign

    def improve(state: tuple[Array, Array], _):
        centroids, _ = state
        assignment = nearest(_distances(w, centroids))
        return (_oriented(_means(w, assignment, centroids), distance), assignment), None

    start = w[jax.random.choice(key, neurons, (clusters,), replace=False)]
    state, _ = lax.scan(improve, (start, jnp.zeros(neurons, jnp.int32)), length=iterations)
    return state


def assign_tokens(x: Array, centroids: Array, distance: str) -> Array:
    """The nearest centre of each token, from that token alone.

    Args:
      x: [T, D].
      centroids: [E, D].
      distance: "l2" or "cosine".

    Returns:
      int32 [T]; of equally near centres the lowest, and 0 for a row that holds a NaN.
    """
    # A token's own length does not change which centre is nearest in direction: x is read once, as it is.
    # Centres are rounded once, or lengths and products of tokens far from the origin would be of different ones.
    centroids = _oriented(centroids, distance).astype(x.dtype)
    dots = jnp.dot(x, centroids.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    lengths = jnp.sum(jnp.square(centroids.astype(jnp.float32)), axis=-1)
    return _assign(lengths - 2 * dots if distance == "l2" else -dots)


class ClusterSums(NamedTuple):
    """Sums over the tokens of each of E clusters, from which centres are updated and sets are chosen.

    Attributes:
      tokens: float32 [E], how many tokens.
      inputs: float32 [E, D], sum of x; with distance "cosine" of x at length 1.
      energy: float32 [E, F], sum of Y^2; None where only the tokens are looked at.
      candidates: float32 [E, D], tokens evenly spaced over the batch: centres for k-means to start from.
    """

    tokens: Array
    inputs: Array
    energy: Array | None
    candidates: Array

    def centroids(self, old: Array) -> Array:
        """float32 [E, D], the mean token of each cluster: one update of k-means. `old` where there is none."""
        return jnp.where(self.tokens[:, None] > 0, self.inputs / jnp.maximum(self.tokens, 1)[:, None], old)

    def over(self, names: tuple[str, ...]) -> ClusterSums:
        """Of the tokens of all shards along mesh axes; every one of them has it."""
        if not names:
            return self
        tokens, inputs, energy = collectives.total((self.tokens, self.inputs, self.energy), names)
        candidates = collectives.gather(self.candidates, names)[:: collectives.size(names)]
        return ClusterSums(tokens, inputs, energy, candidates)


def cluster_sums(x: Array, y: Array | None, centroids: Array, distance: str) -> ClusterSums:
    """Of tokens x [T, D] and, if given, their activations Y [T, F], by the nearest of E <= T centres."""
    clusters = centroids.shape[0]
    member = assign_tokens(x, centroids, distance) == jnp.arange(clusters)[:, None]
    energy = None
    if y is not None:
        energy = jnp.matmul(member.astype(y.dtype), jnp.square(y), preferred_element_type=jnp.float32)
    return ClusterSums(
        tokens=jnp.sum(member, axis=1, dtype=jnp.float32),
        inputs=jnp.dot(member.astype(jnp.float32), _oriented(x, distance), precision=lax.Precision.HIGHEST),
        energy=energy,
        candidates=_oriented(x[jnp.arange(clusters) * (x.shape[0] // clusters)], distance),
    )


def _oriented(x: Array, distance: str) -> Array:
    """Rows whose Euclidean distances order as `distance` does."""
    x = jnp.asarray(x, jnp.float32)
    match distance:
        case "l2":
            return x
        case "cosine":
            return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        case _:
            raise ValueError(f"distance = {distance!r} must be one of {', '.join(DISTANCES)}")


def _distances(x: Array, centroids: Array) -> Array:
    """[T, E] squared Euclidean distances, less |x|^2, which no comparison along a row needs."""
    return jnp.sum(jnp.square(centroids), axis=-1) - 2 * jnp.dot(x, centroids.T, precision=lax.Precision.HIGHEST)


def _assign(distances: Array) -> Array:
    return jnp.argmin(distances, axis=-1).astype(jnp.int32)


def _means(w: Array, assignment: Array, empty: Array) -> Array:
    """[E, D] mean row of each cluster; that of `empty` where it has none."""
    member = (assignment == jnp.arange(empty.shape[0])[:, None]).astype(jnp.float32)
    count = jnp.sum(member, axis=1, keepdims=True)
    total = jnp.dot(member, w, precision=lax.Precision.HIGHEST)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), empty)


def _assign_balanced(distances: Array) -> Array:
    """Deferred acceptance: every cluster ends with F / E neurons.

    In each round a neuron asks the nearest cluster that has not yet turned it down, and a cluster
    that is asked by more than it has room for turns down the farthest.
    """
    neurons, clusters = distances.shape
    room = neurons // clusters
    distances = jnp.where(distances < _FAR, distances, _FAR)

    def ask(turned_down: Array) -> Array:
        return _assign(jnp.where(turned_down, jnp.inf, distances))

    def round_of_offers(state: tuple[Array, Array]) -> tuple[Array, Array]:
        turned_down, _ = state
        asked = ask(turned_down)
        offered = jnp.take_along_axis(distances, asked[:, None], axis=1)[:, 0]
        order = jnp.lexsort((offered, asked))
        first_of_cluster = jnp.searchsorted(asked[order], jnp.arange(clusters))
        place = jnp.argsort(order) - first_of_cluster[asked]
        refused = place >= room
        now_down = turned_down | (refused[:, None] & (asked[:, None] == jnp.arange(clusters)))
        return now_down, jnp.any(refused)

    start = jnp.zeros((neurons, clusters), bool), jnp.array(True)
    turned_down, _ = lax.while_loop(lambda state: state[1], round_of_offers, start)
    return ask(turned_down)


def assign_neurons(energy: Array) -> Array:
    """Each neuron to a cluster that uses it much; every cluster gets F / E neurons.

    Args:
      energy: [E, F], not negative: what each cluster would lose without each neuron. E divides F.

    Returns:
      int32 [F]: the cluster of each neuron.
    """
    return _assign_balanced(-energy.T)


def shuffle_rows(order: Array) -> Rows:
    """Tokens in the order given, int32 [T]."""
    return Rows(order, jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32)))


def sort_rows(assignment: Array, clusters: int, order: Array | None) -> Rows:
    """Tokens by cluster; arguments as in `group_rows`."""
    rows = group_rows(assignment, clusters, 1, order)
    return Rows(rows.slots, rows.position)


def group_rows(assignment: Array, clusters: int, v: int, order: Array | None) -> Rows:
    """Tokens by cluster, every cluster from a multiple of v on. A counting sort: no comparisons between tokens.

    Args:
      assignment: int32 [T], in 0 .. clusters - 1.
      clusters: E.
      v: rows of a block: no block holds tokens of two clusters.
      order: int32 [T], a permutation: the order in which the tokens of a cluster are taken. Their own
        by default.

    Returns:
      Rows with Tp = the largest multiple of v up to T + E (v - 1), whatever the assignment. Blocks
      that no cluster needs are padding, and say that they are of the last cluster.
    """
    tokens = assignment.shape[0]
    slot_count = (tokens + clusters * (v - 1)) // v * v
    order = jnp.arange(tokens, dtype=jnp.int32) if order is None else order
    assignment = assignment[order]
    member = (assignment[:, None] == jnp.arange(clusters)).astype(jnp.int32)
    so_far = jnp.cumsum(member, axis=0)
    counts = so_far[-1]
    ends = jnp.cumsum(-(-counts // v) * v)
    starts = ends - -(-counts // v) * v

    slot = jnp.sum(member * (starts + so_far - 1), axis=1)
    slots = jnp.full(slot_count, tokens, jnp.int32).at[slot].set(order, unique_indices=True)
    position = jnp.zeros(tokens, jnp.int32).at[order].set(slot, unique_indices=True)
    first_slots = jnp.arange(0, slot_count, v, dtype=jnp.int32)
    block_clusters = jnp.sum(first_slots[:, None] >= ends, axis=1, dtype=jnp.int32)
    return Rows(slots, position, jnp.minimum(block_clusters, clusters - 1))


def neuron_sets(energy: Array, m: int) -> Array:
    """The four neurons of each m that a cluster uses most.

    Args:
      energy: [E, F], not negative.
      m: neurons of a group: a multiple of 4 that divides F.

    Returns:
      int32 [E, 4 F / m], ascending.
    """
    clusters, neurons = energy.shape
    return absolute_columns(largest(energy.reshape(clusters, neurons // m, m), 4), m)


def run_sets(energy: Array, m: int, run: int, parts: int = 1) -> Array:
    """The runs of neighbouring neurons that a cluster uses most: 4 / m of all neurons.

    Args:
      energy: [E, F], not negative.
      m: a share of 4 / m of the neurons is kept.
      run: neurons of a run; divides F / parts and 4 F / (m parts).
      parts: each of so many equal parts of the neurons gets as many runs.

    Returns:
      int32 [E, 4 F / m], ascending.
    """
    clusters, neurons = energy.shape
    runs = neurons // run // parts
    energy_of_run = jnp.sum(energy.reshape(clusters, parts, runs, run), axis=-1)
    kept = jnp.sort(lax.top_k(energy_of_run, 4 * runs // m)[1], axis=-1)
    starts = run * (kept + runs * jnp.arange(parts)[:, None])
    return (starts[..., None] + jnp.arange(run)).reshape(clusters, -1).astype(jnp.int32)


def slice_sets(neurons: int, clusters: int, parts: int = 1) -> Array:
    """Each cluster's own slice of neurons that are sorted by cluster.

    Args:
      neurons: F.
      clusters: E.
      parts: each of so many equal parts of the neurons is sorted by itself, and has a part of every slice.

    Returns:
      int32 [E, F / E], ascending.
    """
    sets = jnp.arange(neurons, dtype=jnp.int32).reshape(parts, clusters, neurons // clusters // parts)
    return sets.swapaxes(0, 1).reshape(clusters, -1)


def deal_out(assignment: Array, clusters: int, parts: int) -> Array:
    """An order of neurons in which each of `parts` equal parts has as many of every cluster, sorted by cluster.

    Args:
      assignment: int32 [F], each cluster's count a multiple of `parts`.
      clusters: E.
      parts: how many parts.

    Returns:
      int32 [F], a permutation.
    """
    by_cluster = jnp.argsort(assignment, stable=True)
    if parts == 1:
        return by_cluster
    return by_cluster.reshape(clusters, parts, -1).swapaxes(0, 1).reshape(-1)


def expert_load(assignment: Array, clusters: int) -> Array:
    """float32 [E]: the share of tokens that each cluster has."""
    return jnp.mean(assignment[:, None] == jnp.arange(clusters), axis=0, dtype=jnp.float32)
