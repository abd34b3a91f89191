"""The state that a process starts to train from: a checkpoint's, a pretrained model's, or a random one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_lm.config import Config, with_tokenizer
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.checkpoints.saved_checkpoint import saved_checkpoints
from sparse_lm.training.step import Trainer, TrainState
from sparse_lm.training.workdir import load_config, meaning


def open_pretrained(config: Config, workdir: str) -> tuple[Config, Pretrained | None]:
    """Opens the model that `config.init_from` names, unless the run has a checkpoint to go on from.

    Returns the configuration with the model's tokenizer, and the model or None; raises what `Pretrained` does.
    """
    if not config.init_from:
        return config, None
    if saved_checkpoints(workdir):  # the model may be gone; its tokenizer the run keeps
        return with_tokenizer(config, config.data.tokenizer or load_config(workdir).data.tokenizer), None
    pretrained = Pretrained(config)
    return pretrained.config_with_tokenizer(), pretrained


def open_checkpoints(workdir: str, config: Config) -> Checkpoints:
    """Opens the checkpoints of a run, which keep what its configuration says."""
    return Checkpoints(workdir, config.keep_checkpoints, every=config.keep_every, run=meaning(config))


def restore_or_start(trainer: Trainer, checkpoints: Checkpoints, pretrained: Pretrained | None) -> TrainState:
    """Restores the newest checkpoint; without one, starts from the pretrained model or from random weights."""
    state = checkpoints.restore_latest(trainer.abstract_state())
    if state is not None:
        return state
    state = trainer.init()
    if pretrained is None:
        return state
    params, layout = pretrained.params(), trainer.layout
    placed = jax.device_put(params, layout.state.params) if layout else jax.tree.map(jnp.array, params)
    return dataclasses.replace(state, params=placed)
