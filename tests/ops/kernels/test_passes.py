"""The passes over weights and over the hidden layer: bit for bit the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import hopper, reference
from sparse_lm.ops.activations import ACTIVATIONS, activate, rows_per_neuron
from tests.ops import jitted
from tests.ops.kernels import BACKENDS, each_backend
from tests.ops.operands import assert_same_bits, exact_hidden, exact_stats, integers_and_special, random_or_special

pytestmark = pytest.mark.gpu


SHAPES = [(64, 64), (256, 704), (100, 300), (1, 3)]
NARROW = jnp.bfloat16
DTYPES = pytest.mark.parametrize("dtype, out", [(jnp.float32, NARROW), (NARROW, NARROW), (jnp.float16, jnp.float16)])
HALF_PRECISIONS = pytest.mark.parametrize("dtype", [NARROW, jnp.float16])
SPECIAL = pytest.mark.parametrize("special", [False, True])
KEYS = jax.random.key(2), jax.random.fold_in(jax.random.key(3), 4)


def _compiled(backend, op, *args, **options):
    return jax.jit(lambda *args: getattr(backend, op)(*args, **options))(*args)


def _assert_as_reference(backend, op, *args, **options):
    """The same bits as the reference's, twice."""
    expected = _compiled(reference, op, *args, **options)
    for _ in range(2):
        assert_same_bits(_compiled(backend, op, *args, **options), expected)


def _unsigned_zeros(tree):
    """Zeros that are drawn lose their signs in the reference, compiled for an H100, at some shapes."""
    return jax.tree.map(lambda x: np.asarray(x) + np.zeros((), x.dtype), tree)


@each_backend
@SPECIAL
@DTYPES
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "mvue"])
def test_sparsify_24(method, axis, dtype, out, special, backend):
    for shape in SHAPES:
        x = random_or_special(shape, dtype, 0, special, scale=1.0)
        for key in KEYS if method == "mvue" else (None,):
            _assert_as_reference(backend, "sparsify_24", x, key=key, method=method, axis=axis, dtype=out)


@DTYPES
@SPECIAL
def test_sparsify_24_tiles(special, dtype, out):
    for shape in [(64, 64), (256, 704), (100, 300), (7, 10)]:
        rng = np.random.default_rng(6)
        x, mask = random_or_special(shape, dtype, 7, special), jnp.asarray(rng.random(shape) < 0.5)
        _assert_as_reference(hopper, "sparsify_24_tiles", x, mask, dtype=out)


@each_backend
@SPECIAL
@DTYPES
def test_soft_threshold_24(dtype, out, special, backend):
    for shape, layers, axis in [((256, 128), 2, -1), ((128, 300), 1, -1), ((100, 300), 1, 0), ((3 * 64, 64), 3, -1)]:
        w = random_or_special(shape, dtype, 1, special, scale=1.0)
        scale = jnp.linspace(0.5, 1.5, layers)
        _assert_as_reference(backend, "soft_threshold_24", w, scale, axis=axis, dtype=out)


@each_backend
@SPECIAL
@HALF_PRECISIONS
def test_squared_relu(dtype, special, backend):
    for shape in SHAPES:
        h = random_or_special(shape, dtype, 2, special)
        # Not compiled: XLA would select from the reference's Y before it is rounded, by which ties arise.
        expected, _ = reference.squared_relu_24(h)
        ours, stats = _compiled(backend, "squared_relu_24", h)
        assert_same_bits(ours, expected)
        np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@each_backend
def test_rows_are_multiplied_by_their_factors_first(backend):
    for shape in SHAPES:
        h, dy = (random_or_special(shape, NARROW, seed) for seed in (2, 3))
        factor = jnp.exp2(jnp.arange(shape[0]) % 9 - 4.0).astype(NARROW)[:, None]
        y, stats = _compiled(backend, "squared_relu_24", h, factor=factor)
        expected, _ = reference.squared_relu_24(h * factor)
        assert_same_bits(y, expected)
        np.testing.assert_allclose(stats, exact_stats(h * factor, expected.values), rtol=1e-5)
        found = _compiled(backend, "squared_relu_gradients", dy, y, factor=factor)
        assert_same_bits(found, _compiled(backend, "squared_relu_gradients", dy * factor, y))


@each_backend
@SPECIAL
@HALF_PRECISIONS
def test_gated_squared_relu(dtype, special, backend):
    """Forward and backward. The reference is not compiled: XLA would select and draw from what is not yet rounded."""
    for shape in ((64, 64), (256, 704), (100, 128)):
        h = random_or_special((shape[0], 2 * shape[1]), dtype, 2, special)
        y, seen = reference.gated_squared_relu_24(h)
        ours, stats = _compiled(backend, "gated_squared_relu_24", h)
        assert_same_bits(ours, y)
        np.testing.assert_allclose(stats, seen, rtol=1e-4)
        dy = random_or_special(shape, dtype, 3, special)
        for key in KEYS:
            wanted = reference.gated_squared_relu_gradients(dy, h, y, key=key)
            found = _compiled(backend, "gated_squared_relu_gradients", dy, h, y, key=key)
            _assert_same_gradients(*_unsigned_zeros((found, wanted)))


