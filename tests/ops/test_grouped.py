"""Dense products of experts, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops.grouped import group_sizes

EXPERTS = 3


def inputs(tokens_of_expert, v, neurons, dim, dtype, seed):
    """Random operands x [T, D], y [T, S], w [E S, D], and the expert of each block."""
    blocks = np.repeat(np.arange(EXPERTS, dtype=np.int32), np.array(tokens_of_expert) // v)
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (len(blocks) * v, dim), (len(blocks) * v, neurons), (EXPERTS * neurons, dim)
    x, y, w = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    return x, y, w, jnp.asarray(blocks)


def expected(x, y, w, block_experts, v):
    """The three products in float64, an expert at a time."""
    x, y, w = (np.asarray(a, np.float64) for a in (x, y, w))
    of_token, slices = np.repeat(block_experts, v), w.reshape(EXPERTS, -1, x.shape[1])
    up, down, gradient = np.zeros_like(y), np.zeros_like(x), np.zeros_like(slices)
    for expert in range(EXPERTS):
        own = of_token == expert
        up[own], down[own] = x[own] @ slices[expert].T, y[own] @ slices[expert]
        gradient[expert] = y[own].T @ x[own]
    return {"grouped_up": up, "grouped_down": down, "grouped_weights": gradient.reshape(w.shape)}


def computed(x, y, w, block_experts, v, padded=False, **options):
    layout = (block_experts, v, EXPERTS)
    return {
        "grouped_up": ops.grouped_up(x, w, *layout, padded=padded, **options),
        "grouped_down": ops.grouped_down(y, w, *layout, padded=padded, **options),
        "grouped_weights": ops.grouped_weights(y, x, *layout, out_dtype=jnp.float32, **options),
    }


def with_padding(x, y, w, block_experts, v, blocks):
    """The operands with blocks of zeros at the end, which belong to no expert."""
    x, y = (jnp.pad(a, ((0, blocks * v), (0, 0))) for a in (x, y))
    return x, y, w, jnp.pad(block_experts, (0, blocks), constant_values=EXPERTS)


@pytest.mark.parametrize(
    "tokens, v, blocks", [((8, 16, 4), 4, 0), ((0, 12, 8), 4, 0), ((20, 0, 0), 4, 5), ((8, 16, 4), 1, 5)]
)
def test_products_of_experts_leave_out_padding(tokens, v, blocks):
    operands = inputs(tokens, v, 6, 5, jnp.float32, seed=0)
    wanted, padded = expected(*operands, v), with_padding(*operands, v, blocks)
    np.testing.assert_array_equal(group_sizes(padded[3], v, EXPERTS), tokens)  # which GPUs read alone
    for name, out in computed(*padded, v, padded=blocks > 0).items():
        np.testing.assert_allclose(out[: len(wanted[name])], wanted[name], atol=1e-5, err_msg=name)
        assert not out[len(wanted[name]) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, blocks",
    [((512, 1024, 256), 0), ((0, 2048, 256), 1), ((512, 0, 768), 40)],
    ids=["uneven", "empty", "padded"],
)
@pytest.mark.parametrize(("neurons", "dim"), [(768, 512), (256, 1280)])
def test_hopper_is_as_exact_as_bfloat16_allows_and_skips_padding(tokens, blocks, neurons, dim):
    operands = inputs(tokens, 256, neurons, dim, jnp.bfloat16, seed=1)
    reference = computed(*operands, 256, implementation="reference")
    kernels = computed(*with_padding(*operands, 256, blocks), 256, padded=blocks > 0, implementation="hopper")
    for name, exact in expected(*operands, 256).items():
        found, allowed = kernels[name][: len(exact)], np.abs(np.asarray(reference[name], np.float64) - exact).max()
        assert np.abs(np.asarray(found, np.float64) - exact).max() <= 1.5 * allowed + 1e-4 * np.abs(exact).max(), name
        assert not kernels[name][len(exact) :].any()
