"""Recipes: ways to compute the six matrix products of a squared-ReLU FFN, or of a mixture's experts, one a file.

The README shows one in another training loop, docs/library.md whole loops.
"""

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

__all__ = ["DENSE", "RECIPES", "Act24", "Dense", "DenseSlices", "Experts24", "Fst", "Recipe", "SSte", "Slices", "Venom"]
