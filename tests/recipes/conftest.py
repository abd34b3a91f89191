"""Tests of this folder check calls of routing and of `Recipe.ffn` against the shapes of their annotations."""

import inspect

from sparse_lm.recipes import routing
from sparse_lm.recipes.base import Recipe
from tests.annotations import check_calls, checked_annotations, unchecked  # noqa: F401

public = inspect.getmembers(routing, lambda value: inspect.isfunction(value) and value.__module__ == routing.__name__)
check_calls(routing, [name for name, _ in public if not name.startswith("_")])
check_calls(Recipe, ["ffn"])
