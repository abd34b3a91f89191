"""Recipes: ways to compute the six matrix products of a squared-ReLU FFN, or of a mixture's experts, one a file.

The README shows one in another training loop, docs/library.md whole loops. Installed packages add recipes of their own
by entry points of the group "sparse_lm.recipes".
"""

from importlib.metadata import entry_points

from sparse_lm.recipes.act24 import Act24
from sparse_lm.recipes.base import Recipe
from sparse_lm.recipes.dense import DENSE, Dense
from sparse_lm.recipes.dense_slices import DenseSlices
from sparse_lm.recipes.experts24 import Experts24
from sparse_lm.recipes.fst import Fst
from sparse_lm.recipes.slices import Slices
from sparse_lm.recipes.sste import SSte
from sparse_lm.recipes.venom import Venom

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe for recipe in (Dense, Fst, SSte, Act24, Venom, Slices, DenseSlices, Experts24)
}


def add_recipes_of_other_packages() -> None:
    """Adds to `RECIPES` those that entry points name; not on import, since their modules import this one.

    Raises TypeError if one has the name of another recipe.
    """
    for entry in entry_points(group="sparse_lm.recipes"):
        recipe = entry.load()
        if RECIPES.setdefault(recipe.name, recipe) is not recipe:
            raise TypeError(f"recipe {recipe.name!r} of {entry.value}: another recipe has this name")


__all__ = ["DENSE", "RECIPES", "Act24", "Dense", "DenseSlices", "Experts24", "Fst", "Recipe", "SSte", "Slices", "Venom"]
