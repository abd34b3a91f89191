"""Sets of runs that are compared by time and by loss: a base configuration, and what each run changes of it.

Within a suite all runs of a seed see the same tokens in the same order. "dense" is dense runs of several lengths, its
loss as a function of time, which the others are held against. Until its rate falls, a shorter one is the longest one:
it is a branch of that.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from types import ModuleType
from typing import Any

from configs import llama1b, llama32_1b, llama60m, tiny
from sparse_lm import config as config_lib
from sparse_lm.errors import UserError

Overrides = dict[str, Any]

ROW = "row.json"  # in a finished run's workdir
DECAY_SHARE = 0.2  # of a run's steps, over which its rate falls
CHANGES: dict[str, Overrides] = {
    "_first_dense": {"sparsity.dense_layers": 1},
    "_m_32": {"sparsity.m": 32},
    "_fp8": {"model.precision": "fp8"},
}
"""Says what a name with such an end changes besides: slices_80_m_32_first_dense is slices_80 with two changes."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """Runs that are compared.

    Attributes:
      model: the configuration file that all start from.
      base: what all runs change of it, by key.
      runs: what each changes besides, by name. Names may end in `CHANGES`, and in a rate: dense_rate_0.0002.
      lengths: of the dense runs, in shares of `base["steps"]`, ascending, multiples of the smallest difference between
        two.
    """

    model: ModuleType
    base: Overrides
    runs: dict[str, Overrides]
    lengths: tuple[float, ...] = (0.8, 1.0)

    def __post_init__(self) -> None:
        smallest = min((b - a for a, b in itertools.pairwise(self.lengths)), default=0.0)
        whole = smallest > 0 and all(math.isclose(n / smallest, round(n / smallest)) for n in self.lengths)
        if not whole:
            allowed = "two or more, ascending, multiples of the smallest difference"
            raise ValueError(f"lengths = {self.lengths} must be {allowed}")
        if "dense" not in self.runs:
            raise ValueError(f"runs must have 'dense', not only {', '.join(self.runs)}")

    @property
    def steps(self) -> int:
        return self.base["steps"]

    @property
    def longest(self) -> str:
        """Returns the name of the longest dense run, of which the others are branches."""
        return f"dense@{self.lengths[-1]}"

    def decay_starts(self) -> dict[float, int]:
        """Returns by length the step at which a dense run's rate begins to fall, where it leaves the longest one."""
        smallest = min(b - a for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        unit = max(1, round(smallest * (1 - DECAY_SHARE) * self.steps))
        return {length: unit * round(length / smallest) for length in self.lengths}

    def branch_start(self, run: str) -> int | None:
        """Returns the step at which a shorter dense run leaves the longest one; None for all other runs."""
        length = run.partition("@")[2]
        return self.decay_starts()[float(length)] if length and run != self.longest else None

    def save_every(self) -> int:
        """Returns the steps between checkpoints, of all runs: saving takes as much of each one's time."""
        return math.gcd(*(self.decay_starts()[length] for length in self.lengths[:-1]))

    def overrides(self, run: str) -> Overrides:
        """Returns what a run changes of `base`; raises UserError if there is none of this name."""
        name, branch, length = run.partition("@")
        if run in self.runs or (branch and name == "dense" and length in map(str, self.lengths)):
            return self.runs[name]
        for end, change in CHANGES.items():
            if run.endswith(end):
                return self.overrides(run.removesuffix(end)) | change
        if found := re.fullmatch(r"(.+)_rate_(0\.\d+)", run):
            return self.overrides(found[1]) | {"optimizer.learning_rate": float(found[2])}
        branches = [f"dense@{length}" for length in self.lengths]
        ends = f"behind which {', '.join(CHANGES)} and _rate_0.001 may stand"
        raise UserError(f"{run} must be among {', '.join([*self.runs, *branches])}, {ends}")

    def config(self, run: str, seed: int, data: str) -> config_lib.Config:
        """Returns the configuration of a run, such as "dense@0.8", on the prepared corpus at `data`.

        The longest dense run keeps what the others go on from.
        """
        own, length = self.overrides(run), run.partition("@")[2]
        changes = {"checkpoint_every": self.save_every(), "keep_checkpoints": 1, "seed": seed, "data.path": data}
        if length:
            starts = self.decay_starts()
            start = starts[float(length)]
            steps = round(start / (1 - DECAY_SHARE))
            changes |= {"steps": steps, "optimizer.decay_steps": steps - start}
            if run == self.longest:
                changes["keep_every"] = self.save_every()
        config = self.model.get_config()
        config.sparsity = config_lib.default().sparsity  # whose knobs may be none of another recipe's
        config.update_from_flattened_dict(self.base | own | changes)
        return config_lib.parse(config)


def _base(steps: int, warmup: int, rate: float, **overrides: Any) -> Overrides:
    """Returns warm-up, a constant rate, and a straight line down over the last fifth of the steps."""
    return {
        "steps": steps,
        "log_every": 20,
        "eval_every": max(1, steps // 8),
        "data.eval_windows": 1024,
        "optimizer.learning_rate": rate,
        "optimizer.warmup_steps": warmup,
        "optimizer.schedule": "wsd",
        "optimizer.decay_steps": round(DECAY_SHARE * steps),
        **overrides,
    }


def _runs(steps: int, ffn_dim: int, **knobs: Any) -> dict[str, Overrides]:
    """Returns dense, slices on shares of the steps, controls and mixtures; knobs are those of slices."""
    slices = {"sparsity.recipe": "slices"} | {f"sparsity.{name}": value for name, value in knobs.items()}
    until_80, controls = slices | _until(steps, 80), ("dense_slices", "fixed_quarter", "unturned_slices")
    quarter = _DENSE | {"model.ffn_dim": ffn_dim // 4}
    # A trained router in place of centroids: a token meets a quarter of the dense model's neurons, of twice as many.
    experts = _experts(16, 2, ffn_dim // 8)
    return {
        "dense": _DENSE,
        "slices_50": slices | _until(steps, 50),
        "slices_80": until_80,
        "slices_90": slices | _into_the_decay(steps),
        "slices_stay": slices | _stay(steps),
        # Routing alone; one quarter of the neurons for all tokens; another way of leaving.
        **{f"{recipe}_80": until_80 | {"sparsity.recipe": recipe} for recipe in controls},
        # Dense models that have no other neurons, in about slices' time.
        "quarter_width": quarter | _longer(steps, 1.2),
        "quarter_width_longer": quarter | _longer(steps, 1.6),
        "mixture_quarter": _DENSE | experts,
        "mixture_quarter_experts24_stay": _experts24(steps, experts),
    }


def _experts24(steps: int, experts: Overrides) -> Overrides:
    """Returns a mixture whose experts become sparse and stay so."""
    return experts | {"sparsity.recipe": "experts24"} | _stay(steps)


def _twins(steps: int, change: Overrides | None = None) -> dict[str, Overrides]:
    """Returns a mixture with dense experts, and with sparse ones that are as many, left or not."""
    sparse = {"sparsity.recipe": "experts24"} | (change or {})
    return {
        "dense": _DENSE,
        "experts24_80": sparse | _until(steps, 80),
        "experts24_90": sparse | _into_the_decay(steps),
        "experts24_95": sparse | _into_the_decay(steps, 3 / 4),
        "experts24_stay": _experts24(steps, change or {}),
    }


def _narrow_mixtures(steps: int, width: int) -> dict[str, Overrides]:
    """Returns a dense llama, and mixtures of 16, 32 or 64 experts of `width` neurons, dense or sparse, two a token."""
    runs = {"dense": _DENSE}
    for number in (16, 32, 64):
        experts = _experts(number, 2, width)
        left = experts | {"sparsity.recipe": "experts24"} | _into_the_decay(steps, 3 / 4)
        runs |= {
            f"mixture_{number}": _DENSE | experts,
            f"mixture_{number}_experts24_95": left,
            f"mixture_{number}_experts24_stay": _experts24(steps, experts),
        }
    return runs


def _swiglu_runs(steps: int) -> dict[str, Overrides]:
    """Returns dense, and the recipes that compute SwiGLU on a share of the steps."""
    return {"dense": _SWIGLU | _DENSE} | {
        f"{recipe}_{share}": _SWIGLU | {"sparsity.recipe": recipe} | _until(steps, share)
        for recipe, share in (("fst", 50), ("sste", 50), ("dense_slices", 80))
    }


def _longer(steps: int, times: float) -> Overrides:
    """Returns so many times the steps, with as large a share of them in which the rate falls."""
    return {"steps": round(times * steps), "optimizer.decay_steps": round(times * DECAY_SHARE * steps)}


def _until(steps: int, share: int) -> Overrides:
    """Returns a sparse phase on a share of the steps, in percent, which ends before the rate falls."""
    start = phase_start(steps)
    end = min(start + round(share / 100 * steps), round((1 - DECAY_SHARE) * steps))
    return {"sparsity.start_step": start, "sparsity.end_step": end}


def _into_the_decay(steps: int, share: float = 1 / 2) -> Overrides:
    """Returns a sparse phase that ends after this share of the steps in which the rate falls."""
    end = round((1 - DECAY_SHARE * (1 - share)) * steps)
    return {"sparsity.start_step": phase_start(steps), "sparsity.end_step": end}


def _stay(steps: int) -> Overrides:
    """Returns a sparse phase that never ends: the sparse model is what the run is for."""
    return {"sparsity.start_step": phase_start(steps), "sparsity.end_step": steps, "sparsity.leave": False}


def phase_start(steps: int) -> int:
    """Returns the step at which sparse phases begin: early, long before the warm-up ends."""
    return round(steps / 60)


def _experts(experts: int, per_token: int, width: int) -> Overrides:
    return {"model.experts": experts, "model.experts_per_token": per_token, "model.expert_dim": width}


_DENSE = {"sparsity.recipe": "dense"}
_SWIGLU = {"model.activation": "swiglu"}
_BATCH = {"batch_size": 32, "seq_len": 1024, "model.vocab_size": 16_384, "model.loss_chunk": 8192}
# A token meets 4 x 2048 neurons, as many as a dense llama1b has. 4 layers have 0.67 B parameters, and the pairs of a
# step leave 1 GiB of residuals in each: about 25 GiB with moments, calculated.
_EXPERTS = _experts(16, 4, 2048)
_AFM = {"model.dim": 2560, "model.ffn_dim": 18_432, "model.heads": 20, "model.kv_heads": 4, "model.layers": 4}
_NARROW_AFM = {"model.dim": 768, "model.ffn_dim": 6144, "model.heads": 6, "model.kv_heads": 2, "model.layers": 4}
_SMALL_MIXTURE = {"model.dim": 256, "model.ffn_dim": 1024, "model.heads": 4, "model.kv_heads": 4, "model.layers": 4}
_NARROW_MIXTURE = _NARROW_AFM | {"model.ffn_dim": 1536}
_TINY = _base(
    50, 4, 4e-3, batch_size=4, seq_len=32, eval_every=25, log_every=4,
    **{"data.eval_windows": 8, "model.dim": 32, "model.layers": 2, "model.ffn_dim": 256, "model.vocab_size": 300},
)  # fmt: skip

SUITES = {
    # llama1b, whole or with fewer layers: 100 M tokens in 3052 steps.
    **{
        name: Suite(llama1b, _base(3052, 300, rate, **_BATCH, **{"model.layers": layers}), _runs(3052, 8192))
        for name, layers, rate in (("llama1b", 25, 2e-4), ("llama1b_8_layers", 8, 3e-4), ("llama1b_4_layers", 4, 3e-4))
    },
    # Mixtures against the dense llama1b of as many active neurons. They are to have the loss that it has much later.
    "llama1b_4_layers_mixture": Suite(
        llama1b,
        _base(3052, 300, 3e-4, **_BATCH, **{"model.layers": 4}),
        {
            "dense": _DENSE,
            "mixture": _DENSE | _EXPERTS,
            "mixture_fine": _DENSE | _experts(32, 8, 1024),
            "mixture_experts24_stay": _experts24(3052, _EXPERTS),
        },
        lengths=(1.0, 1.5, 2.0),
    ),
    # Sparse experts against dense ones, in the first mixture of that suite.
    "mixture_4_layers": Suite(
        llama1b,
        _base(3052, 300, 3e-4, **_BATCH, **_EXPERTS, **{"model.layers": 4}),
        _twins(3052) | {"dense_two": _DENSE | {"model.experts_per_token": 2}},
    ),
    # The same with the experts of configs/moe_1b.py, which are twice as wide.
    "mixture_4_layers_wide": Suite(
        llama1b, _base(3052, 300, 3e-4, **_BATCH, **_experts(16, 4, 4096), **{"model.layers": 4}), _twins(3052)
    ),
    # The first with two experts a token in all runs; and with gates, of which dense experts have SwiGLU or relu(G)^2.
    "mixture_4_layers_two": Suite(
        llama1b, _base(3052, 300, 3e-4, **_BATCH, **_experts(16, 2, 2048), **{"model.layers": 4}), _twins(3052)
    ),
    "mixture_4_layers_gated": Suite(
        llama1b,
        _base(3052, 300, 3e-4, **_BATCH, **_experts(16, 2, 2048), **{"model.layers": 4}),
        _twins(3052, {"model.activation": "gated_relu2"})
        | {"dense": _DENSE | _SWIGLU, "dense_gated_relu2": _DENSE | {"model.activation": "gated_relu2"}},
    ),
    # Mixtures that have read 13, 64, 70 or 91 tokens for each active parameter of their layers, and the dense llama of
    # as many active neurons: 200 M tokens in 6104 steps, 220 M (`_within`) or 285 M (`_longer`). Rates and numbers of
    # experts are compared over 100 M. The best rate of a small mixture is 3e-3. Dense runs of `_reached` and `_within`,
    # up to 540 M and 562 M tokens, were to reach the losses of their mixtures. `small_lower_rate` is to show whether
    # dense runs of 570 M want a lower rate.
    **{
        f"{name}_mixture{end}": Suite(
            llama1b,
            _base(steps, 300, rate, **_BATCH, **model),
            _narrow_mixtures(steps, width),
            lengths,
        )
        for name, rate, model, width, ends in (
            ("narrow", 1.2e-3, _NARROW_MIXTURE, 768, ("", "_rates")),
            ("small", 4.5e-3, _SMALL_MIXTURE, 512, ("", "_reached", "_rates", "_longer")),
            ("small_lower_rate", 3e-3, _SMALL_MIXTURE, 512, ("_longer", "_within")),
        )
        for end, steps, lengths in (
            ("", 6104, (1.0, 1.5, 2.0)),
            ("_reached", 6104, (1.8, 2.7)),
            ("_rates", 3052, (1.0, 1.5, 2.0)),
            ("_longer", 8704, (1.0, 1.5, 2.0)),
            ("_within", 6720, (1.7, 2.55)),
        )
        if end in ends
    },
    # These have the layer of AFM-4.5B, or it with Muon, or FP8, on both sides. Mixtures have no Muon.
    **{
        f"afm_4_layers{name}": Suite(
            llama1b,
            _base(3052, 300, rate, **_BATCH, **_AFM, **change),
            {run: own for run, own in _runs(3052, 18_432).items() if not change or "model.experts" not in own},
        )
        for name, rate, change in (
            ("", 2.5e-4, {}),
            ("_muon", 4e-4, {"optimizer.name": "muon"}),
            ("_fp8", 2.5e-4, {"model.precision": "fp8"}),
        )
    },
    # Its proportions at a width whose 44 M parameters in layers have nine tokens each: 400 M tokens in 12,208 steps.
    # Rates are compared over 60 M.
    **{
        f"narrow_afm_4_layers{name}": Suite(
            llama1b, _base(steps, warmup, 8e-4, **_BATCH, **_NARROW_AFM), _runs(steps, 6144)
        )
        for name, steps, warmup in (("", 12_208, 600), ("_rates", 1831, 300))
    },
    # The layer of Llama-3.2-1B, with SwiGLU.
    "llama32_1b_4_layers": Suite(
        llama32_1b, _base(3052, 300, 3e-4, **_BATCH, **{"model.layers": 4}), _swiglu_runs(3052)
    ),
    # 42 M parameters, 200 M tokens.
    "llama60m": Suite(llama60m, _base(6120, 612, 1.4e-3, **_BATCH), _runs(6120, 2048)),
    # The same with SwiGLU, 50 M parameters: F = 4 D as in Llama-3.2-1B.
    "llama60m_swiglu": Suite(llama60m, _base(6120, 612, 1.4e-3, **_BATCH), _swiglu_runs(6120)),
    # Seconds on a CPU, for tests.
    "tiny": Suite(tiny, _TINY, _runs(50, 256, v=16), lengths=(0.8, 1.0, 1.2)),
}
