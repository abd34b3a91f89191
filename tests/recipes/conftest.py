"""Tests of this folder check calls of routing and of `Recipe.ffn` against the shapes of their annotations."""

import functools
import inspect

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype

from sparse_lm.recipes import routing
from sparse_lm.recipes.base import Recipe


def checked(function):
    """Checks annotations at every call; NumPy arrays, which all functions take, become JAX's first."""
    typed = jaxtyping.jaxtyped(function, typechecker=beartype)
    as_jax = lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a  # noqa: E731

    @functools.wraps(function)
    def call(*args, **kwargs):
        return typed(*map(as_jax, args), **{name: as_jax(value) for name, value in kwargs.items()})

    return call


for name, function in inspect.getmembers(routing, inspect.isfunction):
    if function.__module__ == routing.__name__ and not name.startswith("_"):
        setattr(routing, name, checked(function))
Recipe.ffn = checked(Recipe.ffn)
jaxtyping.config.update("jaxtyping_disable", True)  # in other folders


@pytest.fixture(autouse=True)
def checked_annotations():
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)
