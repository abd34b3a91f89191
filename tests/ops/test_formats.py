import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import formats
from tests.ops import jitted, numpy_sparse


@pytest.mark.parametrize("shape", [(128, 192), (70, 68)])
def test_values_and_metadata_are_laid_out_as_described(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sparse = jitted.sparsify_24(jnp.array(x), "magnitude")
    dense, mask = numpy_sparse.sparsify_rows(numpy_sparse.pad(x), "magnitude")
    values, metadata = numpy_sparse.compress(dense, mask)
    np.testing.assert_array_equal(sparse.values, values)
    np.testing.assert_array_equal(np.asarray(sparse.metadata).view(np.uint32), metadata)
    assert sparse.metadata.dtype == jnp.int32


def test_padding_is_zero_at_the_lowest_positions():
    sparse = jitted.sparsify_24(jnp.ones((3, 4)), "magnitude")
    assert sparse.values.shape == (64, 32)
    assert not np.any(np.asarray(sparse.values)[3:]) and not np.any(np.asarray(sparse.values)[:, 2:])
    every_group_empty = sum(formats.EMPTY_GROUP << shift for shift in range(0, 32, 4))
    np.testing.assert_array_equal(np.asarray(sparse.metadata).view(np.uint32), every_group_empty)


def test_venom_pads_rows_blocks_and_columns():
    x = jnp.array(np.random.default_rng(3).normal(size=(40, 48)), jnp.float32)
    sparse = jitted.sparsify_venom(x, v=16, m=8)
    assert sparse.values.shape == (64, 32) and sparse.metadata.shape == (1, 1, 128)
    assert sparse.columns.shape == (4, 64)
    columns = np.asarray(sparse.columns)
    assert (columns[:3, :24] < 48).all() and (columns[3] == 48).all() and (columns[:, 24:] == 48).all()
    assert sparse.condensed().shape == (40, 24) and jitted.dense(sparse).shape == (40, 48)


def test_formats_pass_through_jit_vmap_and_scan():
    x = jnp.array(np.random.default_rng(4).normal(size=(3, 68, 72)), jnp.float32)
    sparsify = jax.jit(lambda layer: ops.sparsify_venom(layer, 32, 12))
    stacked = jax.vmap(sparsify)(x)
    _, dense = jax.lax.scan(lambda carry, sparse: (carry, sparse.to_dense()), None, stacked)
    for layer in range(3):
        np.testing.assert_array_equal(dense[layer], jitted.dense(sparsify(x[layer])))
