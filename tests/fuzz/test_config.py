"""Configurations of any values: refused by name, or such that a run can be made of them."""

import dataclasses
import json
import math

import jax
import ml_collections
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, reject
from hypothesis import strategies as st

from sparse_lm import config as config_lib
from sparse_lm import config_rules
from sparse_lm.config import ConfigError
from sparse_lm.recipes import RECIPES
from sparse_lm.training.step import make_trainer
from tests import small
from tests.fuzz.cases import cases

BASES = {recipe: flatten_dict(small.config_dict(recipe).to_dict(), sep=".") for recipe in small.RECIPES}
KEYS = sorted(BASES["dense"])
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
NAMES = sorted(
    {
        *RECIPES, *config_rules.IMPLEMENTATIONS, *config_rules.SCHEDULES, *config_rules.ACTIVATIONS,
        *config_rules.REMAT_POLICIES, *config_rules.DTYPES,
    }
)  # fmt: skip

numbers = st.one_of(
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-300, 1e300, 0.5]),
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 32, 64, 128, -1, 2**31, 2**32, 2**64, 10**30]),
    st.integers(),
    st.floats(),
)
values = st.one_of(
    numbers,
    st.sampled_from(NAMES),
    st.text(max_size=5),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(numbers, st.lists(st.integers(0, 12), max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["a", "steps", ""]), numbers, max_size=2),
)
changes = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3)


def parse(recipe, changes):
    flat = {**BASES[recipe], **changes}
    return config_lib.parse(ml_collections.ConfigDict(unflatten_dict(flat, sep=".")))


def names_its_key(error: ConfigError) -> bool:
    return str(error).startswith(f"config.{error.key} = ") and error.key in {*KEYS, *GROUPS}


@cases(300)
@given(recipe=st.sampled_from(sorted(BASES)), changes=changes)
def test_any_values_are_refused_by_name_or_make_a_sound_configuration(recipe, changes):
    try:
        config = parse(recipe, changes)
    except ConfigError as error:
        assert names_its_key(error)
        return
    as_json = json.dumps(config_lib.to_dict(config), allow_nan=False)  # as config.json keeps it
    assert config_lib.parse(ml_collections.ConfigDict(json.loads(as_json))) == config
    phase = config.sparsity.phase
    assert 0 <= phase.start <= phase.stop <= config.steps
    if phase:
        steps = (phase.start, phase.stop - 1, phase.stop)
        assert [config.phase(step) for step in steps] == ["sparse", "sparse", "dense"]
    assert config.tokens_per_part * config.parts == config.tokens_per_step


@cases(100)
@given(
    key=st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=12).filter(
        lambda key: key not in config_lib.default()
    ),
    group=st.sampled_from(["", "model.", "sparsity."]),
    value=values,
)
def test_unknown_keys_are_named(key, group, value):
    if group + key in KEYS:
        return
    with pytest.raises(ConfigError, match="unknown key; allowed: ") as error:
        parse("dense", {group + key: value})
    assert error.value.key == group + key


@st.composite
def shapes(draw):
    """Makes a recipe's name and changes; most of them fit together, and few are what a kernel would wish for."""
    recipe = draw(st.sampled_from(sorted(BASES)))
    heads, microbatches = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    m, v = draw(st.sampled_from([4, 8, 12, 16])), draw(st.sampled_from([4, 8, 64]))
    slice_size = 4 * draw(st.integers(1, 3))
    knobs = {
        "sparsity.v": v,
        "sparsity.m": m,
        "sparsity.experts": draw(st.sampled_from([m // 4, 1, 3])),
        "sparsity.dense_features": draw(st.floats(0, 1)),
    }
    own = {f"sparsity.{field.name}" for field in dataclasses.fields(RECIPES[recipe])}
    return recipe, {
        "microbatches": microbatches,
        "batch_size": microbatches * draw(st.integers(1, 2)),
        "seq_len": draw(st.sampled_from([v, 2 * v, 3 * v, 7])),
        "model.dim": 4 * heads * draw(st.integers(1, 4)),
        "model.heads": heads,
        "model.kv_heads": draw(st.sampled_from([1, heads])),
        "model.ffn_dim": m * slice_size // 4,
        "model.layers": draw(st.integers(1, 2)),
        "model.loss_chunk": draw(st.integers(1, 64)),
        "model.remat": draw(st.sampled_from(config_rules.REMAT_POLICIES)),
        "model.tie_embeddings": draw(st.booleans()),
        "model.dtype": draw(st.sampled_from(config_rules.DTYPES)),
        **{key: value for key, value in knobs.items() if key in own},
    }


@cases(2)
@given(recipe_and_shapes=shapes())
def test_a_step_of_any_accepted_shape_can_be_traced(recipe_and_shapes):
    """What `parse` lets pass no later check refuses: shapes that kernels cannot take are padded."""
    try:
        config = parse(*recipe_and_shapes)
    except ConfigError:
        reject()
    trainer = make_trainer(config)
    state = trainer.abstract_state()
    windows = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), np.int32)
    for step in (trainer.dense_step, trainer.sparse_step):
        after, metrics = jax.eval_shape(step, state, windows)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(state)
        ]
        assert metrics["loss"].shape == ()
