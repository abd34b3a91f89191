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


@functools.partial(jax.jit, static_argnums=(0, 1))
def compute(implementation, used, x, update, scale, gradients):
    """The same, by an implementation, of whose results a loss uses some."""

    def loss(*args):
        results = implementation(*args, EPSILON)
        of_used = [jnp.vdot(results[i].astype(jnp.float32), gradients[i].astype(jnp.float32)) for i in used]
        return sum(of_used), results

    (of_x, of_update, of_scale), results = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, update, scale)
    return *results, of_x, of_scale, of_x if update is None else of_update


def relative_error(found, exact):
    """Returns that of the worst row: none may hide behind larger ones."""
    norm = functools.partial(np.linalg.norm, axis=-1)
    return (norm(np.asarray(found, np.float64) - exact) / np.maximum(norm(exact), 1e-30)).max()


@pytest.mark.parametrize("with_update", [False, True])
@pytest.mark.parametrize("shape", [(5, 48), (2, 7, 32)])
def test_reference(shape, with_update):
    arguments = operands(shape, with_update, jnp.float32)
    *found, of_update = compute(ops.add_norm, (0, 1), *arguments)
    for ours, exact in zip(found, expected(*arguments), strict=True):
        assert relative_error(ours, exact) < 2e-5
    np.testing.assert_array_equal(of_update, found[2])


def check_rule_for_bfloat16(implementation, shape, with_update, used):
    """Sums are rounded; errors of norms and gradients are at most 1.5 times the reference's, or of float32."""
    *arguments, gradients = operands(shape, with_update)
    wanted = expected(*arguments, [g if i in used else jnp.zeros_like(g) for i, g in enumerate(gradients)])
    *found, of_update = compute(implementation, used, *arguments, gradients)
    *of_reference, _ = compute(reference.add_norm, used, *arguments, gradients)
    np.testing.assert_array_equal(np.asarray(found[0], np.float64), wanted[0])
    np.testing.assert_array_equal(of_update, found[2])
    for ours, theirs, exact in zip(found, of_reference, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert relative_error(ours, exact) <= max(1.5 * relative_error(theirs, exact), 1e-5)


BOTH, TOTAL, NORMED = (0, 1), (0,), (1,)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2560), (1000, 4096), (777, 8192), (3, 256), (8, 600, 1280)])
@pytest.mark.parametrize("with_update, used", [(False, BOTH), (True, BOTH), (False, NORMED), (True, NORMED)])
def test_hopper_is_as_exact_as_bfloat16_allows(shape, with_update, used):
    for _ in range(2):
        check_rule_for_bfloat16(functools.partial(ops.add_norm, implementation="hopper"), shape, with_update, used)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic has no public parameters yet")
@pytest.mark.parametrize(
    "shape, with_update, used",
    [((37, 512), True, BOTH), ((2, 5, 1280), False, BOTH), ((3, 256), True, NORMED), ((3, 256), True, TOTAL)],
)
def test_kernels_in_the_interpreter(monkeypatch, capfd, shape, with_update, used):
    monkeypatch.setattr(kernels, "core_count", lambda: 2)
    monkeypatch.setattr(kernels, "_BLOCKS", 1)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        check_rule_for_bfloat16(lambda *args: hopper.add_norm(*args), shape, with_update, used)
    assert "RACE" not in capfd.readouterr().out
