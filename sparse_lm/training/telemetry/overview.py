"""What a run prints before its first step."""

from __future__ import annotations

import jax
import numpy as np

from sparse_lm.config import Config
from sparse_lm.ops import backends
from sparse_lm.training.step import Trainer, TrainState


def print_implementations(config: Config, trainer: Trainer, state: TrainState) -> None:
    """Prints which products of the sparse phase are sparse, and which backend runs each operation."""
    if not config.sparsity.phase:
        return
    windows = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    with backends.record() as used:
        jax.eval_shape(trainer.sparse_step, state, windows)
    print("sparse phase:")
    for product, operand in config.sparsity.recipe.products.items():
        print(f"  {product:<18} {operand}")
    if config.sparsity.dense_layers:
        print(f"  {'dense':<18} FFNs of the first {config.sparsity.dense_layers} layers")
    print("implementations:")
    width = max(map(len, used), default=0)  # none if this process has traced the step before
    for op, names in sorted(used.items()):
        print(f"  {op:<{width}} {', '.join(sorted(names))}")
