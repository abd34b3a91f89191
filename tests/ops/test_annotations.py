import inspect

import jax.numpy as jnp
import jaxtyping
import pytest

from sparse_lm import ops

FUNCTIONS = [value for value in map(vars(ops).get, ops.__all__) if inspect.isfunction(value)]


def test_calls_are_checked_here():
    with pytest.raises(jaxtyping.TypeCheckError, match="F D"):
        ops.transposable_mask(jnp.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError, match="T"):
        ops.condense(jnp.ones((8, 4)), jnp.zeros((2, 4)), 4)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_array_has_a_shape(function):
    """Keys and scales aside, which are scalars."""
    annotations = dict(inspect.get_annotations(function))
    for name in ("key", "scale"):
        if annotations.get(name) in ("Array", "Array | None", "ArrayLike"):
            del annotations[name]
    assert not [name for name, text in annotations.items() if text.split(" | ")[0] in ("Array", "ArrayLike")]
