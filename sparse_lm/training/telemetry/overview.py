"""Prints what a run is before its first step."""

from __future__ import annotations

import itertools
import logging

import jax
import numpy as np

from sparse_lm.config import Config, ModelConfig
from sparse_lm.data.dataset import Data
from sparse_lm.model.attention import attention_implementation
from sparse_lm.ops import backends
from sparse_lm.training.step import Trainer, TrainState

_log = logging.getLogger(__name__)


def print_overview(config: Config, workdir: str, trainer: Trainer, data: Data, state: TrainState) -> None:
    """Prints size, tokens, devices and phases of a run, and what its sparse phase computes with what."""
    start, devices = int(state.step), jax.devices()
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    parts = data.shares or ((data, 1.0),)
    read = config.steps * config.batch_size
    epochs = [read * share / len(part.train) for part, share in parts]
    total = config.steps * config.tokens_per_step
    shown = " and ".join(f"{times:.2g}" for times in epochs)
    facts = {
        "parameters": f"{parameters:,}{_active(config.model, parameters)}",
        "data": data.describe(),
        "tokens": f"{config.tokens_per_step:,} a step, {total:,} in all, {shown} epochs",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "attention": {"xla": "XLA", "cudnn": "cuDNN"}[attention_implementation(np.dtype(config.model.dtype))],
        "phases": ", ".join(_phases(config)),
    }
    print(f"{workdir}: {f'going on from step {start}' if start else 'starting'}")
    _print_table(facts)
    for (part, _), times in zip(parts, epochs, strict=True):
        if times > 1:
            _log.warning(
                "every training window of %s is read %.1f times: steps take more than it has", part.directory, times
            )
    if not config.sparsity.phase:
        return
    print("sparse phase:")
    _print_table(config.sparsity.recipe.products)
    if config.sparsity.dense_layers:
        _print_table({"dense": f"FFNs of the first {config.sparsity.dense_layers} layers"})
    windows = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    with backends.record() as used:
        jax.eval_shape(trainer.sparse_step, state, windows)
    if used:  # nothing if this process has traced the step before
        print("implementations:")
        _print_table({op: ", ".join(map(backends.describe, sorted(names))) for op, names in sorted(used.items())})


def _active(model: ModelConfig, parameters: int) -> str:
    """Says how many of a mixture's parameters a token meets."""
    if not model.experts:
        return ""
    idle = 2 * model.layers * (model.experts - model.experts_per_token) * model.expert_dim * model.dim
    return f", of which a token meets {parameters - idle:,}"


def _phases(config: Config) -> list[str]:
    """Names each phase with its first and last step, such as "sparse 60..159"."""
    groups = [(phase, list(steps)) for phase, steps in itertools.groupby(range(config.steps), config.phase)]
    return [f"{phase} {steps[0]}..{steps[-1]}" for phase, steps in groups]


def _print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        indented = value.replace("\n", "\n" + " " * (width + 4))
        print(f"  {name:<{width}}  {indented}")
