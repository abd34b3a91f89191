"""The selections and the passes over the hidden layer: bit for bit the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import reference, triton
from tests.ops.operands import (
    assert_same_bits,
    exact_stats,
    integers_and_special,
    random_or_special,
    random_venom_contiguous,
)
from tests.ops.properties import sparsify_24, sparsify_24_tiles, squared_relu_gradients
from tests.ops.triton import needs_gpu_build

SHAPES = [(64, 64), (256, 704), (100, 300), (1, 3)]
WIDE, NARROW = jnp.float32, jnp.bfloat16


def _compiled(backend, op, *args, **options):
    return jax.jit(lambda *args: getattr(backend, op)(*args, **options))(*args)


def _assert_as_reference(op, *args, **options):
    """The result, which equals the reference's, twice."""
    expected = _compiled(reference, op, *args, **options)
    for _ in range(2):
        result = _compiled(triton, op, *args, **options)
        assert_same_bits(result, expected)
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype, out", [(WIDE, NARROW), (NARROW, NARROW), (jnp.float16, jnp.float16)])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold"])
def test_sparsify_24(method, axis, dtype, out, special):
    for shape in SHAPES[1:3]:
        sparsify_24.check(triton.sparsify_24, shape, method, axis, dtype, out, special)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype, out", [(WIDE, NARROW), (NARROW, NARROW), (jnp.float16, jnp.float16)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_sparsify_24_draws_what_the_reference_draws(axis, dtype, out, special):
    for shape in SHAPES[1:]:
        sparsify_24.check_draws(triton.sparsify_24, shape, axis, dtype, out, special)


@pytest.mark.gpu
def test_sparsify_24_draws_without_bias():
    sparsify_24.check_draws_without_bias(triton.sparsify_24)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out", [(WIDE, NARROW), (NARROW, NARROW), (jnp.float16, jnp.float16)])
@pytest.mark.parametrize("kind", sparsify_24_tiles.KINDS)
def test_sparsify_24_tiles(kind, dtype, out):
    sparsify_24_tiles.check(triton.sparsify_24_tiles, kind, dtype, out)


@pytest.mark.gpu
def test_sparsify_24_tiles_keeps_as_much_as_the_reference():
    sparsify_24_tiles.check_keeps_as_much(triton.sparsify_24_tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("layers, rows, columns", [(1, 100, 300), (3, 128, 200)])
def test_soft_threshold_24(layers, rows, columns, special):
    w = random_or_special((layers * rows, columns), WIDE, 1, special)
    _assert_as_reference("soft_threshold_24", w, jnp.linspace(0.5, 1.5, layers), dtype=NARROW)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_24(shape, dtype, special):
    h = random_or_special(shape, dtype, 2, special)
    # Not compiled: XLA would select from the reference's Y before it is rounded, by which ties arise.
    expected, _ = reference.squared_relu_24(h)
    ours, stats = _compiled(triton, "squared_relu_24", h)
    assert_same_bits(ours, expected)
    np.testing.assert_allclose(stats, exact_stats(h, expected.values), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 16), (256, 16), (128, 32), (64, 64), (64, 4)])
@pytest.mark.parametrize("tokens, neurons", [(512, 1024), (300, 480), (64, 4)])
def test_venom(tokens, neurons, v, m, dtype):
    """Integers, whose squares add up exactly in any order: so do the norms that columns are chosen by."""
    neurons = -(-neurons // m) * m
    x = jnp.asarray(np.random.default_rng(7).integers(-8, 9, (tokens, neurons)), dtype)
    _assert_as_reference("sparsify_venom", x, v=v, m=m, dtype=dtype)
    y_expected, stats_expected = _compiled(reference, "squared_relu_venom", x, v=v, m=m)
    y, stats = _compiled(triton, "squared_relu_venom", x, v=v, m=m)
    assert_same_bits(y, y_expected)
    np.testing.assert_allclose(stats, stats_expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan])
