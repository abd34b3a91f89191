"""Sets of runs that are compared with one another: a base configuration, and what each run changes of it.

Within a suite all runs see the same tokens in the same order for a seed; the recipe is all that differs.
"""

from __future__ import annotations

from typing import Any

from configs import llama60m
from sparse_lm import config as config_lib

Overrides = dict[str, Any]

_VENOM = {"sparsity.recipe": "venom"}
_SETS = _VENOM | {"sparsity.selection": "cluster_sets"}

_SMALL = {
    "steps": 1500,
    "batch_size": 64,
    "seq_len": 512,
    "eval_every": 250,
    "checkpoint_every": 500,
    "log_every": 10,
    "model.vocab_size": 8192,
    "data.eval_windows": 512,
    "optimizer.warmup_steps": 150,
    "sparsity.start_step": 150,
    "sparsity.end_step": 900,
}
"""Half of the steps sparse: 10% dense, 50% sparse, 40% dense; 49 M tokens."""

SUITES: dict[str, tuple[Overrides, dict[str, Overrides]]] = {
    "learning_rate": (
        _SMALL | {"sparsity.recipe": "dense"},
        {f"dense lr {rate:g}": {"optimizer.learning_rate": rate} for rate in (1e-3, 2e-3, 4e-3)},
    ),
    "recipes": (
        _SMALL,
        {
            "dense": {"sparsity.recipe": "dense"},
            "act24": {"sparsity.recipe": "act24"},
            "sste": {"sparsity.recipe": "sste"},
            "magnitude 2:16": _VENOM | {"sparsity.selection": "magnitude"},
            "sets 2:16, 64 clusters": _SETS | {"sparsity.clusters": 64},
            "sets of 64-neuron runs 2:16, 16 clusters": _SETS | {"sparsity.clusters": 16, "sparsity.neuron_run": 64},
            "sets of 64-neuron runs 2:8, 16 clusters": _SETS
            | {"sparsity.clusters": 16, "sparsity.neuron_run": 64, "sparsity.m": 8},
            "slices 2:16": _VENOM | {"sparsity.selection": "slices", "sparsity.clusters": 4},
            "slices 2:8": _VENOM | {"sparsity.selection": "slices", "sparsity.clusters": 2, "sparsity.m": 8},
        },
    ),
}
"""By name: overrides of configs/llama60m.py for all runs, and by run."""


def config(suite: str, run: str, seed: int, data: str) -> config_lib.Config:
    """The configuration of one run on the corpus at `data`."""
    base, runs = SUITES[suite]
    config = llama60m.get_config()
    config.update_from_flattened_dict(base | runs[run] | {"seed": seed, "data.path": data})
    return config_lib.parse(config)