@HALF_PRECISIONS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_hidden_gradients(activation, dtype):
    for shape in ((64, 64), (256, 704), (100, 128)):
        h = random_or_special((shape[0], rows_per_neuron(activation) * shape[1]), dtype, 2)
        dy = random_or_special(shape, dtype, 3)
        _, _, saved = activate(h, activation)
        dh, dh_t, y = _compiled(hopper, "hidden_gradients", dy, saved, activation=activation, key=KEYS[0])
        eps = float(jnp.finfo(dtype).eps)
        for found, exact in zip((dh, y), exact_hidden(dy, saved, activation), strict=True):
            np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=eps, atol=eps * 1e-3)
        assert_same_bits(*_unsigned_zeros((dh_t, reference.sparsify_24(dh, "mvue", 0, dtype=dtype, key=KEYS[0]))))


def _check_gradients(backend, dy, y, *, keys=(None,)):
    """Square roots are those of the device: on a CPU they are rounded correctly, as Triton's kernel rounds them."""
    device = None if backend is BACKENDS["hopper"] else jax.devices("cpu")[0]
    for key in keys:
        wanted = _compiled(reference, "squared_relu_gradients", *jax.device_put((dy, y), device), key=key)
        found = _compiled(backend, "squared_relu_gradients", dy, y, key=key)
        _assert_same_gradients(*((found, wanted) if key is None else _unsigned_zeros((found, wanted))))


def _assert_same_gradients(found, wanted):
    """The same bits, but for the sums of Y dY: those of a row may cancel, and are added up in another order."""
    assert_same_bits(found[:3], wanted[:3])
    finite = np.abs(np.where(np.isfinite(wanted.y_dy), wanted.y_dy, 0)).max()
    np.testing.assert_allclose(found.y_dy, wanted.y_dy, rtol=1e-4, atol=1e-5 * finite)


@each_backend
@pytest.mark.parametrize("keys", [(None,), KEYS], ids=["magnitude", "drawn"])
@SPECIAL
@HALF_PRECISIONS
def test_squared_relu_gradients(dtype, special, keys, backend):
    for shape in SHAPES:
        y, _ = _compiled(reference, "squared_relu_24", random_or_special(shape, dtype, 1))
        _check_gradients(backend, random_or_special(shape, dtype, 2, special), y, keys=keys)


@pytest.mark.parametrize("keys", [(None,), KEYS], ids=["magnitude", "drawn"])
@pytest.mark.parametrize("tokens, v, m", [(256, 64, 8), (300, 128, 16), (300, 256, 16), (256, 128, 32)])
def test_squared_relu_gradients_of_a_venom_matrix(tokens, v, m, keys):
    y, _ = _compiled(reference, "squared_relu_venom", random_or_special((tokens, 1024), NARROW, 3), v=v, m=m)
    _check_gradients(hopper, random_or_special((tokens, 4096 // m), NARROW, 4), y, keys=keys)


@pytest.mark.parametrize("scale", [1e-12, 1e10, 1e19])
def test_hidden_layers_of_any_scale(scale):
    """Some squares of the largest are inf."""
    h, dy = (random_or_special((64, 128), NARROW, seed, scale=scale) for seed in range(2))
    y, _ = _compiled(reference, "squared_relu_24", h)
    assert_same_bits(_compiled(BACKENDS["hopper"], "squared_relu_24", h)[0], y)
    _check_gradients(BACKENDS["hopper"], dy, y)


BLOCKS = [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32), (256, 32), (64, 32), (512, 16)]


@HALF_PRECISIONS
@pytest.mark.parametrize("v, m", BLOCKS)
@pytest.mark.parametrize("tokens", [512, 300])
def test_venom_of_integers(tokens, v, m, dtype):
    """Squares of integers add up exactly in any order: so do the norms that columns are chosen by."""
    x = jnp.asarray(np.random.default_rng(7).integers(-8, 9, (tokens, 1024)), dtype)
    y_expected, stats_expected = _compiled(reference, "squared_relu_venom", x, v=v, m=m)
    y, stats = _compiled(hopper, "squared_relu_venom", x, v=v, m=m)
    assert_same_bits(y, y_expected)
    np.testing.assert_allclose(stats, stats_expected, rtol=1e-5)


@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, np.nan])
def test_venom_of_special_numbers(special):
    x = integers_and_special(special, NARROW)
    y, expected = (_compiled(b, "squared_relu_venom", x, v=128, m=16)[0] for b in (hopper, reference))
    assert_same_bits(y, expected)


def test_venom_keeps_as_much_as_the_reference():
    """Nearly equal norms of normal numbers may rank otherwise; what is kept is then as large."""
    h = random_or_special((512, 2048), NARROW, 8)
    y, stats = _compiled(hopper, "squared_relu_venom", h, v=128, m=16)
    _, expected = _compiled(reference, "squared_relu_venom", h, v=128, m=16)
    np.testing.assert_allclose(stats.kept_energy, expected.kept_energy, rtol=1e-2)
    mask = np.asarray(jitted.mask(y))
    y_all = np.square(np.maximum(np.asarray(h, np.float32), 0))
    np.testing.assert_allclose(stats.kept_energy, np.square(y_all[mask]).sum(), rtol=1e-2)
    assert (np.asarray(y.columns).reshape(4, -1, 4) // 16 == np.arange(128)[:, None]).all()
    assert (mask.reshape(-1, 4).sum(1) <= 4).all() and mask.sum() == h.size // 8
