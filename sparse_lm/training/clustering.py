"""Token clusters and the neurons that each may use: chosen when the sparse phase starts, chosen again while it lasts.

Two ways to place the clusters' centres (`config.sparsity.centres`):

  neurons  k-means over the up projection's rows, which live where the tokens do (2602.06183);
  tokens   k-means over the tokens of one batch, from tokens of it on. Tokens that are alike use the
           same neurons, so their shared set misses less (experiments/README.md has how much).

Sets then follow from the energy of each neuron's activations over each cluster's tokens.

The entry measures in a forward that is dense but for W1, since the model is dense there. A refresh measures in the
forward of the sparse phase, from which the dense one is soon far off: centres among tokens move to the mean of the
tokens that are routed to them, one update of k-means, and sets are chosen anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.config import Config
from sparse_lm.model.llama import Params
from sparse_lm.ops import routing
from sparse_lm.ops.ffn_weights import FfnVariables
from sparse_lm.ops.plan import GemmPlan
from sparse_lm.training.ffn_state import map_adam, map_ffn
from sparse_lm.training.mesh.layout import BATCH, Layout
from sparse_lm.training.step import Metrics, TrainState, forward_loss

ITERATIONS = 10  # of k-means


def cluster(
    state: TrainState, windows: Array, config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None = None
) -> TrainState:
    """The state with centres, with neurons in the order that the plan needs, and with sets of them.

    Args:
      state: at the start of a sparse phase, scales of the weights included.
      windows: int32[B, S + 1], a batch to measure on.
      config, plan, graphdef, layout: of the run.
    """
    parts = config.mesh.tensor  # of the neurons: each device has as many of every cluster's
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    options = dict(windows=windows, config=config, plan=plan.for_measuring(), graphdef=graphdef, layout=layout)
    measure = functools.partial(_measure, **options)
    cluster_rows = functools.partial(_cluster_rows, layout=layout)
    slices = plan.selection == "slices"

    if config.sparsity.centres == "tokens":
        state = _cluster_tokens(state, measure)
        owner = jax.vmap(routing.assign_neurons)(measure(state).energy) if slices else None
    else:
        up = state.params["layers"]["ffn"]["up"]
        centroids, owner = cluster_rows(up, key, plan.clusters, balanced=slices, distance=plan.distance)
        state = _with_variables(state, centroids=centroids)

    if slices:
        state = _sort_neurons(state, jax.vmap(lambda o: routing.deal_out(o, plan.clusters, parts))(owner))
        sets = routing.slice_sets(config.model.ffn_dim, plan.clusters, parts)
        return _with_variables(state, columns=jnp.broadcast_to(sets, (config.model.layers, *sets.shape)))
    if plan.selection == "cluster_sets":
        if plan.neuron_run > 1:
            # Neighbours are chosen together, so those that the same clusters use become neighbours.
            use = jnp.sqrt(measure(state).energy).swapaxes(1, 2)  # [L, F, clusters]
            runs = config.model.ffn_dim // plan.neuron_run
            _, run = cluster_rows(use, jax.random.fold_in(key, 1), runs, balanced=True, distance="cosine")
            state = _sort_neurons(state, jnp.argsort(run, axis=-1, stable=True))
        state, _ = _choose_sets(state, measure(state).energy, config, plan)
    return state


def refresh(
    state: TrainState, windows: Array, config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None = None
) -> tuple[TrainState, Metrics]:
    """The state with centres among tokens moved to the mean of theirs, and with sets chosen anew, at the cost of one
    forward pass. Neurons stay where they are, and so does the centre of a cluster without tokens.

    Args:
      state: between two sparse steps.
      windows, config, plan, graphdef, layout: as in `cluster`.

    Returns:
      The state, and where sets are chosen "kept_set_energy" f32[L], the share of the sum of Y^2 that they keep; 1 of
      layers that stay dense.
    """
    has_sets = plan.selection == "cluster_sets"
    measuring = dataclasses.replace(plan, measure="energy" if has_sets else "tokens")
    sums = _measure(state, windows=windows, config=config, plan=measuring, graphdef=graphdef, layout=layout)
    if config.sparsity.centres == "tokens":
        state = _move_centres(state, sums)
    return _choose_sets(state, sums.energy, config, plan) if has_sets else (state, {})


def _choose_sets(state: TrainState, energy: Array, config: Config, plan: GemmPlan) -> tuple[TrainState, Metrics]:
    """With each cluster's neurons, by the energy [L, E, F] of their activations on its tokens, and what they keep."""
    if plan.neuron_run > 1:
        columns = jax.vmap(lambda e: routing.run_sets(e, plan.m, plan.neuron_run, config.mesh.tensor))(energy)
    else:
        columns = jax.vmap(lambda e: routing.neuron_sets(e, plan.m))(energy)
    kept = jnp.sum(jnp.take_along_axis(energy, columns, axis=-1), (1, 2)) / jnp.sum(energy, (1, 2))
    of_all = jnp.where(jnp.arange(kept.size) < config.sparsity.dense_layers, 1, kept)
    return _with_variables(state, columns=columns), {"kept_set_energy": of_all}


