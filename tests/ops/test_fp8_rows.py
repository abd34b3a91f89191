"""Rows in e4m3 and their transposes, in one pass, are bit for bit those of XLA's operations one after the other."""

import os
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.ops import backends, fp8, hopper, reference
from sparse_lm.ops.hopper.frame.compat import TRANSPOSES
from sparse_lm.ops.hopper.passes import fp8_rows as kernels
from sparse_lm.recipes.dense import Dense
from tests.command_lines import run_python

KERNELS = ("fp8_rows", "fp8_squared_relu", "fp8_squared_relu_gradients")


def product(tokens, columns, seed):
    """A product with rows of very different sizes: one is zero, and three have an entry that is not finite."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, columns)) * np.exp(rng.normal(0, 4, (tokens, 1)))
    x[seed] = 0
    for row, bad in enumerate((np.nan, np.inf, -np.inf), seed + 3):
        x[row, (37 * row) % columns] = bad
    factor = 2.0 ** rng.integers(-9, 9, (tokens, 1))
    return fp8.Unscaled(jnp.asarray(x, jnp.bfloat16), jnp.asarray(factor, jnp.bfloat16))


def operands(kernel, tokens, columns):
    h, dy = (product(tokens, columns, seed) for seed in (1, 9))
    return dict(zip(KERNELS, [(h.scaled(),), (h,), (dy, h)], strict=True))[kernel]


def check(kernel, *arguments, energy_precision=1e-5):
    # In one program XLA may leave out roundings to bfloat16.
    wanted = getattr(reference, kernel)(*arguments)
    found = getattr(hopper, kernel)(*arguments)
    if kernel == "fp8_squared_relu":
        (found, seen), (wanted, seen_by_reference) = found, wanted
        np.testing.assert_allclose(seen.nonzeros, seen_by_reference.nonzeros, rtol=1e-6)  # float32 rounds above 2^24
        np.testing.assert_allclose(seen.energy, seen_by_reference.energy, rtol=energy_precision)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, wanted)
    assert np.isnan(np.float32(wanted[0].values)).any(axis=1).sum() >= 2
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.float32, (found, wanted)))


def check_in_the_interpreter(kernel, tokens, columns, most, together):
    kernels._BLOCKS = ((most, together),)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(inline_mgpu="ignore", detect_races=True)):
        check(kernel, *operands(kernel, tokens, columns), energy_precision=1e-2)


@pytest.mark.skipif(not TRANSPOSES, reason="Mosaic loads no transposed tile yet")
@pytest.mark.parametrize(
    "kernel, columns, most, together", list(zip(KERNELS, (1024, 512, 1024), (1024, 256, 512), (1, 1, 2), strict=True))
)
def test_kernel_in_the_interpreter(kernel, columns, most, together):
    """Runs the kernel in one block, which uses its ring twice, or in two, with a barrier for a tile or for two."""
    # In a process of its own: all threads of a cluster wait at once, and XLA has no more of its own than NPROC.
    arguments = (kernel, 64, columns, most, together)
    code = f"from tests.ops.test_fp8_rows import *; check_in_the_interpreter(*{arguments})"
    done = run_python("-c", code, env={**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}, timeout=300)
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, columns", [(128, 256), (512, 2048), (4096, 6144), (4096, 8192), (4096, 18_432)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel, tokens, columns):
    arguments = operands(kernel, tokens, columns)
    for _ in range(3):
        check(kernel, *arguments)


def loss(x, w):
    """An FFN and a linear layer."""
    return jnp.sum(fp8.linear(Dense(precision="fp8").ffn(x, w, w)[0], w))


def used_by_training(x, w):
    """The backends that run the passes."""
    with backends.record() as used:
        jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w)
    return {name: used[name] for name in KERNELS}


@pytest.mark.gpu
def test_training_takes_the_kernels_and_transposes_nothing_that_they_wrote():
    x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((1024, 256), jnp.bfloat16)
    assert used_by_training(x, w) == {name: {"hopper"} for name in KERNELS}
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=fp8.COMPILER_OPTIONS)
    program = gradients.lower(x, w).compile().as_text()
    assert "f8e4m3fn[1024,512]" in program
    assert not re.search(r"f8e4m3fn\[(1024,512|512,1024)\]\S* (transpose|copy)\(", program)


def test_elsewhere_training_takes_the_reference():
    x, w = jnp.ones((33, 20)), jnp.ones((24, 20))
    assert used_by_training(x, w) == {name: {"reference"} for name in KERNELS}


def test_scales_of_all_magnitudes():
    """The kernel's scales are the reference's, but where the quotient by 448 is no normal number: values are zeros."""
    smallest = np.array(1e-35, jnp.bfloat16).view(np.uint16)
    largest = np.append(0, np.arange(smallest, 0x7FC1)).astype(np.uint16).view(jnp.bfloat16)
    scale, reciprocal = kernels._scale(jnp.asarray(largest, jnp.float32))
    np.testing.assert_array_equal(scale, fp8.by_rows(largest[:, None]).scale[:, 0])
    np.testing.assert_array_equal(reciprocal, 1 / scale)
