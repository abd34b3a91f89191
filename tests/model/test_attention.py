"""Rotary positions, the cache, and flash attention; test_llama.py has attention against float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model.attention import attention_implementation, causal_attention, document_mask, rotate
from tests.ops.operands import assert_errors_are_as_small
from tests.recipes.examples import random


def test_rotation_multiplies_complex_numbers():
    x, positions, theta = random(0, 2, 5, 3, 8), np.array([0, 1, 7, 100, 4095]), 500_000.0
    pairs = np.asarray(x, np.float64)[..., :4] + 1j * np.asarray(x, np.float64)[..., 4:]
    turned = pairs * np.exp(1j * np.outer(positions, theta ** (-np.arange(4) / 4)))[:, None]
    rotated = rotate(x, jnp.asarray(positions), theta)
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], -1), atol=2e-3)  # 4095 in float32
    np.testing.assert_allclose(rotated[:, :3], np.concatenate([turned.real, turned.imag], -1)[:, :3], atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_width", "implementation"),
    [
        ("9.0", "bfloat16", 256, "cudnn"),
        ("9.0", "float16", 128, "cudnn"),
        ("9.0", "float32", 128, "xla"),
        ("9.0", "bfloat16", 36, "xla"),  # widths that cuDNN refuses
        ("9.0", "bfloat16", 264, "xla"),
        ("8.6", "bfloat16", 128, "cudnn"),
        ("8.6", "bfloat16", 136, "xla"),
        ("7.5", "bfloat16", 64, "xla"),  # GPUs that it has no flash attention for
        (None, "bfloat16", 64, "xla"),
        ("gfx942", "bfloat16", 64, "xla"),
    ],
)
def test_flash_attention_is_for_what_cudnn_takes(monkeypatch, capability, dtype, head_width, implementation):
    kind = "cpu" if capability is None else "AMD Instinct MI300X" if capability.startswith("gfx") else "NVIDIA H100"
    device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert attention_implementation(jnp.dtype(dtype), head_width) == implementation


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_flash_attention_is_as_accurate_as_the_plain_one(kv_heads, documents):
    """cuDNN in bf16 against float32, values and gradients: at most 1.5 times the error of XLA in bf16."""
    tokens = jnp.asarray(np.random.default_rng(9).integers(100, size=(2, 384)))
    mask = document_mask(tokens, 0) if documents else None
    q, k, v, cotangent = (random(i, 2, 384, heads, 64) for i, heads in enumerate((8, kv_heads, kv_heads, 8)))

    def compute(attention, dtype):
        out, vjp = jax.vjp(jax.jit(attention), *(x.astype(dtype) for x in (q, k, v)))
        return out, *vjp(cotangent.astype(dtype))

    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, mask=mask, implementation="xla")
    flash = functools.partial(causal_attention, mask=mask)
    with jax.default_matmul_precision("highest"):
        exact = compute(plain, jnp.float32)
    assert_errors_are_as_small(compute(flash, jnp.bfloat16), compute(plain, jnp.bfloat16), exact)
