import jax
import numpy as np

from sparse_lm import collectives


def test_every_place_along_an_axis_draws_numbers_of_its_own():
    draw = lambda key: jax.random.bits(collectives.fold_index(key, "tensor"))  # noqa: E731
    drawn = jax.vmap(draw, in_axes=None, axis_size=4, axis_name="tensor")(jax.random.key(0))
    assert len(set(np.asarray(drawn).tolist())) == 4
