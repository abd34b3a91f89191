"""Forms of the weights of all layers, one under the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.recipes import SSte
from sparse_lm.recipes.weight_forms import Weight, gather_layer


def forms(layers, neurons, dim):
    w, scale = jax.ShapeDtypeStruct((layers, neurons, dim), jnp.float32), jnp.ones(layers)
    return jax.eval_shape(lambda w: SSte().prepare(w, w, SSte.State(scale, scale), jnp.float32), w)


def test_ragged_shards_do_not_travel_compressed():
    gather = functools.partial(gather_layer, layer=jnp.int32(0), axis="fsdp")
    on_two_devices = jax.vmap(gather, in_axes=None, out_axes=None, axis_size=2, axis_name="fsdp")
    with pytest.raises(ValueError, match="a shard of 96 neurons must be a multiple of 64"):
        jax.eval_shape(on_two_devices, forms(1, 96, 64))


@pytest.mark.parametrize("dim, start, contiguous", [(64, 64, 64), (24, 64, 1)])
def test_contiguous_rows_start_at_a_multiple_of_their_number(dim, start, contiguous):
    """Layers of 24 rows, in whole tiles, start at multiples of 64: products take single rows of them."""
    _, down = forms(3, 128, dim)
    ids, block, found = Weight(down, jnp.int32(1), None)._all_ids(down.along_neurons, jnp.ones((8, 128)), dim)
    np.testing.assert_array_equal(ids, [start + np.arange(dim)])
    assert block >= 8 and found == contiguous
