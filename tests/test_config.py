"""Every bad value is refused by name before anything compiles."""

import math
import pathlib

import pytest

from sparse_lm import config as config_lib
from sparse_lm.config import Config
from sparse_lm.errors import ConfigError
from sparse_lm.recipes import RECIPES, Slices

CONFIGS = sorted(pathlib.Path(__file__).parent.parent.glob("configs/*.py"))
MIXTURE = {"model.experts": 8, "sparsity.recipe": "experts24"}


def sparse(**changes):
    d = config_lib.default()
    d.sparsity.start_step, d.sparsity.end_step = 100, 500
    d.update_from_flattened_dict(changes)
    return d


def test_the_default_parses_and_a_configuration_that_names_no_recipe_gets_slices():
    assert config_lib.parse(config_lib.default()) == Config()
    config_lib.parse(sparse(seed=2**32 - 1))  # the largest one
    assert config_lib.parse(sparse()).sparsity.recipe == Slices()
    dense = config_lib.parse(sparse(**{"sparsity.recipe": "dense", "model.ffn_dim": 101}))
    assert dense.model.ffn_dim == 101 and dense.phase(150) == "dense"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_file_parses_and_documents_its_command(path):
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    config_lib.parse(namespace["get_config"]())
    assert f"--config=configs/{path.name}" in namespace["__doc__"]


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ({"sparsity.recipe": "slicse"}, "sparsity.recipe", "'slices'"),
        ({"sparsity.mask_decay": 1e-5}, "sparsity.mask_decay", "is no knob of recipe 'slices'; it has m, v"),
        ({"sparsity.recipe": "sste", "sparsity.m": 8}, "sparsity.m", "is no knob of recipe 'sste'; it has none"),
        ({"sparsity.recipe": "fst", "sparsity.mask_decay": -1.0}, "sparsity.mask_decay", "0..1"),
        ({"sparsity.recipe": "venom", "sparsity.experts": 0}, "sparsity.experts", "1..1024"),
        ({"sparsity.dense_layers": 4}, "sparsity.dense_layers", "must be in 0..3, below model.layers"),
        ({"sparsity.m": 24}, "sparsity.m", "must divide the 1024 neurons"),
        ({"batch_size": 2, "seq_len": 100}, "sparsity.v", "must be at most the 200 tokens"),
        ({"sparsity.start_step": 600}, "sparsity.end_step", "600 (start_step) or more"),
        ({"sparsity.end_step": 1001}, "sparsity.end_step", "config.steps = 1000"),
        ({"sparsity.implementation": "cuda"}, "sparsity.implementation", "reference, hopper, triton"),
        ({"sparsity.leave": False}, "sparsity.end_step", "must be config.steps = 1000 with sparsity.leave"),
        ({"model.heads": 3}, "model.heads", "must divide model.dim = 256"),
        ({"model.heads": 256, "model.kv_heads": 256}, "model.heads", "even"),
        ({"model.head_dim": 3}, "model.head_dim", "even"),
        ({"model.kv_heads": 3}, "model.kv_heads", "must divide model.heads = 4"),
        ({"model.vocab_size": 0}, "model.vocab_size", "positive"),
        ({"model.document_separator": 4096}, "model.document_separator", "of the model.vocab_size = 4096, or -1"),
        ({"model.document_separator": 0, "seq_len": 129}, "seq_len", "must be even with model.document_separator"),
        ({"model.activation": "swiglu"}, "sparsity.recipe", "must be one of dense, fst, sste, dense_slices: no"),
        ({"model.dtype": "float64"}, "model.dtype", "float32, bfloat16"),
        ({"model.precision": "fp4"}, "model.precision", "bf16"),
        ({"model.head_dim": -2}, "model.head_dim", "must not be negative"),
        ({"steps": 0}, "steps", "positive"),
        ({"steps": 2**31}, "steps", "less than 2^31"),
        ({"seed": 2**32}, "seed", "2^32"),
        ({"data.cache_dir": "gs://bucket/x"}, "data.cache_dir", "not a URL"),
        ({"optimizer.clip_norm": math.inf}, "optimizer.clip_norm", "finite"),
        ({"optimizer.schedule": "wsd", "optimizer.decay_steps": 901}, "optimizer.decay_steps", "1..900"),
        ({"optimizer.final_fraction": 1.5}, "optimizer.final_fraction", "must be in 0..1"),
        ({"optimizer.decay_steps": 10}, "optimizer.decay_steps", "must be 0 with schedule cosine"),
        ({"optimizer.warmup_steps": 1000}, "optimizer.warmup_steps", "config.steps"),
        ({"optimizer.moments": "bfloat16", "optimizer.beta1": 0.999}, "optimizer.beta1", "at most 0.99"),
        ({"optimizer.beta2": 1.0}, "optimizer.beta2", "must be in [0, 1)"),
        ({"mesh.data": 3}, "batch_size", "mesh.data * mesh.fsdp * microbatches = 3"),
        ({"mesh.data": 4, "mesh.fsdp": 4, "sparsity.v": 512}, "sparsity.v", "256 tokens of a microbatch"),
        ({"mesh.tensor": 3}, "mesh.tensor", "must divide model.heads = 4"),
        ({"mesh.tensor": 2, "sparsity.m": 1024}, "sparsity.m", "of which each device along mesh.tensor has a part"),
        ({"mesh.fsdp": 16, "mesh.tensor": 2}, "mesh.fsdp", "times 128 must divide model.ffn_dim = 1024"),
        ({"model.experts": 8}, "sparsity.recipe", "must be one of dense, experts24: no"),
        ({"sparsity.recipe": "experts24"}, "sparsity.recipe", "must be one of dense, fst, sste, act24"),
        (MIXTURE | {"optimizer.name": "muon"}, "optimizer.name", "model.experts"),
        (MIXTURE | {"model.experts": 1}, "model.experts", "0, for one FFN, or 2 or more"),
        (MIXTURE | {"model.experts_per_token": 9}, "model.experts_per_token", "must be in 2..8"),
        (MIXTURE | {"model.expert_dim": 6}, "model.expert_dim", "multiple of 4"),
        (MIXTURE | {"model.router_scores": "sigmoids"}, "model.router_scores", "did you mean 'sigmoid'"),
        (MIXTURE | {"model.activation": "swiglu"}, "sparsity.recipe", "must be one of dense: no other computes FFNs"),
        (MIXTURE | {"mesh.tensor": 2}, "mesh.tensor", "must be 1 with model.experts: mesh.expert splits them"),
        (MIXTURE | {"mesh.expert": 16}, "mesh.expert", "must divide model.experts = 8"),
        (MIXTURE | {"mesh.expert": 8, "batch_size": 4}, "batch_size", "mesh.data * mesh.fsdp * mesh.expert * microb"),
        (MIXTURE | {"mesh.fsdp": 4, "model.expert_dim": 4}, "mesh.fsdp", "model.experts * model.expert_dim = 32"),
        ({"mesh.expert": 2}, "mesh.expert", "must be 1 without model.experts"),
        ({"mesh.expert": 2, "batch_size": 5}, "batch_size", "mesh.data * mesh.fsdp * mesh.expert * microbatches = 2"),
        (MIXTURE | {"init_from": "runs/hf"}, "init_from", "must be empty with model.experts"),
    ],
)
def test_bad_value_is_refused_by_name(changes, key, words):
    with pytest.raises(ConfigError) as error:
        config_lib.parse(sparse(**changes))
    message = str(error.value)
    assert message.startswith(f"config.{key} = ")
    assert words in message
    assert "\n" not in message
    assert "  " not in message


