"""What happens to the training state between a dense and a sparse step, and while sparse.

  enter_sparse  before the first sparse step: fix beta (2409.09099), choose masks (2404.01847), or
                cluster the neurons and choose each cluster's set of them (2602.06183);
  refresh       every `refresh_every` sparse steps: masks or sets again;
  leave_sparse  before the first dense step: the weights become what the sparse forward used,
                W <- beta S(W), so that the loss just after the flip is what it was just before.

All three are pure functions of the state, so that a run resumed at the edge takes the same turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sparse_lm import ops
from sparse_lm.config import Config
from sparse_lm.ops import routing
from sparse_lm.ops.ffn_weights import FfnVariables, effective_weights
from sparse_lm.ops.plan import GemmPlan
from sparse_lm.training.step import Metrics, Params, TrainState, forward_loss

MATRICES = ("up", "down")


@dataclasses.dataclass(frozen=True)
class Transitions:
    """The three functions, compiled on first use. States are donated.

    `enter_sparse(state, windows) -> state`, `refresh(state, windows) -> (state, metrics)`,
    `leave_sparse(state) -> state`; `windows` int32[B, S + 1] is the batch of the coming step.
    """

    enter_sparse: Callable[[TrainState, Array], TrainState]
    refresh: Callable[[TrainState, Array], tuple[TrainState, Metrics]]
    leave_sparse: Callable[[TrainState], TrainState]


def make_transitions(config: Config, plan: GemmPlan, graphdef: Any) -> Transitions:
    bind = dict(config=config, plan=plan)
    return Transitions(
        enter_sparse=jax.jit(functools.partial(_enter_sparse, graphdef=graphdef, **bind), donate_argnums=0),
        refresh=jax.jit(functools.partial(_refresh, graphdef=graphdef, **bind), donate_argnums=0),
        leave_sparse=jax.jit(functools.partial(_leave_sparse, **bind), donate_argnums=0),
    )


def needs_refresh(plan: GemmPlan) -> bool:
    """The recipe has something that follows the weights during the sparse phase."""
    return plan.weights == "transposable" or (plan.venom and plan.selection == "cluster_sets")


def dense_params(params: Params, variables: FfnVariables, plan: GemmPlan) -> Params:
    """The parameters with the FFN weights that the sparse forward uses: what a run leaves the sparse phase with."""
    ffn = params["layers"]["ffn"]
    effective = jax.vmap(lambda w1, w2, v: effective_weights(w1, w2, v, plan))
    return _with_ffn(params, dict(zip(MATRICES, effective(ffn["up"], ffn["down"], variables), strict=True)))


def fix_scales(variables: FfnVariables, ffn: dict[str, Array], plan: GemmPlan) -> FfnVariables:
    """With the soft threshold's beta of each weight matrix as it now is. Of weights that a sparse phase
    left, which are 2:4 already, it is 1."""

    def scales(name: str, matrix: str) -> Array:
        return jax.vmap(lambda w: ops.soft_threshold_scale(w, plan.weight_axis(name)))(ffn[matrix])

    return dataclasses.replace(variables, scale_up=scales("W1", "up"), scale_down=scales("W2", "down"))


def _enter_sparse(state: TrainState, windows: Array, *, config: Config, plan: GemmPlan, graphdef: Any) -> TrainState:
    state = _edge_moments(state, config.sparsity.moments)
    ffn = state.params["layers"]["ffn"]
    variables = state.variables
    if plan.weights == "soft_threshold":
        scale = lambda name: jax.vmap(lambda w: ops.soft_threshold_scale(w, plan.weight_axis(name)))  # noqa: E731
        variables = dataclasses.replace(variables, scale_up=scale("W1")(ffn["up"]), scale_down=scale("W2")(ffn["down"]))
    if plan.weights == "transposable":
        variables = _transposable_masks(variables, ffn)
    if plan.venom:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        slices = plan.selection == "slices"
        centroids, assignment = _cluster(ffn["up"], key, plan.clusters, balanced=slices, distance=plan.distance)
        variables = dataclasses.replace(variables, centroids=centroids)
        if slices:
            sets = routing.slice_sets(config.model.ffn_dim, plan.clusters)
            columns = jnp.broadcast_to(sets, (config.model.layers, *sets.shape))
            variables = dataclasses.replace(variables, columns=columns)
        elif plan.neuron_run > 1:
            # Neighbours are chosen together, so those that are alike become neighbours.
            runs = config.model.ffn_dim // plan.neuron_run
            _, assignment = _cluster(
                ffn["up"], jax.random.fold_in(key, 1), runs, balanced=True, distance=plan.distance
            )  # fmt: skip
        if slices or plan.neuron_run > 1:
            state = _sort_neurons(state, assignment)
    state = dataclasses.replace(state, variables=variables)
    if plan.venom and plan.selection == "cluster_sets":
        state, _ = _choose_sets(state, windows, config, plan, graphdef)
    return state


def _refresh(
    state: TrainState, windows: Array, *, config: Config, plan: GemmPlan, graphdef: Any
) -> tuple[TrainState, Metrics]:
    if plan.weights == "transposable":
        old = state.variables
        new = _transposable_masks(old, state.params["layers"]["ffn"])
        flips = [jnp.mean(a ^ b, axis=(1, 2)) for a, b in ((old.mask_up, new.mask_up), (old.mask_down, new.mask_down))]
        return dataclasses.replace(state, variables=new), {"flip_rate": sum(flips) / len(flips)}
    return _choose_sets(state, windows, config, plan, graphdef)


def _leave_sparse(state: TrainState, *, config: Config, plan: GemmPlan) -> TrainState:
    state = dataclasses.replace(
        state,
        params=dense_params(state.params, state.variables, plan),
        mask_decay=jnp.zeros((), jnp.float32),
    )
    return _edge_moments(state, config.sparsity.moments)


def _transposable_masks(variables: FfnVariables, ffn: dict[str, Array]) -> FfnVariables:
    mask = jax.vmap(ops.transposable_mask)
    return dataclasses.replace(variables, mask_up=mask(ffn["up"]), mask_down=mask(ffn["down"]))


def _cluster(up: Array, key: Array, clusters: int, *, balanced: bool, distance: str) -> tuple[Array, Array]:
    """Centroids [L, clusters, D] and each neuron's cluster [L, F]."""
    cluster = functools.partial(routing.cluster_neurons, clusters=clusters, balanced=balanced, distance=distance)
    return jax.lax.map(lambda layer: cluster(layer[0], key=layer[1]), (up, jax.random.split(key, up.shape[0])))