def test_venom_of_special_numbers(special):
    x = integers_and_special(special, NARROW)
    _assert_as_reference("sparsify_venom", x, v=128, m=16, dtype=NARROW)


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_relu_gradients(shape, dtype, special, drawn):
    """As on the CPU, whose square roots are rounded correctly; XLA's on a GPU move one float16 in ten thousand."""
    options = dict(special=special, drawn=drawn, device=jax.devices("cpu")[0])
    squared_relu_gradients.check_24(triton.squared_relu_gradients, shape, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("v, m", [(64, 8), (128, 16), (256, 16), (128, 32)])
@pytest.mark.parametrize("tokens, neurons", [(256, 1024), (300, 480)])
def test_squared_relu_gradients_of_a_venom_matrix(tokens, neurons, v, m, drawn):
    options = dict(drawn=drawn, device=jax.devices("cpu")[0])
    squared_relu_gradients.check_venom(triton.squared_relu_gradients, tokens, neurons, v, m, **options)


@needs_gpu_build
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["soft_threshold", "mvue"])
def test_lowers_without_a_gpu(method, axis, dtype):
    x = jax.ShapeDtypeStruct((300, 192), dtype)
    options = dict(method=method, axis=axis, scale=1.5, dtype=NARROW, key=jax.random.key(0))
    ours, expected = (functools.partial(backend.sparsify_24, **options) for backend in (triton, reference))
    lowered = jax.jit(ours).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.out_info == jax.eval_shape(expected, x)


@needs_gpu_build
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_sparsify_24_tiles_lowers_without_a_gpu(given, dtype):
    x, mask = (jax.ShapeDtypeStruct((300, 190), d) for d in (dtype, bool))
    ours, expected = (functools.partial(backend.sparsify_24_tiles, dtype=NARROW) for backend in (triton, reference))
    operands = x, mask if given else None
    lowered = jax.jit(ours).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.out_info == jax.eval_shape(expected, *operands)


@needs_gpu_build
def test_sparsify_venom_lowers_without_a_gpu():
    x = jax.ShapeDtypeStruct((300, 192), NARROW)
    options = dict(v=128, m=16, dtype=NARROW)
    ours, expected = (functools.partial(backend.sparsify_venom, **options) for backend in (triton, reference))
    lowered = jax.jit(ours).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.out_info == jax.eval_shape(expected, x)


@needs_gpu_build
@pytest.mark.parametrize("op, options", [("squared_relu_24", {}), ("squared_relu_venom", dict(v=128, m=16))])
def test_passes_over_the_hidden_layer_lower_without_a_gpu(op, options):
    h = jax.ShapeDtypeStruct((300, 480), NARROW)
    activate = functools.partial(getattr(triton, op), **options)
    expected = jax.eval_shape(functools.partial(vars(reference)[op], **options), h)
    assert jax.jit(activate).trace(h).lower(lowering_platforms=("cuda",)).out_info == expected
    y = expected[0]
    dy = jax.ShapeDtypeStruct((300, 480 if op == "squared_relu_24" else 120), NARROW)
    for key in (None, jax.random.key(0)):
        gradients = jax.jit(lambda dy, y, key=key: triton.squared_relu_gradients(dy, y, key=key))
        lowered = gradients.trace(dy, y).lower(lowering_platforms=("cuda",))
        assert lowered.out_info == jax.eval_shape(reference.squared_relu_gradients, dy, y)


def test_refuses_what_it_cannot_do():
    x = jnp.zeros((64, 96), jnp.bfloat16)
    sparsify_24.check_refuses_other_generators(triton.sparsify_24)
    with pytest.raises(NotImplementedError, match="16-bit"):
        triton.sparsify_24(x, "magnitude", -1, dtype=jnp.float32, scale=1.0)
    with pytest.raises(NotImplementedError, match="16-bit"):
        triton.sparsify_24_tiles(x, None, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="in the dtype of the matrix"):
        triton.sparsify_venom(x, 64, 16, dtype=jnp.float16)
    with pytest.raises(NotImplementedError, match="threefry2x32, not of rbg"):
        triton.squared_relu_gradients(x, reference.squared_relu_24(x)[0], key=jax.random.key(0, impl="rbg"))
    contiguous = random_venom_contiguous(64, 128, 64, 64, 32, x.dtype, seed=0)
    with pytest.raises(NotImplementedError, match="not to be contiguous"):
        triton.squared_relu_gradients(x[:, :64], contiguous)
    for v, m in ((32, 16), (64, 12)):
        with pytest.raises(NotImplementedError, match="multiple of 64, m a power of two"):
            triton.sparsify_venom(x, v, m, dtype=x.dtype)
