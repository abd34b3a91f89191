"""Writes a trained model as a directory that transformers loads.

    python -m sparse_lm.export --workdir=runs/tiny --output=runs/tiny-hf [--checkpoint=best] [--format=sparse24]

It is an `ArceeForCausalLM` (squared ReLU), a `LlamaForCausalLM` (a gate) or a `Qwen3ForCausalLM` (a gate, and queries
and keys normed), in float32. A model in its sparse phase leaves with the weights that its forward uses.
`--format=sparse24` adds a directory `sparse24` in it: the same model with its 2:4 matrices compressed; see
`interop.bitmask_24`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from safetensors import SafetensorError

from sparse_lm import entry_point
from sparse_lm.config import Config, ConfigError
from sparse_lm.data.tokenizer import load_tokenizer
from sparse_lm.interop import bitmask_24
from sparse_lm.interop.hf_config import has_architecture
from sparse_lm.interop.hf_directory import HfModel
from sparse_lm.interop.hf_weights import weights
from sparse_lm.interop.model_card import model_card
from sparse_lm.recipes import RECIPES
from sparse_lm.recipes.activations import GATES
from sparse_lm.training.checkpoints.layerwise import LayerwiseParams
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.workdir import WorkdirError, load_config

_log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
FORMATS = ("dense", "sparse24")


class OutputError(ValueError):
    """A directory that cannot be written."""

    def __init__(self, output: str | os.PathLike, reason: str):
        super().__init__(f"--output={os.fspath(output)}: {reason}")


def export(
    workdir: str | os.PathLike,
    output: str | os.PathLike,
    *,
    checkpoint: int | str = "latest",
    weight_format: str = "dense",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint of a run as safetensors, config.json, tokenizer files and a model card.

    Args:
      workdir: of the run.
      output: a directory that is empty or does not exist.
      checkpoint: "latest", "best" (least held-out loss in training) or a step.
      weight_format: "dense", or "sparse24" to add the directory `sparse24`.
      shard_bytes: the most bytes of weights in a file, unless one tensor is larger. Memory holds less than two.

    Raises:
      ValueError: `weight_format` is none of these.
      WorkdirError: there is no such checkpoint, or it has no 2:4 weights that "sparse24" could write.
      ConfigError, DataError: config or tokenizer cannot be used, or no architecture of transformers is the model.
      OutputError: `output` is not empty, or cannot be written.
    """
    if weight_format not in FORMATS:
        raise ValueError(f"weight_format = {weight_format!r}: must be one of {', '.join(FORMATS)}")
    config = load_config(workdir)
    if config.model.experts:
        allowed = "must be 0 to export: no architecture of transformers has squared-ReLU experts and rotary attention"
        raise ConfigError("model.experts", config.model.experts, allowed)
    if not has_architecture(config.model):
        allowed = "must be False to export without a gate: no architecture of transformers has squared ReLU and QK norm"
        raise ConfigError("model.qk_norm", config.model.qk_norm, allowed)
    tokenizer = Path(workdir, "tokenizer.json")
    load_tokenizer(tokenizer)
    params = LayerwiseParams(workdir, config, checkpoint)
    layers_24 = _layers_24(workdir, config, params.step) if weight_format == "sparse24" else []

    directory = _make_output(output)
    shapes, eval_loss = [w.shape for w in weights(config.model)], _eval_loss(workdir, config, params.step)
    card = model_card(config, params.step, shapes, eval_loss)
    model = HfModel(config.model, config.seq_len, params.read, tokenizer, card)
    with _whole_or_empty(directory):
        model.write(directory, shard_bytes)
        if layers_24:
            (directory / "sparse24").mkdir()
            compressed = dataclasses.replace(model, layers_24=layers_24, dense_layers=config.sparsity.dense_layers)
            compressed.write(directory / "sparse24", shard_bytes)
    _log.info("step %d of %s is now in %s", params.step, workdir, directory)
    if layers_24:
        _log.info("with %s compressed as 2:4 in %s", " and ".join(layers_24), directory / "sparse24")
        if "down_proj" not in layers_24:
            _log.warning("down_proj stays dense there: it is 2:4 along its outputs, the layout wants inputs")


def _layers_24(workdir: str | os.PathLike, config: Config, step: int) -> list[str]:
    """Returns the linear layers to compress, or refuses weights that are not 2:4."""
    sparsity = config.sparsity
    layers = bitmask_24.fitting_layers(sparsity.recipe, gated=config.model.activation in GATES)
    if not layers:
        fitting = ", ".join(name for name, recipe in RECIPES.items() if recipe.sparse_along_inputs)
        reason = f"--format=sparse24 needs a recipe with 2:4 weights ({fitting}), not {sparsity.recipe.name!r}"
        raise WorkdirError(workdir, reason)
    if step == 0 or config.phase(step - 1) == "dense":
        phase = sparsity.phase
        steps = f"{phase.start + 1}..{phase.stop}" if phase else "none"
        reason = f"--format=sparse24 needs a checkpoint of the sparse phase (steps {steps}); {step} is a dense one"
        raise WorkdirError(workdir, reason)
    return layers


def _make_output(output: str | os.PathLike) -> Path:
    directory = Path(output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise OutputError(output, "must be a new or an empty directory")
    except OSError as error:
        raise OutputError(output, f"cannot be written: {error.strerror}") from error
    return directory


@contextlib.contextmanager
def _whole_or_empty(directory: Path) -> Iterator[None]:
    """Empties the directory if writing fails: half of a model might look whole, and the next try would refuse it."""
    try:
        yield
    except BaseException as error:
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if isinstance(error, (OSError, SafetensorError)):
            raise OutputError(directory, f"cannot be written: {error}") from error
        raise


def _eval_loss(workdir: str | os.PathLike, config: Config, step: int) -> float | None:
    """Finds the held-out loss after `step` steps in the run's metrics, if it was evaluated then with dense FFNs."""
    try:
        lines = list(read_metrics(workdir))
    except FileNotFoundError:
        return None
    evaluated = [line for line in lines if "eval_loss" in line and line["step"] + 1 == step]
    return next((line["eval_loss"] for line in evaluated if line["phase"] == "dense" or step == config.steps), None)


def main() -> None:
    options = flags.FLAGS
    shard_bytes = int(options.shard_gb * 1e9)
    export(
        options.workdir,
        options.output,
        checkpoint=options.checkpoint,
        weight_format=options.format,
        shard_bytes=shard_bytes,
    )


def _define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    flags.DEFINE_string("output", None, "Directory to write: new or empty.", required=True)
    entry_point.define_checkpoint_flag()
    flags.DEFINE_enum("format", "dense", FORMATS, "Of the weights; sparse24 adds a directory of 2:4 ones.")
    flags.DEFINE_float("shard_gb", SHARD_BYTES / 1e9, "The most gigabytes of weights in a file.", lower_bound=1e-6)


def cli() -> None:
    """Runs the command line."""
    entry_point.run(main, _define_flags, (OutputError,))


if __name__ == "__main__":
    cli()
