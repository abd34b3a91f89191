"""A residual's sum with its norm, and the gradients of both, against float64."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.passes import add_norm as kernels

EPSILON = 1e-3
WITH_UPDATE = pytest.mark.parametrize("with_update", [False, True])


def operands(shape, with_update, dtype=jnp.bfloat16):
    """Random x, update and scale, and gradients of both results; rows differ in size, and some are nearly zero."""
    rng = np.random.default_rng(sum(shape))
    sizes = 10.0 ** rng.uniform(-3, 1, (*shape[:-1], 1))
    x, update, *gradients = (jnp.asarray(rng.normal(size=shape) * sizes, dtype) for _ in range(4))
    return x, update if with_update else None, jnp.asarray(rng.uniform(0.5, 1.5, shape[-1]), jnp.float32), gradients


def expected(x, update, scale, gradients):
    """Sum, norm, and gradients of x and scale, in float64; the sum is rounded to its dtype before it is normed."""
    total, scale = np.asarray(x if update is None else x + update, np.float64), np.asarray(scale, np.float64)
    of_total, of_normed = (np.asarray(gradient, np.float64) for gradient in gradients)
    root = (np.mean(total**2, axis=-1, keepdims=True) + EPSILON) ** -0.5
    normed, scaled = total * root, of_normed * scale
    of_x = of_total + root * (scaled - normed * np.mean(scaled * normed, axis=-1, keepdims=True))
    return total, normed * scale, of_x, (of_normed * normed).sum(tuple(range(total.ndim - 1)))


@functools.partial(jax.jit, static_argnums=0)
def compute(implementation, x, update, scale, gradients):
    """The same, by an implementation."""
    results, vjp = jax.vjp(lambda *args: implementation(*args, EPSILON), x, update, scale)
    of_x, of_update, of_scale = vjp(tuple(gradients))
    return *results, of_x, of_scale, of_x if update is None else of_update


def relative_error(found, exact):
    """Returns that of the worst row: none may hide behind larger ones."""
    norm = functools.partial(np.linalg.norm, axis=-1)
    return (norm(np.asarray(found, np.float64) - exact) / norm(exact)).max()


@WITH_UPDATE
@pytest.mark.parametrize("shape", [(5, 48), (2, 7, 32)])
def test_reference(shape, with_update):
    arguments = operands(shape, with_update, jnp.float32)
    wanted = expected(*arguments)
    *found, of_update = compute(ops.add_norm, *arguments)
    for ours, exact in zip(found, wanted, strict=True):
        assert relative_error(ours, exact) < 2e-5
    np.testing.assert_array_equal(of_update, found[2])


def check_rule_for_bfloat16(implementation, shape, with_update):
    """Sums are rounded; errors of norms and gradients are at most 1.5 times the reference's, or of float32."""
    arguments = operands(shape, with_update)
    wanted = expected(*arguments)
    *found, of_update = compute(implementation, *arguments)
    *of_reference, _ = compute(reference.add_norm, *arguments)
    np.testing.assert_array_equal(np.asarray(found[0], np.float64), wanted[0])
    np.testing.assert_array_equal(of_update, found[2])
    for ours, theirs, exact in zip(found, of_reference, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert relative_error(ours, exact) <= max(1.5 * relative_error(theirs, exact), 1e-5)


@pytest.mark.gpu
@WITH_UPDATE
@pytest.mark.parametrize(
    "shape", [(128, 512), (4096, 2048), (4096, 2560), (1000, 4096), (777, 8192), (3, 256), (8, 600, 1280)]
)
def test_hopper_is_as_exact_as_bfloat16_allows(shape, with_update):
    for _ in range(2):
        check_rule_for_bfloat16(functools.partial(ops.add_norm, implementation="hopper"), shape, with_update)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic has no public parameters yet")
@WITH_UPDATE
@pytest.mark.parametrize("shape", [(37, 512), (2, 5, 1280), (3, 256)])
def test_kernels_in_the_interpreter(monkeypatch, capfd, shape, with_update):
    monkeypatch.setattr(kernels, "core_count", lambda: 2)
    monkeypatch.setattr(kernels, "_BLOCKS", 1)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        check_rule_for_bfloat16(lambda *args: hopper.add_norm(*args), shape, with_update)
    assert "RACE" not in capfd.readouterr().out


def backward(total, scale, of_normed, of_total, epsilon):
    """Computes what the gradient's kernel does, in XLA."""
    of_total = jnp.zeros_like(total) if of_total is None else of_total
    _, vjp = jax.vjp(lambda *args: reference.add_norm(args[0], None, args[1], epsilon), total, scale)
    return vjp((of_total, of_normed))


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_has_no_gradient(monkeypatch, used):
    """XLA stands in for the kernels; what lies around them is under test."""
    x, update, scale, gradients = operands((6, 256), with_update=True)
    gradients[1 - used] = jnp.zeros_like(x)
    given = []
    monkeypatch.setattr(kernels, "forward", reference.add_norm)
    monkeypatch.setattr(kernels, "backward", lambda *args: given.append(args[3]) or backward(*args))

    def one_result(*args):
        return jnp.vdot(hopper.add_norm(*args, EPSILON)[used].astype(jnp.float32), gradients[used].astype(jnp.float32))

    of_x, of_update, of_scale = jax.grad(one_result, argnums=(0, 1, 2))(x, update, scale)
    *_, wanted_of_x, wanted_of_scale = expected(x, update, scale, gradients)
    np.testing.assert_array_equal(of_x, of_update)
    assert relative_error(of_x, wanted_of_x) < 2**-7
    np.testing.assert_allclose(of_scale, wanted_of_scale, rtol=1e-4, atol=1e-6)
    assert [of_total is None for of_total in given] == [used == 1]  # what is not written need not be read
