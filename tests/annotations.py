"""Calls are checked against the shapes of their annotations, in the folders of tests that import this."""

import jaxtyping
import pytest
from beartype import beartype

jaxtyping.config.update("jaxtyping_disable", True)  # in other folders


def check_calls(owner, names):
    """Checks calls of a module's or a class's functions, where a test is not in another folder or `unchecked`."""
    for name in names:
        setattr(owner, name, jaxtyping.jaxtyped(getattr(owner, name), typechecker=beartype))


@pytest.fixture(autouse=True)
def checked_annotations():
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def unchecked(checked_annotations):
    """Leaves it to the functions to refuse what they cannot take."""
    jaxtyping.config.update("jaxtyping_disable", True)
