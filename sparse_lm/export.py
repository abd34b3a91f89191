"""Writes a trained model as a directory that transformers loads.

    python -m sparse_lm.export --workdir=runs/tiny --output=runs/tiny-hf [--checkpoint=best] [--format=sparse24]

It is an `ArceeForCausalLM` (squared ReLU), a `LlamaForCausalLM` (a gate), a `Qwen3ForCausalLM` (a gate, and queries
and keys normed), a `Glm4MoeForCausalLM` or an `Ernie4_5_MoeForCausalLM` (gated experts; sigmoid or softmax scores), in
float32. A checkpoint of the sparse phase has the weights that its forward uses; a run that stays sparse
(`sparsity.leave=False`) is refused.
`--format=sparse24` adds a directory `sparse24` in it: the same model with its 2:4 matrices compressed; see
`interop.bitmask_24`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags
from safetensors import SafetensorError

from sparse_lm import entry_point
from sparse_lm.config import Config
from sparse_lm.data.tokenizer import load_tokenizer
from sparse_lm.errors import OutputError, WorkdirError
from sparse_lm.interop.hf_config import check_has_architecture
from sparse_lm.interop.hf_directory import write_hf_directory
from sparse_lm.interop.model_card import model_card
from sparse_lm.recipes import RECIPES
from sparse_lm.recipes.activations import GATES
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.workdir import load_config

_log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
FORMATS = ("dense", "sparse24")


def export(
    workdir: str | os.PathLike,
    output: str | os.PathLike,
    *,
    checkpoint: int | str = "latest",
    weight_format: str = "dense",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint of a run as safetensors, config.json, tokenizer files and a model card.

    JAX's first device, the CPU for the command line, holds the whole model meanwhile.

    Args:
      workdir: of the run.
      output: a directory that is empty or does not exist.
      checkpoint: "latest", "best" (least held-out loss in training) or a step.
      weight_format: "dense", or "sparse24" to add the directory `sparse24`.
      shard_bytes: the most bytes of weights in a file, unless one tensor is larger.

    Raises:
      WorkdirError: there is no such checkpoint, or it has no 2:4 weights that "sparse24" could write.
      ConfigError, DataError: config or tokenizer cannot be used, or no architecture of transformers is the model.
      OutputError: `output` is not empty, or cannot be written.
    """
    config = load_config(workdir)
    check_has_architecture(config.model)
    tokenizer_file = Path(workdir, "tokenizer.json")
    load_tokenizer(tokenizer_file)
    layers_24 = _layers_24(workdir, config) if weight_format == "sparse24" else []
    restored, step = restore_for_dense(workdir, config, checkpoint)
    if layers_24 and (step == 0 or config.phase(step - 1) == "dense"):
        phase = config.sparsity.phase
        steps = f"{phase.start + 1}..{phase.stop}" if phase else "none"
        reason = f"--format=sparse24 needs a checkpoint of the sparse phase (steps {steps}); {step} is a dense one"
        raise WorkdirError(workdir, reason)

    params = jax.device_get(restored)
    parameters = sum(p.size for p in jax.tree.leaves(params))
    # Of the held-out losses that the run has logged, one after this step that was computed with dense FFNs.
    evaluated = [line for line in read_metrics(workdir) if "eval_loss" in line and line["step"] + 1 == step]
    losses = [line["eval_loss"] for line in evaluated if line["phase"] == "dense" or step == config.steps]
    card = model_card(config, step, parameters, next(iter(losses), None))
    write = functools.partial(
        write_hf_directory, model=config.model, params=params, seq_len=config.seq_len, tokenizer_file=tokenizer_file,
        card=card, shard_bytes=shard_bytes,
    )  # fmt: skip
    with _new_directory(Path(output)) as directory:
        write(directory)
        if layers_24:
            (directory / "sparse24").mkdir()
            sparse = range(config.sparsity.dense_layers, config.model.layers)
            modules = [f"model.layers.{layer}.mlp.{name}" for layer in sparse for name in layers_24]
            write(directory / "sparse24", modules_24=modules)
    _log.info("step %d of %s is now in %s", step, workdir, output)
    if layers_24:
        _log.info("with %s compressed as 2:4 in %s", " and ".join(layers_24), Path(output, "sparse24"))
        if "down_proj" not in layers_24:
            _log.warning("down_proj stays dense there: it is 2:4 along its outputs, the layout wants inputs")


def _layers_24(workdir: str | os.PathLike, config: Config) -> list[str]:
    """Names the linear layers of an FFN that the recipe leaves 2:4 along their inputs, or refuses one that leaves none.

    A W2 that is 2:4 for the backward product dY = dO W2^T does not fit the layout: that contracts the outputs of
    down_proj, and groups run down the columns of that layer's matrix.
    """
    recipe = config.sparsity.recipe
    if not recipe.sparse_along_inputs:
        fitting = ", ".join(name for name, recipe in RECIPES.items() if recipe.sparse_along_inputs)
        reason = f"--format=sparse24 needs a recipe with 2:4 weights ({fitting}), not {recipe.name!r}"
        raise WorkdirError(workdir, reason)
    of_up = ("gate_proj", "up_proj") if config.model.activation in GATES else ("up_proj",)
    modules = {"up": of_up, "down": ("down_proj",)}
    return [module for name in recipe.sparse_along_inputs for module in modules[name]]


@contextlib.contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """Gives a directory to write, which takes the place of `output`, or of what a link leads to, once it is whole."""
    try:
        place = Path(os.path.realpath(output))  # Path.resolve raises RuntimeError where links go in a circle
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise OutputError(output, "must be a new or an empty directory")
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as partial:
            directory = Path(partial, "model")
            directory.mkdir()
            yield directory
            directory.rename(place)
    except (OSError, SafetensorError) as error:
        raise OutputError(output, f"cannot be written: {error}") from error


def main() -> None:
    options = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # what trained on many GPUs need not fit on one
    export(
        options.workdir,
        options.output,
        checkpoint=options.checkpoint,
        weight_format=options.format,
        shard_bytes=int(options.shard_gb * 1e9),
    )


def _define_flags() -> None:
    entry_point.define_run_flags()
    flags.DEFINE_string("output", None, "Directory to write: new or empty.", required=True)
    flags.DEFINE_enum("format", "dense", FORMATS, "Of the weights; sparse24 adds a directory of 2:4 ones.")
    flags.DEFINE_float("shard_gb", SHARD_BYTES / 1e9, "The most gigabytes of weights in a file.", lower_bound=1e-6)
    flags.register_validator("shard_gb", math.isfinite, "must be finite")


cli = functools.partial(entry_point.run, main, _define_flags)

if __name__ == "__main__":
    cli()