@pytest.mark.parametrize(
    "group, key, words", [(None, "sedd", "did you mean seed"), ("sparsity", "recipes", "did you mean sparsity.recipe")]
)
def test_unknown_key_is_refused_with_the_nearest_one(group, key, words):
    d = config_lib.default()
    with d.unlocked():
        (d[group] if group else d)[key] = 1
    with pytest.raises(ConfigError, match=words):
        config_lib.parse(d)


@pytest.mark.parametrize("name, recipe", RECIPES.items())
def test_knobs_that_are_not_set_are_the_recipes_own(name, recipe):
    experts = 0 if "squared_relu" in recipe.computes else 4
    assert config_lib.parse(sparse(**{"sparsity.recipe": name, "model.experts": experts})).sparsity.recipe == recipe()


@pytest.mark.parametrize(
    "changes, best",
    [
        ({"sparsity.recipe": "dense"}, range(1, 9)),
        ({"sparsity.end_step": 2}, range(1, 9)),
        ({}, {7, 8}),
        ({"sparsity.end_step": 8}, {8}),  # left with the last step
        ({"sparsity.end_step": 8, "sparsity.leave": False}, range(1, 9)),
    ],
)
def test_the_best_is_no_model_of_a_phase_that_is_left(changes, best):
    phase = {"steps": 8, "optimizer.warmup_steps": 1, "sparsity.start_step": 2, "sparsity.end_step": 6}
    config = config_lib.parse(sparse(**phase | changes))
    assert {step for step in range(1, 9) if config.can_be_best(step)} == set(best)
