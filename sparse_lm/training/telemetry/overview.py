"""Prints what a run is before its first step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import jax
import numpy as np

from sparse_lm.config import Config
from sparse_lm.data.dataset import Data
from sparse_lm.errors import ConfigError
from sparse_lm.interop.hf_config import architecture, check_has_architecture
from sparse_lm.model.attention import attention_implementation
from sparse_lm.ops import backends
from sparse_lm.ops.activations import matrices
from sparse_lm.training.step import Trainer, TrainState

_log = logging.getLogger(__name__)


def print_overview(
    config: Config, workdir: str, trainer: Trainer, data: Data, state: TrainState, changes: Sequence[str] = ()
) -> None:
    """Prints size, tokens, devices and phases of a run, and what its sparse phase computes with what.

    `changes` are what a resumed run changes (`check_same_config`). Raises ConfigError if the backend that is named does
    not compute what a sparse step does.
    """
    for change in changes:
        _log.warning("%s", change)
    start, devices, model = int(state.step), jax.devices(), config.model
    parameters = f"{(count := sum(x.size for x in jax.tree.leaves(state.params))):,}"
    if model.experts:
        neurons = model.layers * (model.experts - model.experts_per_token) * model.expert_dim
        idle = matrices(model.activation) * neurons * model.dim
        parameters += f", of which a token meets {count - idle:,}"
    windows = config.steps * config.batch_size
    read = {part.directory: windows * share / len(part.train) for part, share in data.shares or ((data, 1.0),)}
    epochs = {directory: f"{times:.3g}" for directory, times in read.items()}
    attention = attention_implementation(np.dtype(model.dtype), model.head_width)
    phase = config.sparsity.phase
    bounds = itertools.pairwise(sorted({0, config.steps, *((phase.start, phase.stop) if phase else ())}))
    print(f"{workdir}: {f'going on from step {start}' if start else 'starting'}")
    _print_table(
        {
            "parameters": parameters,
            "data": data.describe(),
            "tokens": f"{config.tokens_per_step:,} a step, {config.steps * config.tokens_per_step:,} in all, "
            f"{' and '.join(epochs.values())} epochs",
            "devices": f"{config.mesh.devices} x {devices[0].device_kind}"
            + (f", of {len(devices)}" if len(devices) > config.mesh.devices else ""),
            "attention": {"xla": "XLA", "cudnn": "cuDNN"}[attention],
            "export": _architecture(config),
            "phases": ", ".join(f"{config.phase(first)} {first}..{end - 1}" for first, end in bounds),
        }
    )
    for directory, times in epochs.items():
        if float(times) > 1:
            _log.warning("every training window of %s is read %s times: steps take more than it has", directory, times)
    if not phase:
        return
    print("sparse phase:")
    dense = config.sparsity.dense_layers
    _print_table(config.sparsity.recipe.products | ({"dense layers": f"0..{dense - 1}"} if dense else {}))
    batch = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    try:
        with backends.record() as used:
            jax.eval_shape(trainer.steps["sparse"], state, batch)
    except NotImplementedError as error:
        if not (name := config.sparsity.recipe.implementation):
            raise
        raise ConfigError("sparsity.implementation", name, str(error)) from error
    if used:  # nothing if this process has traced the step before
        print("implementations:")
        _print_table({op: ", ".join(map(backends.describe, sorted(names))) for op, names in sorted(used.items())})


def _architecture(config: Config) -> str:
    """Names the class that transformers loads an export of this run as, or says why there is none."""
    try:
        check_has_architecture(config.model)
    except ConfigError as error:
        return f"none: {error}"
    return "none: it stays sparse" if config.sparsity.stays else architecture(config.model)["architectures"][0]


def _print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        indented = value.replace("\n", "\n" + " " * (width + 4))
        print(f"  {name:<{width}}  {indented}")
