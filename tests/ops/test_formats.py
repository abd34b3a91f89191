import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import formats
from tests.ops import jitted, numpy_sparse

SHAPES = [(64, 64), (128, 192), (70, 68), (5, 12)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_metadata_are_laid_out_as_described(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sparse = jitted.sparsify_24(jnp.array(x), "magnitude")
    dense, mask = numpy_sparse.sparsify_rows(numpy_sparse.pad(x), "magnitude")
    values, metadata = numpy_sparse.compress(dense, mask)
    np.testing.assert_array_equal(sparse.values, values)
    np.testing.assert_array_equal(np.asarray(sparse.metadata).view(np.uint32), metadata)
    assert sparse.metadata.dtype == jnp.int32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_to_dense_and_mask_restore_positions(shape, dtype):
    x = jnp.array(np.random.default_rng(1).normal(size=shape), dtype)
    sparse = jitted.sparsify_24(x, "magnitude")
    _, mask = numpy_sparse.sparsify_rows(np.asarray(x, np.float64), "magnitude")
    assert sparse.dtype == dtype and sparse.shape == shape
    np.testing.assert_array_equal(jitted.mask(sparse), mask)
    np.testing.assert_array_equal(jitted.dense(sparse), jnp.where(mask, x, 0))


def test_unpacking_inverts_packing():
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint32)
    chosen = pairs[np.random.default_rng(2).integers(6, size=(128, 32))]
    first, second = formats.unpack_metadata(formats.pack_metadata(chosen[..., 0], chosen[..., 1]))
    np.testing.assert_array_equal(first, chosen[..., 0])
    np.testing.assert_array_equal(second, chosen[..., 1])


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


def test_columns_are_taken_as_from_the_dense_matrix():
    rng = np.random.default_rng(4)
    sparse = jitted.sparsify_24(jnp.asarray(rng.normal(size=(37, 52)), jnp.float32))
    columns = jnp.asarray(rng.permutation(52)[:11])
    np.testing.assert_array_equal(sparse.take(columns), sparse.to_dense()[:, columns])
