"""The training state and one training step.

A run compiles this step twice, once with the dense plan and once with the recipe's. Both take and
return the same `TrainState`, so flipping between phases is choosing the other function.
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

from sparse_lm.config import Config
from sparse_lm.model import llama
from sparse_lm.model.loss import chunked_cross_entropy
from sparse_lm.ops.ffn_weights import FfnVariables, init_variables, weight_mask
from sparse_lm.ops.plan import DENSE, GemmPlan
from sparse_lm.training.mask_decay import masked_decay
from sparse_lm.training.optimizer import make_optimizer
from sparse_lm.training.recipe import sparse_plan

Params = dict[str, Any]
Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run must save to go on as if it had not stopped.

    Attributes:
      step: int32[], steps taken; also the position in the data.
      seed: uint32[], of all that is random. In the state, so that runs that differ in it share compiled steps.
      params: float32 master weights; layers are stacked on a leading axis.
      opt_state: Optax state.
      variables: what the sparse FFN reads and does not train, [L, ...].
      mask_decay: f32[], the factor of FST's masked decay; 0 outside its sparse phase.
      skipped: int32[], steps skipped because loss or gradient was not finite.
      skipped_in_a_row: int32[].
    """

    step: Array
    seed: Array
    params: Params
    opt_state: optax.OptState
    variables: FfnVariables
    mask_decay: Array
    skipped: Array
    skipped_in_a_row: Array


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The pure functions of a run, compiled on first use. `state` arguments are donated."""

    config: Config
    plan: GemmPlan  # of the sparse phase
    init: Callable[[], TrainState]
    dense_step: Callable[[TrainState, Array], tuple[TrainState, Metrics]]
    sparse_step: Callable[[TrainState, Array], tuple[TrainState, Metrics]]
    graphdef: Any

    def step(self, phase: str) -> Callable[[TrainState, Array], tuple[TrainState, Metrics]]:
        """The compiled step of a phase: (state, windows int32[B, S + 1]) -> (state, metrics)."""
        return self.sparse_step if phase == "sparse" else self.dense_step


def make_trainer(config: Config) -> Trainer:
    plan = sparse_plan(config.sparsity)
    graphdef = llama.graphdef(config.model)
    after_clip = masked_decay() if plan.weights == "transposable" else optax.identity()
    optimizer = optax.with_extra_args_support(make_optimizer(config, after_clip))
    train_step = functools.partial(_train_step, config=config, graphdef=graphdef, optimizer=optimizer, sparse_plan=plan)
    return Trainer(
        config=config,
        plan=plan,
        init=functools.partial(
            jax.jit(functools.partial(_init, config=config, optimizer=optimizer, plan=plan)),
            jnp.uint32(config.seed % 2**32),
        ),
        dense_step=jax.jit(functools.partial(train_step, plan=DENSE), donate_argnums=0),
        sparse_step=jax.jit(functools.partial(train_step, plan=plan), donate_argnums=0),
        graphdef=graphdef,
    )


def _init(seed: Array, *, config: Config, optimizer: optax.GradientTransformation, plan: GemmPlan) -> TrainState:
    _, params = llama.init(config.model, jax.random.key(seed))
    one_layer = init_variables(plan, config.model.dim, config.model.ffn_dim)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        seed=seed,
        params=params,
        opt_state=optimizer.init(params),
        variables=jax.tree.map(lambda x: jnp.broadcast_to(x, (config.model.layers, *x.shape)), one_layer),
        mask_decay=jnp.zeros((), jnp.float32),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def _train_step(
    state: TrainState,
    windows: Array,
    *,
    config: Config,
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    sparse_plan: GemmPlan,
    plan: GemmPlan,
) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    loss = functools.partial(forward_loss, config=config, graphdef=graphdef, plan=plan)
    (loss, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state.variables, windows, key)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, variables=state.variables, mask_decay=state.mask_decay
    )
    params = optax.apply_updates(state.params, updates)

    # A bad step leaves no trace but a count: the weights and moments of before are kept.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def unless_bad(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new_state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=unless_bad(params, state.params),
        opt_state=unless_bad(opt_state, state.opt_state),
        skipped=state.skipped + ~finite,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )
    metrics = dict(
        stats,
        loss=loss,
        grad_norm=grad_norm,
        skipped=new_state.skipped,
        skipped_in_a_row=new_state.skipped_in_a_row,
    )
    if sparse_plan.weights == "soft_threshold":
        metrics |= _weight_metrics(state, new_state, sparse_plan, config.log_every)
    return new_state, metrics


def forward_loss(
    params: Params,
    variables: FfnVariables,
    windows: Array,
    key: Array | None,
    *,
    config: Config,
    graphdef: Any,
    plan: GemmPlan,
) -> tuple[Array, Metrics]:
    """Mean next-token cross entropy of windows int32[B, S + 1], in nats, and statistics by layer."""
    model = llama.merge(graphdef, params)
    implementation = config.sparsity.implementation or None
    inputs, targets = windows[:, :-1], windows[:, 1:]
    hidden, stats = model(inputs, plan=plan, variables=variables, key=key, implementation=implementation)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    loss = chunked_cross_entropy(hidden, model.unembedding(), targets.reshape(-1), config.model.loss_chunk)
    return loss, stats


def _weight_metrics(old: TrainState, new: TrainState, plan: GemmPlan, log_every: int) -> Metrics:
    """By layer, on logged steps only (a pass over the weights): how many 2:4 decisions the step
    flipped, as a share of all weights, and the share of their energy that 2:4 keeps."""
    names = [(name, matrix) for name, matrix in (("W1", "up"), ("W2", "down")) if plan.sparse_weight(name)]

    def masks(state: TrainState, name: str, matrix: str) -> Array:
        weights = state.params["layers"]["ffn"][matrix]
        return jax.vmap(lambda w, v: weight_mask(name, w, v, plan))(weights, state.variables)

    def measure() -> Metrics:
        flips, kept = [], []
        for name, matrix in names:
            mask = masks(new, name, matrix)
            energy = jnp.square(new.params["layers"]["ffn"][matrix])
            flips.append(jnp.mean(mask ^ masks(old, name, matrix), axis=(1, 2)))
            kept.append(jnp.sum(energy * mask, axis=(1, 2)) / jnp.sum(energy, axis=(1, 2)))
        return {"flip_rate": sum(flips) / len(names), "kept_weight_energy": sum(kept) / len(names)}

    skipped = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(measure))
    return jax.lax.cond(old.step % log_every == 0, measure, lambda: skipped)
