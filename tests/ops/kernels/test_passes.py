"""The passes over weights and over the hidden layer: bit for bit the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference
from tests.ops.kernels import BACKENDS, each_backend, each_backend_that_lowers
from tests.ops.operands import (
    assert_same_bits,
    exact_stats,
    integers_and_special,
    random,
    random_or_special,
    random_venom_contiguous,
)

SHAPES = [(64, 64), (256, 704), (100, 300), (1, 3)]
WIDE, NARROW = jnp.float32, jnp.bfloat16
DTYPES = pytest.mark.parametrize("dtype, out", [(WIDE, NARROW), (NARROW, NARROW), (jnp.float16, jnp.float16)])
HALF_PRECISIONS = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
SPECIAL = pytest.mark.parametrize("special", [False, True])
KEYS = jax.random.key(2), jax.random.fold_in(jax.random.key(3), 4)


def _compiled(backend, op, *args, **options):
    return jax.jit(lambda *args: getattr(backend, op)(*args, **options))(*args)


def _assert_as_reference(backend, op, *args, **options):
    """The same bits as the reference's, twice."""
    expected = _compiled(reference, op, *args, **options)
    for _ in range(2):
        assert_same_bits(_compiled(backend, op, *args, **options), expected)


@pytest.mark.gpu
@each_backend
@SPECIAL
@DTYPES
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold", "mvue"])
def test_sparsify_24(method, axis, dtype, out, special, backend):
    for shape in SHAPES:
        x = random_or_special(shape, dtype, 0, special, scale=1.0)
        for key in KEYS if method == "mvue" else (None,):
            options = dict(method=method, axis=axis, scale=1.4375, dtype=out)
            _assert_as_reference(backend, "sparsify_24", x, key=key, **options)


@pytest.mark.gpu
@each_backend
def test_mvue_is_unbiased(backend):
    """The error of a mean of n draws is that of one draw, 0.47 of the signal on normal numbers, divided by n."""
    x, count = random((64, 128), NARROW, seed=5), 2000

    @jax.jit
    def mean(keys):
        draw = lambda key: backend.sparsify_24(x, "mvue", 0, scale=1.0, dtype=x.dtype, key=key).to_dense()  # noqa: E731
        return jnp.mean(jax.lax.map(lambda key: draw(key).astype(jnp.float32), keys), axis=0)

    exact = np.asarray(x.T, np.float32)
    error = np.square(np.asarray(mean(jax.random.split(jax.random.key(6), count))) - exact).sum()
    assert error / np.square(exact).sum() == pytest.approx(0.473 / count, rel=0.1)


@pytest.mark.gpu
@each_backend
@DTYPES
@SPECIAL
def test_sparsify_24_tiles(special, dtype, out, backend):
    for shape in [(64, 64), (256, 704), (100, 300), (7, 10)]:
        rng = np.random.default_rng(6)
        x, mask = random_or_special(shape, dtype, 7, special), jnp.asarray(rng.random(shape) < 0.5)
        _assert_as_reference(backend, "sparsify_24_tiles", x, mask, dtype=out)


@pytest.mark.gpu
@each_backend
@SPECIAL
@pytest.mark.parametrize("shape, layers", [((256, 128), 2), ((128, 300), 1), ((3 * 64, 64), 3)])
def test_soft_threshold_24(shape, layers, special, backend):
    w = random_or_special(shape, WIDE, 1, special)
    _assert_as_reference(backend, "soft_threshold_24", w, jnp.linspace(0.5, 1.5, layers), dtype=NARROW)


@pytest.mark.gpu
@each_backend
@SPECIAL
@HALF_PRECISIONS
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_24(shape, dtype, special, backend):
    h = random_or_special(shape, dtype, 2, special)
    # Not compiled: XLA would select from the reference's Y before it is rounded, by which ties arise.
    expected, _ = reference.squared_relu_24(h)
    for _ in range(2):
        ours, stats = _compiled(backend, "squared_relu_24", h)
        assert_same_bits(ours, expected)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@pytest.mark.gpu
@each_backend
@SPECIAL
@HALF_PRECISIONS
@pytest.mark.parametrize("shape", [(64, 64), (256, 704), (100, 128)])
def test_gated_squared_relu(shape, dtype, special, backend):
    """Forward and backward. The reference is not compiled: XLA would select and draw from what is not yet rounded."""
    h = random_or_special((shape[0], 2 * shape[1]), dtype, 2, special)
    y, seen = reference.gated_squared_relu_24(h)
    ours, stats = _compiled(backend, "gated_squared_relu_24", h)
    assert_same_bits(ours, y)
    np.testing.assert_allclose(stats, seen, rtol=1e-4)
    dy = random_or_special(shape, dtype, 3, special)
    for key in KEYS:
        wanted = reference.gated_squared_relu_gradients(dy, h, y, key=key)
        for _ in range(2):
            found = jax.jit(lambda *args, key=key: backend.gated_squared_relu_gradients(*args, key=key))(dy, h, y)
            # Zeros that are drawn may lose their signs in the reference, as in `_check_gradients`.
            assert_same_bits(*jax.tree.map(lambda x: np.asarray(x) + np.zeros((), x.dtype), (found, wanted)))


