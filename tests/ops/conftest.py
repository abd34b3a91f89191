"""Tests of this folder check calls of the public ops against the shapes of their annotations."""

import inspect

import jaxtyping
import pytest
from beartype import beartype

from sparse_lm import ops
from sparse_lm.ops import row_order

for module, names in ((ops, ops.__all__), (row_order, ("dispatch", "combine"))):
    for name in names:
        if inspect.isfunction(function := getattr(module, name)):
            setattr(module, name, jaxtyping.jaxtyped(function, typechecker=beartype))
jaxtyping.config.update("jaxtyping_disable", True)  # in other folders


@pytest.fixture(autouse=True)
def checked_annotations():
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def unchecked(checked_annotations):
    """Leaves it to the ops to refuse what they cannot take."""
    jaxtyping.config.update("jaxtyping_disable", True)
