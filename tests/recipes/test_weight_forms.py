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


@pytest.mark.parametrize("dim", [64, 24])
def test_a_layer_between_others_is_multiplied(dim):
    """Layers stand one under the other: those of 24 rows in whole tiles of 64, those of 64 with nothing between."""
    key_w, key_y = jax.random.split(jax.random.key(0))
    w, y = jax.random.normal(key_w, (3, 128, dim)), jax.random.normal(key_y, (8, 128))
    _, down = SSte().prepare(w, w, SSte.State(jnp.ones(3), jnp.ones(3)), jnp.float32)
    of_layer = np.asarray(down.dense, np.float64)[128:256]
    assert (of_layer != 0).mean() <= 0.5
    np.testing.assert_allclose(Weight(down, jnp.int32(1), None).over_neurons(y), y @ of_layer, rtol=1e-4, atol=1e-4)
