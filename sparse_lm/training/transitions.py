"""What happens to the training state between a dense and a sparse step, and while sparse.

  enter_sparse  before the first sparse step: fix beta (2409.09099), choose masks (2404.01847), or
                make clusters and choose each one's neurons (2602.06183);
  refresh       every `refresh_every` sparse steps: masks or sets again, centres to where their tokens are;
  leave_sparse  before the first dense step: the weights become what the sparse forward used,
                W <- beta S(W), so that the loss just after the flip is what it was just before. Of such weights
                beta is 1: to leave twice, as a run does that is made longer after its end, changes nothing.

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
from sparse_lm.config import Config, SparsityConfig
from sparse_lm.model.llama import Params
from sparse_lm.ops.ffn_weights import FfnVariables, effective_weights
from sparse_lm.ops.plan import GemmPlan
from sparse_lm.training import clustering, spikes
from sparse_lm.training.ffn_state import MATRICES, map_adam, map_ffn, with_ffn
from sparse_lm.training.mesh.layout import Layout
from sparse_lm.training.recipe import sparse_plan
from sparse_lm.training.step import Metrics, TrainState


@dataclasses.dataclass(frozen=True)
class Transitions:
    """The three functions, compiled on first use. States are donated.

    `enter_sparse(state, windows) -> state`, `refresh(state, windows) -> (state, metrics)`,
    `leave_sparse(state) -> state`; `windows` int32[B, S + 1] is the batch of the coming step.
    """

    enter_sparse: Callable[[TrainState, Array], TrainState]
    refresh: Callable[[TrainState, Array], tuple[TrainState, Metrics]]
    leave_sparse: Callable[[TrainState], TrainState]


def make_transitions(config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None = None) -> Transitions:
    """The transitions of a run with this plan in its sparse phase; `layout` is None on one device."""
    bind = dict(config=config, plan=plan, layout=layout)
    state, metrics = (layout.state, layout.replicated) if layout else (None, None)
    compiled = functools.partial(jax.jit, donate_argnums=0)
    return Transitions(
        enter_sparse=compiled(functools.partial(_enter_sparse, graphdef=graphdef, **bind), out_shardings=state),
        refresh=compiled(functools.partial(_refresh, graphdef=graphdef, **bind), out_shardings=(state, metrics)),
        leave_sparse=compiled(functools.partial(_leave_sparse, **bind), out_shardings=state),
    )


def needs_refresh(config: Config, step: int) -> bool:
    """Whether a refresh comes before `step`, inside a sparse window of a plan with masks, sets or centres to move."""
    s = config.sparsity
    if not any(start < step < end and (step - start) % s.refresh_every == 0 for start, end in s.windows):
        return False
    plan = sparse_plan(s)
    clusters_move = plan.selection == "cluster_sets" or (plan.selection == "slices" and s.centres == "tokens")
    return plan.weights == "transposable" or (plan.venom and clusters_move)


def dense_params(
    params: Params, variables: FfnVariables, plan: GemmPlan, dense_layers: int, layout: Layout | None = None
) -> Params:
    """The parameters with the FFN weights that the sparse forward uses: what a run leaves the sparse phase with.

    Those of the first `dense_layers` are what they were.
    """

    def effective(ffn: dict[str, Array], variables: FfnVariables) -> dict[str, Array]:
        matrices = jax.vmap(lambda w1, w2, v: effective_weights(w1, w2, v, plan))(ffn["up"], ffn["down"], variables)
        return {
            name: jnp.concatenate([ffn[name][:dense_layers], w[dense_layers:]])
            for name, w in zip(MATRICES, matrices, strict=True)
        }

    arguments = params["layers"]["ffn"], variables
    if layout:
        specs = layout.specs(arguments)
        effective = layout.local(effective, specs, {name: specs[0][name] for name in MATRICES})
    return with_ffn(params, effective(*arguments))


def fix_scales(variables: FfnVariables, ffn: dict[str, Array], plan: GemmPlan) -> FfnVariables:
    """With the soft threshold's beta of each weight matrix as it now is. Of weights that a sparse phase
    left, which are 2:4 already, it is 1."""

    def scales(name: str, matrix: str) -> Array:
        return jax.vmap(lambda w: ops.soft_threshold_scale(w, plan.weight_axis(name)))(ffn[matrix])

    return dataclasses.replace(variables, scale_up=scales("W1", "up"), scale_down=scales("W2", "down"))


def _enter_sparse(
    state: TrainState, windows: Array, *, config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None
) -> TrainState:
    state = _forget_losses(_edge_moments(state, config.sparsity))
    ffn, variables = state.params["layers"]["ffn"], state.variables
    if plan.weights == "soft_threshold":
        variables = fix_scales(variables, ffn, plan)
    if plan.weights == "transposable":
        variables = _transposable_masks(variables, ffn, layout)
    state = dataclasses.replace(state, variables=variables)
    return clustering.cluster(state, windows, config, plan, graphdef, layout) if plan.venom else state


def _refresh(
    state: TrainState, windows: Array, *, config: Config, plan: GemmPlan, graphdef: Any, layout: Layout | None
) -> tuple[TrainState, Metrics]:
    if plan.weights == "transposable":
        old = state.variables
        new = _transposable_masks(old, state.params["layers"]["ffn"], layout)
        flips = [jnp.mean(a ^ b, axis=(1, 2)) for a, b in ((old.mask_up, new.mask_up), (old.mask_down, new.mask_down))]
        return dataclasses.replace(state, variables=new), {"flip_rate": sum(flips) / len(flips)}
    return clustering.refresh(state, windows, config, plan, graphdef, layout)


def _leave_sparse(state: TrainState, *, config: Config, plan: GemmPlan, layout: Layout | None) -> TrainState:
    variables = state.variables
    params = dense_params(state.params, variables, plan, config.sparsity.dense_layers, layout)
    if plan.weights == "soft_threshold":
        ones = jnp.ones_like(variables.scale_up)
        variables = dataclasses.replace(variables, scale_up=ones, scale_down=ones)
    state = dataclasses.replace(state, params=params, variables=variables, mask_decay=jnp.zeros((), jnp.float32))
    return _forget_losses(_edge_moments(state, config.sparsity))


def _transposable_masks(variables: FfnVariables, ffn: dict[str, Array], layout: Layout | None) -> FfnVariables:
    masks = functools.partial(jax.tree.map, jax.vmap(ops.transposable_mask))
    if layout:
        specs = layout.specs(ffn)
        masks = layout.local(masks, (specs,), specs)
    chosen = masks(ffn)
    return dataclasses.replace(variables, mask_up=chosen["up"], mask_down=chosen["down"])


def _forget_losses(state: TrainState) -> TrainState:
    """Where the loss may leap for good, it is no spike."""
    return state if state.recent_losses is None else dataclasses.replace(state, recent_losses=spikes.no_losses())


def _edge_moments(state: TrainState, sparsity: SparsityConfig) -> TrainState:
    """Adam's moments of the FFN weights that flip, at either edge: "keep" both, "reset" both, or "reset_first"."""
    if sparsity.moments == "keep":
        return state

    def zeroed(moment: Array) -> Array:
        return moment.at[sparsity.dense_layers :].set(0)

    def reset(adam: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        second = map_ffn(adam.nu, zeroed) if sparsity.moments == "reset" else adam.nu
        return adam._replace(mu=map_ffn(adam.mu, zeroed), nu=second)

    return dataclasses.replace(state, opt_state=map_adam(state.opt_state, reset))
