"""Writes a trained model as a directory that transformers loads.

    python -m sparse_lm.export --workdir=runs/tiny --output=runs/tiny-hf [--checkpoint=best]

It is an `ArceeForCausalLM` (squared ReLU), a `LlamaForCausalLM` (a gate), a `Qwen3ForCausalLM` (a gate, and queries
and keys normed), a `Glm4MoeForCausalLM` or an `Ernie4_5_MoeForCausalLM` (gated experts; sigmoid or softmax scores), in
float32. A checkpoint of the sparse phase has the weights that its forward uses; one of a phase that is never left
(`sparsity.leave=False`) is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags
from safetensors import SafetensorError

from sparse_lm import entry_point
from sparse_lm.data.tokenizer import load_tokenizer
from sparse_lm.errors import OutputError
from sparse_lm.files import free_place
from sparse_lm.interop.hf_config import check_has_architecture
from sparse_lm.interop.hf_directory import write_hf_directory
from sparse_lm.interop.model_card import model_card
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.telemetry.metrics import read_metrics
from sparse_lm.training.workdir import load_config

_log = logging.getLogger(__name__)


def export(
    workdir: str | os.PathLike,
    output: str | os.PathLike,
    *,
    checkpoint: int | str = "latest",
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint of a run as safetensors, config.json, tokenizer files and a model card.

    JAX's first device, the CPU for the command line, holds the whole model meanwhile. `output` is a directory that is
    empty or does not exist. `checkpoint` is "latest", "best" (least held-out loss in training) or a step. A file has at
    most `shard_bytes` of weights, unless one tensor is larger.

    Raises:
      WorkdirError: there is no such checkpoint.
      ConfigError, DataError: config or tokenizer cannot be used, or no architecture of transformers is the model.
      OutputError: `output` is not empty, or cannot be written.
    """
    config = load_config(workdir)
    check_has_architecture(config.model)
    tokenizer = load_tokenizer(Path(workdir, "tokenizer.json"))
    restored, step = restore_for_dense(workdir, config, checkpoint)

    params = jax.device_get(restored)
    parameters = sum(p.size for p in jax.tree.leaves(params))
    # Of the held-out losses that the run has logged, one after this step that was computed with dense FFNs.
    evaluated = [line for line in read_metrics(workdir) if "eval_loss" in line and line["step"] + 1 == step]
    losses = [line["eval_loss"] for line in evaluated if line.get("phase") == "dense" or step == config.steps]
    card = model_card(config, step, parameters, next(iter(losses), None))
    with _new_directory(Path(output)) as directory:
        write_hf_directory(
            directory, model=config.model, params=params, seq_len=config.seq_len, tokenizer=tokenizer, card=card,
            shard_bytes=shard_bytes,
        )  # fmt: skip
    _log.info("step %d of %s is now in %s", step, workdir, output)


@contextlib.contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """Gives a directory to write, which takes the place of `output`, or of what a link leads to, once it is whole."""
    try:
        place = free_place(output)
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
    export(options.workdir, options.output, checkpoint=options.checkpoint)


def _define_flags() -> None:
    entry_point.define_run_flags()
    flags.DEFINE_string("output", None, "Directory to write: new or empty.", required=True)


cli = functools.partial(entry_point.run, main, _define_flags)

if __name__ == "__main__":
    cli()
