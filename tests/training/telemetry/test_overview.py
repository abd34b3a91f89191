import dataclasses
import types

import jax
import numpy as np
import pytest

from sparse_lm.errors import ConfigError
from sparse_lm.training.step import make_trainer
from sparse_lm.training.telemetry.overview import print_overview
from tests import small

ATTENTION, EXPERT = 2 * (32 * 32 + 16 * 32), 3 * 64 * 32  # experts with a gate
OUTSIDE = 2 * 320 * 32 + 32 + 2 * (2 * 32 + ATTENTION)  # of the layers' FFNs
MIXTURE = OUTSIDE + 2 * (4 * 32 + 4 + 3 * 32 * 32)  # with routers and shared experts
PARAMETERS = {
    "dense": f"{OUTSIDE + 2 * 2 * 128 * 32:,}",
    "experts24": f"{MIXTURE + 2 * 4 * EXPERT:,}, of which a token meets {MIXTURE + 2 * 2 * EXPERT:,}",
}
NO_EXPORT = (
    "none: config.model.shared_expert_dim = 32: must be a multiple of model.expert_dim = 64 to export: "
    "transformers has no other such architecture"
)
DATA = types.SimpleNamespace(directory="here", train=range(480), shares=(), describe=lambda: "a corpus")


def start(config):
    """A run's trainer, and the state before its first step."""
    trainer = make_trainer(config)
    return trainer, dataclasses.replace(trainer.abstract_state(), step=np.int32(0))


@pytest.mark.parametrize(
    "recipe, windows, epochs",
    [("dense", [480], "0.1"), ("dense", [32], "1.5"), ("sste", [46], "1.04"), ("experts24", [360, 24], "0.1 and 0.5")],
)
def test_says_what_the_run_is_and_warns_of_data_that_is_read_more_than_once(recipe, windows, epochs, capsys, caplog):
    empty_phase = {"sparsity.start_step": 4, "sparsity.end_step": 4}
    changes = {"model.activation": "gated_relu2"} if recipe == "experts24" else {"seq_len": 33, **empty_phase}
    config = small.config(recipe, **changes)
    trainer, state = start(config)
    parts = [types.SimpleNamespace(directory=f"part {n}", train=range(size)) for n, size in enumerate(windows)]
    shares = list(zip(parts, (0.75, 0.25), strict=True)) if len(parts) > 1 else ()
    data = types.SimpleNamespace(**vars(DATA) | dict(train=range(sum(windows)), shares=shares))
    print_overview(config, "runs/small", trainer, data, state)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/small: starting"
    facts = dict(line.strip().split("  ", 1) for line in lines[1:8])
    tokens = config.tokens_per_step
    kind = jax.devices()[0].device_kind
    assert {name: fact.strip() for name, fact in facts.items()} == {
        "parameters": PARAMETERS.get(recipe, PARAMETERS["dense"]), "data": "a corpus", "attention": "XLA",
        "devices": f"1 x {kind}" + (f", of {len(jax.devices())}" if len(jax.devices()) > 1 else ""),
        "tokens": f"{tokens} a step, {12 * tokens:,} in all, {epochs} epochs",
        "export": NO_EXPORT if recipe == "experts24" else "ArceeForCausalLM",
        "phases": "dense 0..3, sparse 4..7, dense 8..11" if recipe == "experts24" else "dense 0..11",
    }  # fmt: skip
    more = epochs in ("1.5", "1.04")
    assert (f"every training window of here is read {epochs} times" in caplog.text) == more
    assert ("is read" in caplog.text) == more


def test_a_named_backend_that_cannot_compute_a_sparse_step_is_refused():
    def refuse(*_):
        raise NotImplementedError("D = 32 must be a multiple of 64")

    config = small.config("sste", **{"sparsity.implementation": "reference"})
    trainer, state = start(config)
    with pytest.raises(ConfigError, match=r"config.sparsity.implementation = 'reference': D = 32 must be a multiple"):
        print_overview(config, "runs/small", dataclasses.replace(trainer, steps={"sparse": refuse}), DATA, state)


def test_a_run_that_stays_sparse_says_that_there_is_no_export(capsys):
    config = small.config("sste", **{"sparsity.end_step": 12, "sparsity.leave": False})
    trainer, state = start(config)
    print_overview(config, "runs/small", trainer, DATA, state)
    assert "  export      none: it stays sparse\n" in capsys.readouterr().out
