"""Recipes that other packages bring, and what of a recipe is refused before anything runs."""

import dataclasses
import os
import types
from typing import ClassVar

import jax.numpy as jnp
import pytest

from sparse_lm import config as config_lib
from sparse_lm import recipes
from sparse_lm.errors import ConfigError
from sparse_lm.recipes import RECIPES, Recipe, SSte
from tests.command_lines import run_python

MODULE = """
import dataclasses
from sparse_lm.recipes import SSte

@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept(SSte):
    name = "kept"
    share: float = 0.5
"""
READ = """
import kept
from sparse_lm import config
values = config.default()
values.update_from_flattened_dict({"sparsity.recipe": "kept", "sparsity.share": 0.25})
print(config.parse(values).sparsity.recipe)
"""


def test_an_entry_point_brings_a_recipe_and_its_knobs(tmp_path):
    (tmp_path / "kept.py").write_text(MODULE)
    installed = tmp_path / "kept-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kept\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[sparse_lm.recipes]\nkept = kept:Kept\n")
    done = run_python("-c", READ, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith("Kept(") and "share=0.25" in done.stdout, done.stderr


def test_a_recipe_of_a_name_that_there_is_is_refused(monkeypatch):
    other = types.SimpleNamespace(load=lambda: type("Other", (SSte,), {}), value="other:Other")
    monkeypatch.setattr(recipes, "entry_points", lambda group: [other])
    with pytest.raises(TypeError, match="recipe 'sste' of other:Other: another recipe has this name"):
        recipes.add_recipes_of_other_packages()


@pytest.mark.parametrize("knob, kind", [("refresh_every", int), ("dim", int), ("m", float), ("k", int | None)])
def test_knobs_that_no_configuration_could_set_are_refused(knob, kind, monkeypatch):
    other = dataclasses.make_dataclass("Other", [(knob, kind, None)], bases=(SSte,), frozen=True, kw_only=True)
    other.name = "other"
    monkeypatch.setitem(RECIPES, "other", other)
    with pytest.raises(TypeError, match=f"knob '{knob}' of recipe 'other', .* must be of type bool, int, float or str"):
        config_lib.default()


def test_a_phase_needs_products_and_rules_may_name_sizes(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(Recipe):
        name = "other"

        def rules(self, shape):
            yield "neurons", shape.neurons % 512 == 0, "must be a multiple of 512"

    monkeypatch.setitem(RECIPES, "other", Other)
    values = config_lib.default()
    changes = {"sparsity.recipe": "other", "sparsity.end_step": 9, "model.ffn_dim": 256}
    values.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=r"config\.sparsity\.recipe = 'other': names no `products`"):
        config_lib.parse(values)
    Other.products = {"up": "W1, some of it"}
    with pytest.raises(ConfigError, match=r"config\.model\.ffn_dim = 256: must be a multiple of 512"):
        config_lib.parse(values)
    with pytest.raises(ValueError, match="neurons = 256 of recipe 'other': must be a multiple of 512"):
        Other().check(*jnp.ones((2, 256, 8)))


def test_products_that_there_are_not_are_refused():
    with pytest.raises(TypeError, match=r"products of Other must be among up, down, .*, not gradup, Up"):

        class Other(Recipe):
            products: ClassVar = {"gradup": "dH 2:4", "Up": "W1 2:4", "down": "Y 2:4"}
