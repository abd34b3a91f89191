"""The training state and one training step.

A run compiles this step twice, once with dense FFNs and once with the recipe's. Both take and return the same
`TrainState`, so flipping between phases is choosing the other function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from sparse_lm import collectives
from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.config import Config
from sparse_lm.model import llama, mixture
from sparse_lm.model.linear import compiler_options
from sparse_lm.model.llama import Params
from sparse_lm.model.loss import chunked_cross_entropy
from sparse_lm.recipes import Recipe
from sparse_lm.recipes.weight_forms import WeightForms
from sparse_lm.training import ffn_weights
from sparse_lm.training.mesh.layout import BATCH, Layout, make_mesh
from sparse_lm.training.optimizer import gradient_norm, make_optimizer

Metrics = dict[str, Array]
Step = Callable[["TrainState", Array], tuple["TrainState", Metrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Holds everything that a run must save to go on as if it had not stopped."""

    step: Array  # int32[], steps taken; also the position in the data
    seed: Array  # uint32[], of all that is random: runs that differ in it share compiled steps
    params: Params  # float32 master weights; layers are stacked on a leading axis
    opt_state: optax.OptState
    recipe_state: Any  # what the recipe reads and does not train, [L, ...]
    skipped: Array  # int32[], steps skipped because loss or gradient was not finite
    skipped_in_a_row: Array  # int32[]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The pure functions of a run, compiled on first use. `state` arguments are donated."""

    init: Callable[[], TrainState]
    abstract_state: Callable[[], TrainState]  # shapes and dtypes of the state, and on a mesh its shardings
    steps: dict[str, Step]  # by phase: (state, windows int32[B, S + 1]) -> (state, metrics)
    graphdef: Any
    layout: Layout | None = None  # None: one device


def make_trainer(config: Config, devices: Sequence[jax.Device] | None = None) -> Trainer:
    """Makes the functions of a run, on all its devices if none are given. Nothing is compiled yet."""
    graphdef = llama.graphdef(config.model)
    seed = np.uint32(config.seed)
    init = functools.partial(_init, config=config)
    mesh = make_mesh(config, devices)
    layout = Layout(mesh, jax.eval_shape(init, seed), config.sparsity.recipe.neuron_major) if mesh else None
    step = functools.partial(_train_step, config=config, graphdef=graphdef, layout=layout)
    steps = {phase: functools.partial(step, recipe=config.recipe(phase)) for phase in ("dense", "sparse")}
    placed_init = jax.jit(init, out_shardings=layout.state if layout else None)
    return Trainer(
        init=functools.partial(placed_init, seed),
        abstract_state=functools.partial(jax.eval_shape, placed_init, seed),
        steps={phase: compiled(step, config, layout) for phase, step in steps.items()},
        graphdef=graphdef,
        layout=layout,
    )


def compiled(function: Step, config: Config, layout: Layout | None) -> Step:
    """Compiles a function of a state, which is donated, and a batch on its first use."""
    placed = (layout.state, layout.replicated) if layout else None
    options = compiler_options(config.model.precision)
    return jax.jit(function, donate_argnums=0, compiler_options=options, out_shardings=placed)


def _init(seed: Array, *, config: Config) -> TrainState:
    _, params = llama.init(config.model, jax.random.key(seed))
    one_layer = config.sparsity.recipe.init_state(*(w[0] for w in ffn_weights.matrices(params)))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        seed=seed,
        params=params,
        opt_state=make_optimizer(config).init(params),
        recipe_state=jax.tree.map(lambda x: jnp.broadcast_to(x, (config.model.layers, *x.shape)), one_layer),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def _train_step(
    state: TrainState, windows: Array, *, config: Config, graphdef: Any, layout: Layout | None, recipe: Recipe
) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    gradients = functools.partial(loss_and_gradients, config=config, graphdef=graphdef, recipe=recipe)
    if layout:
        specs = layout.specs((state.params, state.recipe_state))
        gradients = layout.local(gradients, (*specs, BATCH, P()), ((P(), P()), specs[0]))
    (loss, stats), grads = gradients(state.params, state.recipe_state, windows, key)
    # The loss decides whether weights are updated. So patterns are read before, and nothing of the weights is read
    # afterwards: otherwise XLA would update a copy of them.
    patterns, loss = jax.lax.optimization_barrier((ffn_weights.patterns(state.params, recipe), loss))
    good, params, opt_state, grad_norm = _update(state, loss, grads, config, recipe)
    if config.model.experts:
        params = ffn_weights.balance(params, stats[mixture.LOAD], good)
        stats |= {"load_entropy": mixture.load_entropy(stats[mixture.LOAD])}

    new_state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + ~good,
        skipped_in_a_row=jnp.where(good, 0, state.skipped_in_a_row + 1),
    )
    metrics = dict(
        stats | ffn_weights.watch(patterns, params, recipe, config.sparsity.dense_layers),
        loss=loss,
        grad_norm=grad_norm,
        skipped=new_state.skipped,
        skipped_in_a_row=new_state.skipped_in_a_row,
    )
    return new_state, metrics


