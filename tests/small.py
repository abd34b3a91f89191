"""A model and a run small enough to train many times in a test."""

import dataclasses
import functools

import jax
import numpy as np

from sparse_lm import config as config_lib
from sparse_lm.training import ffn_weights
from sparse_lm.training.step import make_trainer
from sparse_lm.training.transitions import make_transitions

RECIPES = {
    "dense": {},
    "fst": {"mask_decay": 1e-4},
    "sste": {},
    "act24": {},
    "venom": {"v": 16, "m": 8, "experts": 4},
    "slices": {"v": 16, "m": 8},
    "dense_slices": {"v": 16, "m": 8},
    "experts24": {"v": 16},
}
"""Every recipe, with knobs that fit the model here."""
MIXTURE = {"model.experts": 4, "model.expert_dim": 64, "model.shared_expert_dim": 32}


def config_dict(recipe="dense", **changes):
    """A ConfigDict for 12 steps, sparse on 4..8, with flattened keys changed; for recipe experts24 of a mixture."""
    config = config_lib.default()
    config.update(steps=12, batch_size=4, seq_len=32, log_every=1, eval_every=6, checkpoint_every=3)
    config.model.update(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=320)
    config.model.update(dtype="float32", loss_chunk=64)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=2)
    config.sparsity.update(recipe=recipe, start_step=4, end_step=8, refresh_every=2, **RECIPES[recipe])
    config.update_from_flattened_dict((MIXTURE if recipe == "experts24" else {}) | changes)
    return config


def config(recipe="dense", **changes):
    return config_lib.parse(config_dict(recipe, **changes))


_DEFAULT = config()


def computed(config):
    """The configuration less what no program reads: its data, when it writes and flips, what it starts from."""
    names = "data", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "keep_every", "init_from"
    flips = {name: getattr(_DEFAULT.sparsity, name) for name in ("start_step", "end_step", "refresh_every", "leave")}
    sparsity = dataclasses.replace(config.sparsity, **flips)
    optimizer = dataclasses.replace(config.optimizer, max_skipped_steps=_DEFAULT.optimizer.max_skipped_steps)
    unread = {name: getattr(_DEFAULT, name) for name in names}
    return dataclasses.replace(config, sparsity=sparsity, optimizer=optimizer, **unread)


def compiled(config):
    """Trainer and transitions of a configuration: what is compiled once is shared by all tests of a process."""
    return _compiled(computed(config))


@functools.cache
def _compiled(config):
    trainer = make_trainer(config)
    return trainer, make_transitions(config, trainer.graphdef, trainer.layout)


@functools.cache
def _after_dense_steps(config, steps):
    trainer, _ = compiled(config)
    state = trainer.init()
    for step in range(steps):
        state, _ = trainer.steps["dense"](state, windows(config, step))
    return jax.device_get(state)


def after_dense_steps(config, steps):
    """The state of a run after its first steps, if they are dense; its own copy, to donate.

    Recipes differ in nothing then but in a state that no dense step reads: all begin with the same dense run.
    """
    dense = dataclasses.replace(config, sparsity=_DEFAULT.sparsity)
    state, model = _after_dense_steps(dense, steps), config.model
    recipe_state = jax.tree.map(
        lambda x: np.broadcast_to(x, (model.layers, *x.shape)),
        config.sparsity.recipe.init_state(*(w[0] for w in ffn_weights.matrices(state.params))),
    )
    return jax.device_put(dataclasses.replace(state, recipe_state=recipe_state))


@functools.cache
def _entered(config):
    _, transitions = compiled(config)
    return jax.device_get(transitions["enter"](after_dense_steps(config, 0), windows(config))[0])


def entered(config):
    """The state of a new run that enters its sparse phase at once; its own copy, to donate."""
    return jax.device_put(_entered(config))


def windows(config, step=0):
    """int32[B, S + 1] with structure to learn: each token mostly follows from the one before."""
    rng = np.random.default_rng(step)
    tokens = np.zeros((config.batch_size, config.seq_len + 1), np.int32)
    tokens[:, 0] = rng.integers(config.model.vocab_size, size=config.batch_size)
    for i in range(config.seq_len):
        noise = rng.integers(config.model.vocab_size, size=config.batch_size)
        follow = (tokens[:, i] * 7 + 3) % config.model.vocab_size
        tokens[:, i + 1] = np.where(rng.random(config.batch_size) < 0.9, follow, noise)
    return tokens
