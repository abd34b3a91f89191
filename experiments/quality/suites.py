"""Sets of runs that are compared with one another: a base configuration, and what each run changes of it.

Within a suite all runs see the same tokens in the same order for a seed; the recipe is all that differs.
"""

from __future__ import annotations

from typing import Any

from configs import llama60m
from sparse_lm import config as config_lib

Overrides = dict[str, Any]


def _base(steps: int, **overrides: Any) -> Overrides:
    """32,768 tokens a step; 10% of the steps dense, 50% sparse, 40% dense."""
    return {
        "steps": steps,
        "batch_size": 64,
        "seq_len": 512,
        "eval_every": 250,
        "checkpoint_every": 500,
        "log_every": 10,
        "model.vocab_size": 16_384,
        "data.eval_windows": 512,
        "optimizer.warmup_steps": steps // 10,
        "optimizer.schedule": "cosine",
        "sparsity.start_step": steps // 10,
        "sparsity.end_step": 6 * steps // 10,
        "sparsity.dense_layers": 0,
        **overrides,
    }


_DENSE = {"sparsity.recipe": "dense"}
_VENOM = {
    "sparsity.recipe": "venom",
    "sparsity.selection": "magnitude",
    "sparsity.centres": "neurons",
    "sparsity.weight_gradients": "magnitude",
}
_SLICES = _VENOM | {"sparsity.selection": "slices", "sparsity.clusters": 4}
_SLICES_OF_8 = _SLICES | {"sparsity.m": 8, "sparsity.clusters": 2}
_SETS = _VENOM | {"sparsity.selection": "cluster_sets", "sparsity.clusters": 64}
_RUNS = _SETS | {"sparsity.neuron_run": 64}
_16 = {"sparsity.clusters": 16}
_TOKENS = {"sparsity.centres": "tokens"}
_TOKENS_ONCE = _TOKENS | {"sparsity.refresh_every": 1_000_000}  # centres stay where the entry places them
_MVUE = {"sparsity.weight_gradients": "mvue"}
_FIRST_DENSE = {"sparsity.dense_layers": 1}
_WSD = {"optimizer.schedule": "wsd", "optimizer.decay_steps": 200}


_FASTER = {"optimizer.warmup_steps": 306, "optimizer.learning_rate": 2e-3}


def _sparse(start: int, end: int) -> Overrides:
    return {"sparsity.start_step": start, "sparsity.end_step": end}


_EARLIER = _sparse(102, 3162)
_LONG_WSD = (
    _base(6120)
    | _sparse(306, 3366)
    | {"eval_every": 765, "optimizer.learning_rate": 1.4e-3}
    | {"optimizer.schedule": "wsd", "optimizer.decay_steps": 1224}
)