def loss_and_gradients(
    params: Params,
    recipe_state: Any,
    windows: Array,
    key: Array,
    *,
    config: Config,
    graphdef: Any,
    recipe: Recipe,
    axes: Axes = ONE_DEVICE,
) -> tuple[tuple[Array, Metrics], Params]:
    """Computes the mean next-token cross entropy of the windows of a step, with statistics by layer, and its gradient.

    A step is made of equal parts, `config.microbatches` on each shard of the batch. Tokens are routed, and 2:4 patterns
    along tokens chosen, within a part, and each part draws its own random numbers: a step of n parts is the same
    however many of them follow one another and how many run side by side. Devices along `expert` route theirs as one
    part.

    `params` (f32), `recipe_state` and `windows` int32[B, S + 1] are this device's shards.

    Returns:
      ((loss f32[], statistics), gradients): the first two are the same on every device; statistics are means over
      parts.
    """
    parts_here = config.microbatches
    parts = parts_here * collectives.size(axes.batch)
    # Along `data` the gradients of several parts are added up before they travel, once.
    each_part = tuple(name for name in axes.batch if parts_here == 1 or name in (axes.fsdp, axes.expert))
    axes_of_part = dataclasses.replace(axes, batch=each_part)
    routed_over = axes.of_experts.batch
    # Sparse forms are chosen from the master weights. The layers read a copy in the computation's dtype, made
    # once a step, and so the gradients of their matrices come in that dtype.
    weights = llama.merge(graphdef, params).prepare_weights(recipe, recipe_state)
    compute_params = in_compute_dtype(params, config)
    loss_of_shard = functools.partial(
        forward_loss, config=config, graphdef=graphdef, recipe=recipe, weights=weights, axes=axes_of_part
    )

    def share_of_loss(params: Params, windows: Array, key: Array) -> tuple[Array, tuple[Array, Metrics]]:
        loss, stats = loss_of_shard(params, recipe_state, windows, key)
        shares = parts * collectives.size(axes.tensor)
        objective, loss = (a / shares if shares > 1 else a for a in (loss + mixture.auxiliary_loss(stats), loss))
        return objective, (loss, stats)

    def part(number: Array | int, windows: Array) -> tuple[tuple[Array, Metrics], Params]:
        part_key = jax.random.fold_in(key, number) if parts_here * collectives.size(routed_over) > 1 else key
        (_, loss_and_stats), grads = jax.value_and_grad(share_of_loss, has_aux=True)(compute_params, windows, part_key)
        return loss_and_stats, grads

    first = collectives.index(routed_over) * parts_here
    if parts_here == 1:
        (loss, stats), grads = part(first, windows)
    else:
        numbers = first + jnp.arange(parts_here)
        (loss, stats), grads = _sum_of_parts(part, numbers, windows.reshape(parts_here, -1, windows.shape[1]))
        stats = jax.tree.map(lambda total: total / parts_here, stats)
        grads = collectives.total(grads, tuple(name for name in axes.batch if name not in each_part))
    return (collectives.total(loss, axes.all), collectives.mean(stats, axes.all)), grads


def _sum_of_parts(part: Callable[[Array, Array], Any], numbers: Array, windows: Array) -> Any:
    """Sums in float32 what `part` returns for each number and its windows, one after the other."""

    def add(total: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(*inputs)), None

    shapes = jax.eval_shape(part, numbers[0], windows[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, (numbers, windows))[0]


@functools.partial(jax.named_call, name="optimizer")
def _update(
    state: TrainState, loss: Array, grads: Params, config: Config, recipe: Recipe
) -> tuple[Array, Params, optax.OptState, Array]:
    """Returns whether the step is good, parameters and optimizer state after it, and the gradients' norm.

    A bad step leaves no trace but a count: the weights and moments of before are kept. Where the norm is finite, so are
    the squares of all gradients, and what becomes of them.
    """
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)  # as they are read, with no pass of their own
    grad_norm = gradient_norm(grads)
    after_clip = ffn_weights.adjust_gradients(recipe, state.recipe_state, config.sparsity.dense_layers)
    updates, opt_state = make_optimizer(config, after_clip).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    kept = optax.tree.where(good, (params, opt_state), (state.params, state.opt_state))
    return good, *kept, grad_norm


@jax.named_call
def in_compute_dtype(params: Params, config: Config) -> Params:
    """Casts the layers' matrices to the dtype of the computation.

    Norm scales, routers and the two tables stay as they are: the embedding's gradient is scattered in float32, the
    unembedding's is summed over chunks in float32.
    """
    dtype = config.model.dtype

    def cast(path: Any, leaf: Array) -> Array:
        if not llama.is_matrix(path) or path[-1].key == mixture.ROUTER:
            return leaf
        if config.microbatches > 1 or not config.model.unroll_layers:  # loops, which read the whole
            return leaf.astype(dtype)
        # A layer at a time, since XLA would else copy each one out of the whole once more for the backward.
        return jnp.stack([jax.lax.optimization_barrier(layer.astype(dtype)) for layer in leaf])

    return dict(params, layers=jax.tree.map_with_path(cast, params["layers"]))


def forward_loss(
    params: Params,
    recipe_state: Any,
    windows: Array,
    key: Array | None,
    *,
    config: Config,
    graphdef: Any,
    recipe: Recipe,
    weights: tuple[WeightForms, WeightForms] | None = None,
    axes: Axes = ONE_DEVICE,
) -> tuple[Array, Metrics]:
    """Computes the mean next-token cross entropy of windows int32[B, S + 1], in nats, and statistics by layer.

    On a mesh: of this shard's windows, and of them this device's share of the tokens along `tensor`.
    """
    model = llama.merge(graphdef, params)
    options = dict(recipe=recipe, recipe_state=recipe_state, dense_layers=config.sparsity.dense_layers)
    hidden, stats = model(windows[:, :-1], key=key, weights=weights, axes=axes, **options)
    hidden = collectives.split_over_tensor(hidden.reshape(-1, hidden.shape[-1]), axes)
    targets = collectives.split_over_tensor(windows[:, 1:].reshape(-1), axes)
    unembedding = collectives.enter_tensor(model.unembedding(axes), axes)
    return chunked_cross_entropy(hidden, unembedding, targets, config.model.loss_chunk, config.model.precision), stats