def _check_gradients(backend, dy, y, *, stochastic):
    """Square roots are those of the device: on a CPU they are rounded correctly, as Triton's kernel rounds them."""
    device = None if backend is BACKENDS["hopper"] else jax.devices("cpu")[0]
    compute, expected = (
        jax.jit(lambda dy, y, key, f=f: f.squared_relu_gradients(dy, y, key=key)) for f in (backend, reference)
    )
    for key in KEYS if stochastic else (None,):
        wanted = expected(*jax.device_put((dy, y, key), device))
        for _ in range(2):
            ours = compute(dy, y, key)
            if (
                stochastic
            ):  # compiled for an H100, the reference loses the signs of zeros that are drawn, at some shapes
                ours, wanted = jax.tree.map(lambda x: np.asarray(x) + np.zeros((), x.dtype), (ours, wanted))
            assert_same_bits(ours, wanted)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("stochastic", [False, True])
@SPECIAL
@HALF_PRECISIONS
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_gradients(shape, dtype, special, stochastic, backend):
    y, _ = jax.jit(reference.squared_relu_24)(random_or_special(shape, dtype, 1))
    _check_gradients(backend, random_or_special(shape, dtype, 2, special), y, stochastic=stochastic)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 16), (256, 16), (128, 32)])
@pytest.mark.parametrize("tokens", [256, 300])
def test_squared_relu_gradients_of_a_venom_matrix(tokens, v, m, stochastic, backend):
    h = random_or_special((tokens, 1024), NARROW, 3)
    y, _ = jax.jit(lambda h: reference.squared_relu_venom(h, v, m))(h)
    _check_gradients(backend, random_or_special((tokens, 4096 // m), NARROW, 4), y, stochastic=stochastic)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-12, 1e10, 1e19])
def test_hidden_layers_of_any_scale(scale):
    """Some squares of the largest are inf."""
    h, dy = (random_or_special((64, 128), NARROW, seed, scale=scale) for seed in range(2))
    y, _ = jax.jit(reference.squared_relu_24)(h)
    assert_same_bits(_compiled(BACKENDS["hopper"], "squared_relu_24", h)[0], y)
    _check_gradients(BACKENDS["hopper"], dy, y, stochastic=False)


BLOCKS = {
    "hopper": [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32), (256, 32), (64, 32), (512, 16)],
    "triton": [(64, 8), (128, 16), (256, 16), (128, 32), (64, 64), (64, 4)],
}


@pytest.mark.gpu
@HALF_PRECISIONS
@pytest.mark.parametrize("backend, v, m", [(b, *block) for name, b in BACKENDS.items() for block in BLOCKS[name]])
@pytest.mark.parametrize("tokens", [512, 300])
def test_venom(tokens, v, m, dtype, backend):
    """Squares of integers add up exactly in any order: so do the norms that columns are chosen by."""
    neurons = 1024 if tokens == 512 or backend is BACKENDS["hopper"] else -(-480 // m) * m
    x = jnp.asarray(np.random.default_rng(7).integers(-8, 9, (tokens, neurons)), dtype)
    _assert_as_reference(backend, "sparsify_venom", x, v=v, m=m, dtype=dtype)
    y_expected, stats_expected = _compiled(reference, "squared_relu_venom", x, v=v, m=m)
    y, stats = _compiled(backend, "squared_relu_venom", x, v=v, m=m)
    assert_same_bits(y, y_expected)
    np.testing.assert_allclose(stats, stats_expected, rtol=1e-5)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, np.nan])
def test_venom_of_special_numbers(special, backend):
    x = integers_and_special(special, NARROW)
    _assert_as_reference(backend, "sparsify_venom", x, v=128, m=16, dtype=NARROW)
    y, expected = (_compiled(b, "squared_relu_venom", x, v=128, m=16)[0] for b in (backend, reference))
    assert_same_bits(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [*BACKENDS.values(), reference])
def test_venom_keeps_as_much_as_the_reference(backend):
    """Nearly equal norms of normal numbers may rank otherwise; what is kept is then as large."""
    h = random_or_special((512, 2048), NARROW, 8)
    y, stats = _compiled(backend, "squared_relu_venom", h, v=128, m=16)
    mask = np.asarray(y.mask())
    y_all = np.square(np.maximum(np.asarray(h, np.float32), 0))
    np.testing.assert_allclose(stats.kept_energy, np.square(y_all[mask]).sum(), rtol=1e-2)
    assert (np.asarray(y.columns).reshape(4, -1, 4) // 16 == np.arange(128)[:, None]).all()
    assert (mask.reshape(-1, 4).sum(1) <= 4).all() and mask.sum() == h.size // 8


def _assert_lowers_like_the_reference(backend, op, *operands, **options):
    ours, expected = (functools.partial(getattr(b, op), **options) for b in (backend, reference))
    lowered = jax.jit(ours).trace(*operands).lower(lowering_platforms=("cuda",))
    assert jax.tree.leaves(lowered.out_info) == jax.tree.leaves(jax.eval_shape(expected, *operands))
    assert "custom_call" in lowered.as_text()


def _shape(*shape, dtype=NARROW):
    return jax.ShapeDtypeStruct(shape, dtype)


@each_backend_that_lowers
@pytest.mark.parametrize("dtype", [WIDE, NARROW])
def test_sparsifying_weights_lowers_without_a_gpu(dtype, backend):
    x, mask = _shape(300, 190, dtype=dtype), _shape(300, 190, dtype=bool)
    for method in ("magnitude", "soft_threshold", "mvue"):
        for axis in (-1, 0):
            options = dict(method=method, axis=axis, scale=1.5, dtype=NARROW, key=KEYS[0])
            _assert_lowers_like_the_reference(backend, "sparsify_24", x, **options)
    _assert_lowers_like_the_reference(backend, "sparsify_24_tiles", x, mask, dtype=NARROW)
    w, scale = _shape(128, 200, dtype=dtype), _shape(2, dtype=WIDE)
    _assert_lowers_like_the_reference(backend, "soft_threshold_24", w, scale, dtype=NARROW)


@each_backend_that_lowers
@pytest.mark.parametrize("shape", SHAPES)
def test_passes_over_a_hidden_layer_lower_without_a_gpu(shape, backend):
    h = _shape(*shape)
    _assert_lowers_like_the_reference(backend, "squared_relu_24", h)
    y, _ = jax.eval_shape(reference.squared_relu_24, h)
    for key in (None, KEYS[0]):
        _assert_lowers_like_the_reference(backend, "squared_relu_gradients", h, y, key=key)


@each_backend_that_lowers
@pytest.mark.parametrize("tokens", [64, 300])
def test_passes_over_a_gated_hidden_layer_lower_without_a_gpu(tokens, backend):
    h = _shape(tokens, 2 * 192)
    _assert_lowers_like_the_reference(backend, "gated_squared_relu_24", h)
    y, _ = jax.eval_shape(reference.gated_squared_relu_24, h)
    _assert_lowers_like_the_reference(backend, "gated_squared_relu_gradients", _shape(tokens, 192), h, y, key=KEYS[0])


@each_backend_that_lowers
@pytest.mark.parametrize("v, m", [(64, 8), (128, 8), (128, 16), (256, 16), (128, 32)])
def test_passes_to_venom_form_lower_without_a_gpu(v, m, backend):
    h = _shape(300, 1024)
    _assert_lowers_like_the_reference(backend, "sparsify_venom", h, v=v, m=m, dtype=NARROW)
    _assert_lowers_like_the_reference(backend, "squared_relu_venom", h, v=v, m=m)
    y, _ = jax.eval_shape(functools.partial(reference.squared_relu_venom, v=v, m=m), h)
    _assert_lowers_like_the_reference(backend, "squared_relu_gradients", _shape(300, 4096 // m), y, key=KEYS[0])


@each_backend
def test_refuses_what_it_cannot_do(backend):
    x = jnp.zeros((64, 64), NARROW)
    y, _ = reference.squared_relu_24(x)
    rbg = jax.random.key(0, impl="rbg")
    contiguous = random_venom_contiguous(64, 128, 64, 64, 64, NARROW, seed=0)
    for message, call in (
        ("16-bit", lambda: backend.sparsify_24(x, "magnitude", -1, dtype=WIDE, scale=1.0)),
        ("16-bit", lambda: backend.sparsify_24_tiles(x, x > 0, dtype=WIDE)),
        ("float16", lambda: backend.squared_relu_24(x.astype(WIDE))),
        ("threefry2x32, not of rbg", lambda: backend.sparsify_24(x, "mvue", -1, scale=1.0, dtype=NARROW, key=rbg)),
        ("threefry2x32, not of rbg", lambda: backend.squared_relu_gradients(x, y, key=rbg)),
        ("contiguous", lambda: backend.squared_relu_gradients(x, contiguous)),
        ("float16", lambda: backend.gated_squared_relu_24(x.astype(WIDE))),
        ("threefry2x32", lambda: backend.gated_squared_relu_gradients(x, jnp.zeros((64, 128), NARROW), y, key=rbg)),
        ("in the dtype of the matrix", lambda: backend.sparsify_venom(x, 64, 16, dtype=jnp.float16)),
        ("v to be a multiple of 64", lambda: backend.squared_relu_venom(jnp.zeros((96, 768), NARROW), 96, 16)),
        (", m ", lambda: backend.squared_relu_venom(jnp.zeros((64, 768), NARROW), 64, 12)),
        ("not for 96", lambda: backend.soft_threshold_24(jnp.zeros((192, 64)), jnp.ones(2), dtype=NARROW)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