def _measure(
    state: TrainState, *, windows: Array, config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None
) -> routing.ClusterSums:
    """Sums over each cluster's tokens in a forward of `plan`, which measures, by layer: a leading axis L. Layers that
    stay dense route no tokens: theirs are zero."""
    loss = functools.partial(forward_loss, config=config, graphdef=graphdef, plan=plan)

    def measure(params: Params, variables: FfnVariables, windows: Array, axes: Axes = ONE_DEVICE):
        def measure_part(windows: Array) -> routing.ClusterSums:
            return loss(params, variables, windows, None, axes=axes)[1]["clusters"]

        sums = _sums_of_parts(measure_part, windows.reshape(config.microbatches, -1, windows.shape[1]))
        return jax.vmap(lambda sums: sums.over(axes.batch))(sums)

    if layout:
        specs = layout.specs((state.params, state.variables))
        energy = P(None, None, "tensor") if plan.measure == "energy" else None
        sums = routing.ClusterSums(P(), P(), energy, P())
        measure = layout.local(functools.partial(measure, axes=layout.axes), (*specs, BATCH), sums)
    return measure(state.params, state.variables, windows)


def _sums_of_parts(measure: Callable[[Array], routing.ClusterSums], windows: Array) -> routing.ClusterSums:
    """Of the windows [parts, B, S + 1], a part after the other: a batch that trains in parts may not fit as a whole."""

    def add(total: routing.ClusterSums, windows: Array) -> tuple[routing.ClusterSums, Array]:
        sums = measure(windows)
        return jax.tree.map(jnp.add, total, sums), sums.candidates

    shapes = jax.eval_shape(measure, windows[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, candidates = lax.scan(add, zeros, windows)
    parts, layers, _, width = candidates.shape
    in_order = candidates.swapaxes(0, 1).reshape(layers, -1, width)
    return total._replace(candidates=in_order[:, ::parts])  # still evenly spaced


def _cluster_tokens(state: TrainState, measure) -> TrainState:
    """With centres by k-means over the tokens that `measure` sees; every iteration is a forward pass."""
    state = _with_variables(state, centroids=measure(state).candidates)
    return lax.fori_loop(0, ITERATIONS, lambda _, state: _move_centres(state, measure(state)), state)


def _move_centres(state: TrainState, sums: routing.ClusterSums) -> TrainState:
    """With each centre at the mean of its tokens: one update of k-means."""
    means = jax.vmap(lambda sums, centroids: sums.centroids(centroids))
    return _with_variables(state, centroids=means(sums, state.variables.centroids))


def _cluster_rows(
    w: Array, key: Array, clusters: int, *, balanced: bool, distance: str, layout: Layout | None
) -> tuple[Array, Array]:
    """k-means of the rows of w [L, F, D]: centroids [L, clusters, D] and each row's cluster [L, F]."""
    cluster = functools.partial(
        routing.cluster_neurons, clusters=clusters, balanced=balanced, distance=distance, iterations=ITERATIONS
    )

    def cluster_layer(layer: tuple[Array, Array]) -> tuple[Array, Array]:
        w, key = layer
        if layout:  # every device makes the same clusters, of the same numbers
            w = lax.with_sharding_constraint(w, layout.replicated)
        return cluster(w, key=key)

    return lax.map(cluster_layer, (w, jax.random.split(key, w.shape[0])))


def _sort_neurons(state: TrainState, order: Array) -> TrainState:
    """Neurons in an order by cluster, int32[L, F], so that a cluster is one contiguous slice. W1, W2 and their
    moments move together: the function computed stays what it was."""

    def sort(tree: Params) -> Params:
        return map_ffn(tree, lambda w: jnp.take_along_axis(w, order[:, :, None], axis=1))

    opt_state = map_adam(state.opt_state, lambda adam: adam._replace(mu=sort(adam.mu), nu=sort(adam.nu)))
    return dataclasses.replace(state, params=sort(state.params), opt_state=opt_state)


def _with_variables(state: TrainState, **variables: Array) -> TrainState:
    return dataclasses.replace(state, variables=dataclasses.replace(state.variables, **variables))
