"""Configurations of any values: refused by name, or such that a run can be made of them."""

import json
import math

import ml_collections
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm import config as config_lib
from sparse_lm.config_rules import ACTIVATIONS, DTYPES, REMAT_POLICIES
from sparse_lm.errors import ConfigError
from sparse_lm.ops import backends
from sparse_lm.recipes import RECIPES
from tests import small
from tests.fuzz.cases import cases

BASES = {recipe: flatten_dict(small.config_dict(recipe).to_dict(), sep=".") for recipe in small.RECIPES}
KEYS = sorted(BASES["dense"])
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
NAMES = sorted({*RECIPES, *backends.NAMES, *ACTIVATIONS, *REMAT_POLICIES, *DTYPES, "cosine", "wsd"})

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
    return config_lib.parse(ml_collections.ConfigDict(unflatten_dict(BASES[recipe] | changes, sep=".")))


def names_its_key(error: ConfigError) -> bool:
    return str(error).startswith(f"config.{error.key} = ") and error.key in {*KEYS, *GROUPS}


@cases(150)
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
        steps = (phase.start - 1, phase.start, phase.stop - 1, phase.stop)
        assert [config.phase(step) for step in steps] == ["dense", "sparse", "sparse", "dense"]
    assert config.tokens_per_part * config.parts == config.tokens_per_step