# Results of sets and runs, but for those "following", are of ones chosen by a dense forward, about centres that stay,
# whose code is no longer in sparse_lm.
SUITES: dict[str, tuple[Overrides, dict[str, Overrides]]] = {
    "learning_rate": (
        _base(1500) | _DENSE,
        {f"dense lr {rate:g}": {"optimizer.learning_rate": rate} for rate in (1e-3, 2e-3, 4e-3)},
    ),
    "recipes": (
        _base(1000),
        {
            "dense": _DENSE,
            "runs 2:16, 64 token centres": _RUNS | _TOKENS,
            "runs 2:16, 16 token centres": _RUNS | _16 | _TOKENS,
            "runs 2:16, 16 neuron centres": _RUNS | _16,
            "sets 2:16, 64 neuron centres": _SETS,
            "sets 2:16, 64 token centres": _SETS | _TOKENS,
            "slices 2:16, neuron centres": _SLICES,
            "slices 2:16, token centres": _SLICES | _TOKENS_ONCE,
            "magnitude 2:16": _VENOM | _16,
            "magnitude 2:16, v 64": _VENOM | _16 | {"sparsity.v": 64},
            "magnitude 2:16, v 256": _VENOM | _16 | {"sparsity.v": 256},
            "act24": {"sparsity.recipe": "act24"},
            "act24, no neuron dense": {"sparsity.recipe": "act24", "sparsity.dense_features": 0.0},
            "sste": {"sparsity.recipe": "sste"},
            "runs 2:8, 64 token centres": _RUNS | _TOKENS | {"sparsity.m": 8},
            "sets 2:8, 64 token centres": _SETS | _TOKENS | {"sparsity.m": 8},
            "slices 2:8, token centres": _SLICES_OF_8 | _TOKENS_ONCE,
            "magnitude 2:8": _VENOM | _16 | {"sparsity.m": 8},
            "fst": {"sparsity.recipe": "fst"},
        },
    ),
    # Of "runs 2:16, 64 token centres", one change each.
    "ablations": (
        _base(1000) | _RUNS | _TOKENS,
        {
            "sparse 25%": {"sparsity.end_step": 350},
            "sparse 75%": {"sparsity.end_step": 850},
            "sparse 90%": {"sparsity.end_step": 1000},
            "no dense warm-up": {"sparsity.start_step": 0, "sparsity.end_step": 500},
            "dense warm-up 30%": {"sparsity.start_step": 300, "sparsity.end_step": 800},
            "256 clusters": {"sparsity.clusters": 256},
            "runs of 128": {"sparsity.neuron_run": 128},
            "2:32": {"sparsity.m": 32},
            "l2": {"sparsity.distance": "l2"},
            "refresh every 10": {"sparsity.refresh_every": 10},
            "no refresh": {"sparsity.refresh_every": 1000},
            "full dense weights": {"sparsity.dense_weights": "full"},
            "moments reset": {"sparsity.moments": "reset"},
            "first moments reset": {"sparsity.moments": "reset_first"},
        },
    ),
    # A constant rate that falls over the last fifth of the steps, so that the flip out comes at the full rate.
    "wsd": (
        _base(1000) | _WSD,
        {
            "dense": _DENSE,
            "slices 2:16": _SLICES | _TOKENS_ONCE,
            "slices 2:16, sparse 50 to 800": _SLICES | _TOKENS_ONCE | _sparse(50, 800),
            "slices 2:16, sparse 0 to 900": _SLICES | _TOKENS_ONCE | _sparse(0, 900),
            "magnitude 2:16": _VENOM | _16,
            "dense, lr 0.0014": _DENSE | {"optimizer.learning_rate": 1.4e-3},
            "dense, lr 0.0028": _DENSE | {"optimizer.learning_rate": 2.8e-3},
            "dense, decay over 400": _DENSE | {"optimizer.decay_steps": 400},
        },
    ),
    # The numbers that count: 200 M tokens, at the minimum of a parabola through the three learning rates.
    "long": (
        _base(6120)
        | {"eval_every": 765, "optimizer.learning_rate": 1.7e-3, "sparsity.start_step": 306, "sparsity.end_step": 3366},
        {
            "dense": _DENSE,
            "slices 2:16, token centres": _SLICES | _TOKENS_ONCE,
            "slices 2:8, token centres": _SLICES_OF_8 | _TOKENS_ONCE,
            "sste": {"sparsity.recipe": "sste"},
        },
    ),
    # The same with the late decay.
    "long_wsd": (
        _LONG_WSD,
        {
            "dense": _DENSE,
            # As long as half of the steps on slices take in llama1b, 432 ms for 628 (step_llama1b_8x4096_h200.json).
            "dense, in the time of slices": _DENSE | {"steps": 5165, "optimizer.decay_steps": 1033},
            "slices 2:16": _SLICES | _TOKENS_ONCE,
            "slices 2:16, earlier": _SLICES | _TOKENS_ONCE | _EARLIER,
            "slices 2:16, earlier, mvue": _SLICES | _TOKENS_ONCE | _EARLIER | _MVUE,
            "slices 2:16, earlier, mvue, following": _SLICES | _TOKENS | _EARLIER | _MVUE,
            "slices 2:16, 25%, earlier, mvue, following, first layer dense": _SLICES
            | _TOKENS
            | _sparse(102, 1632)
            | _MVUE
            | _FIRST_DENSE,
            "slices 2:16, 35%, earlier, mvue, following, first layer dense": _SLICES
            | _TOKENS
            | _sparse(102, 2244)
            | _MVUE
            | _FIRST_DENSE,
            "slices 2:16, earlier, mvue, following, first layer dense": _SLICES
            | _TOKENS
            | _EARLIER
            | _MVUE
            | _FIRST_DENSE,
            # More tokens in less time: 12% more steps, 60% of them on slices.
            "slices 2:16, 60%, mvue, 12% longer": _SLICES
            | _TOKENS_ONCE
            | _MVUE
            | _sparse(102, 4214)
            | {"steps": 6854, "optimizer.decay_steps": 1371},
            "runs 2:16, earlier, mvue": _RUNS | _16 | _TOKENS | _EARLIER | _MVUE,
            "magnitude 2:16, earlier": _VENOM | _16 | _EARLIER,
            "magnitude 2:16, earlier, mvue": _VENOM | _16 | _EARLIER | _MVUE,
            "dense, lr 0.002, warm-up of 306": _DENSE | _FASTER,
            "slices 2:16, earlier, lr 0.002, warm-up of 306": _SLICES | _TOKENS_ONCE | _EARLIER | _FASTER,
        },
    ),
    # Twice the tokens: 400 M, all but the dense warm-up in proportion.
    "longer_wsd": (
        _LONG_WSD | {"steps": 12_240, "optimizer.decay_steps": 2448, "eval_every": 1530},
        {
            "dense": _DENSE,
            "slices 2:16, mvue, following, first layer dense": _SLICES
            | _TOKENS
            | _sparse(102, 6222)
            | _MVUE
            | _FIRST_DENSE,
            "slices 2:16, 35%, mvue, following, first layer dense": _SLICES
            | _TOKENS
            | _sparse(102, 4386)
            | _MVUE
            | _FIRST_DENSE,
        },
    ),
    # How far the sparse phase falls behind: the first quarter of "long_wsd", at the same rates. What counts is the
    # held-out loss of step 1530, as the sparse phase computes; the last step is there to leave it.
    "behind": (
        _LONG_WSD | {"steps": 1531, "optimizer.decay_steps": 1, "sparsity.end_step": 1531},
        {
            "dense": _DENSE,
            "slices 2:16": _SLICES | _TOKENS_ONCE,
            "slices 2:16, from 102": _SLICES | _TOKENS_ONCE | {"sparsity.start_step": 102},
            "slices 2:16, mvue, from 102": _SLICES | _TOKENS_ONCE | _MVUE | {"sparsity.start_step": 102},
            "slices 2:16, mvue, from 102, following": _SLICES | _TOKENS | _MVUE | {"sparsity.start_step": 102},
            "slices 2:16, mvue, from 30, following": _SLICES | _TOKENS | _MVUE | {"sparsity.start_step": 30},
            "runs 2:16, mvue, from 102, following": _RUNS | _16 | _TOKENS | _MVUE | {"sparsity.start_step": 102},
            "slices 2:16, mvue, from 30": _SLICES | _TOKENS_ONCE | _MVUE | {"sparsity.start_step": 30},
            "slices 2:16, mvue, from 10": _SLICES | _TOKENS_ONCE | _MVUE | {"sparsity.start_step": 10},
            "slices 2:16, from the end of the warm-up": _SLICES | _TOKENS_ONCE | {"sparsity.start_step": 612},
            "slices 2:16, warm-up of 306": _SLICES | _TOKENS_ONCE | {"optimizer.warmup_steps": 306},
            "slices 2:8": _SLICES_OF_8 | _TOKENS_ONCE,
            "slices 2:8, mvue, from 102": _SLICES_OF_8 | _TOKENS_ONCE | _MVUE | {"sparsity.start_step": 102},
            "magnitude 2:16": _VENOM | _16,
            "sste": {"sparsity.recipe": "sste"},
            "sste, from 102": {"sparsity.recipe": "sste", "sparsity.start_step": 102},
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
