"""Simulated meshes train every recipe."""

from experiments.quality import mesh_equality
from sparse_lm.recipes import RECIPES


def test_every_recipe_is_compared():
    assert mesh_equality.RECIPES.keys() == RECIPES.keys()