def _choose_sets(
    state: TrainState, windows: Array, config: Config, plan: GemmPlan, graphdef: Any
) -> tuple[TrainState, Metrics]:
    """Each cluster's neurons, by the energy of their activations over the cluster's tokens in one batch."""
    measuring = plan.for_measuring()
    _, stats = forward_loss(
        state.params, state.variables, windows, None, config=config, graphdef=graphdef, plan=measuring
    )
    energy = stats["cluster_energy"]  # [L, clusters, F]
    if plan.neuron_run > 1:
        columns = jax.vmap(lambda e: routing.run_sets(e, plan.m, plan.neuron_run))(energy)
    else:
        columns = jax.vmap(lambda e: routing.neuron_sets(e, plan.m))(energy)
    kept = jnp.sum(jnp.take_along_axis(energy, columns, axis=-1), axis=(1, 2)) / jnp.sum(energy, axis=(1, 2))
    state = dataclasses.replace(state, variables=dataclasses.replace(state.variables, columns=columns))
    return state, {"kept_set_energy": kept}


def _sort_neurons(state: TrainState, assignment: Array) -> TrainState:
    """Neurons in order of cluster, so that a cluster is one contiguous slice. W1, W2 and their moments
    move together: the function computed stays what it was."""
    order = jnp.argsort(assignment, axis=-1, stable=True)

    def sort(tree: Params) -> Params:
        return _map_ffn(tree, lambda w: jnp.take_along_axis(w, order[:, :, None], axis=1))

    opt_state = _map_adam(state.opt_state, lambda adam: adam._replace(mu=sort(adam.mu), nu=sort(adam.nu)))
    return dataclasses.replace(state, params=sort(state.params), opt_state=opt_state)


def _edge_moments(state: TrainState, option: str) -> TrainState:
    """Adam's moments of the FFN weights at either edge: "keep" both, "reset" both, or "reset_first" only."""
    if option == "keep":
        return state

    def reset(adam: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        second = _map_ffn(adam.nu, jnp.zeros_like) if option == "reset" else adam.nu
        return adam._replace(mu=_map_ffn(adam.mu, jnp.zeros_like), nu=second)

    return dataclasses.replace(state, opt_state=_map_adam(state.opt_state, reset))


def _map_adam(opt_state: optax.OptState, function: Callable[[Any], Any]) -> optax.OptState:
    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return jax.tree.map(lambda node: function(node) if is_adam(node) else node, opt_state, is_leaf=is_adam)


def _map_ffn(tree: Params, function: Callable[[Array], Array]) -> Params:
    return _with_ffn(tree, {name: function(tree["layers"]["ffn"][name]) for name in MATRICES})


def _with_ffn(tree: Params, matrices: dict[str, Array]) -> Params:
    layers = tree["layers"]
    return dict(tree, layers=dict(layers, ffn=dict(layers["ffn"], **matrices)))
