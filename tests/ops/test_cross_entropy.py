"""Cross entropy with the product that makes its logits, against float64."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import hopper, reference
from sparse_lm.ops.hopper.products import cross_entropy as kernels

COLUMNS = 256  # of a tile of the kernel's
# Size of the weights, and whether targets are the most likely: models that know nothing, are sure, and are wrong.
REGIMES = [(0.05, False), (0.3, False), (0.3, True), (3.0, False)]


def operands(tokens, dim, vocabulary, size, right=False, dtype=jnp.bfloat16):
    """Random x, w, targets and weights; a tenth of the weights are zero, as those of padding are."""
    rng = np.random.default_rng(vocabulary)
    x = jnp.asarray(rng.normal(size=(tokens, dim)), dtype)
    w = jnp.asarray(rng.normal(size=(vocabulary, dim)) * size, dtype)
    targets = logits(x, w).argmax(-1) if right else rng.integers(0, vocabulary, tokens)
    weights = np.where(rng.random(tokens) < 0.1, 0, rng.random(tokens) / tokens)
    return x, w, jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32)


def logits(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def expected(x, w, targets, weights):
    """Losses and gradients in float64."""
    exact = logits(x, w)
    maximum = exact.max(-1, keepdims=True)
    log_normaliser = maximum + np.log(np.exp(exact - maximum).sum(-1, keepdims=True))
    gradients = np.exp(exact - log_normaliser) - np.eye(len(w))[targets]
    losses = log_normaliser[:, 0] - exact[np.arange(len(x)), targets]
    return losses, gradients * np.asarray(weights, np.float64)[:, None]


def relative_error(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("size, right", REGIMES)
def test_reference(size, right):
    arguments = operands(60, 48, 101, size, right, jnp.float32)
    losses, gradients = expected(*arguments)
    found, of_logits = jax.jit(ops.cross_entropy)(*arguments)
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_logits, gradients, rtol=1e-4, atol=1e-7)


def check_rule_for_bfloat16(arguments, implementation):
    """Errors of gradients by logits, x and w are at most 1.5 times the reference's, and losses are exact to float32."""
    x, w, *_ = arguments
    losses, gradients = expected(*arguments)
    found, of_logits = jax.jit(implementation)(*arguments)
    wanted_type = jax.eval_shape(reference.cross_entropy, *arguments)
    assert jax.eval_shape(implementation, *arguments) == wanted_type
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=2e-5)
    _, of_reference = jax.jit(reference.cross_entropy)(*arguments)
    for product in (lambda g: g, lambda g: g @ np.asarray(w, np.float64), lambda g: g.T @ np.asarray(x, np.float64)):
        error, allowed = (
            relative_error(product(np.asarray(g, np.float64)), product(gradients)) for g in (of_logits, of_reference)
        )
        assert error <= 1.5 * allowed


def exponentials_by_tile(x, w, config=None):
    """Computes what the kernel does, in XLA."""
    products = (x.astype(jnp.float32) @ w.astype(jnp.float32).T).reshape(len(x), -1, COLUMNS)
    maxima = products.max(-1)
    values = jnp.exp(products - maxima[..., None])
    return values.astype(x.dtype).reshape(len(x), -1), maxima.T, values.sum(-1).T


@pytest.mark.parametrize("size, right", REGIMES)
def test_exponentials_by_tile_are_as_exact_as_bfloat16_allows(monkeypatch, size, right):
    monkeypatch.setattr(kernels, "exponentials", exponentials_by_tile)
    check_rule_for_bfloat16(operands(384, 256, 1024, size, right), hopper.cross_entropy)


def test_losses_of_a_sure_model_stand_a_product_that_truncates(monkeypatch):
    """Losses of nearly 0 would be wrong if the target's logit were not of the same sums as the normaliser."""

    def truncated(x, w):
        values, maxima, sums = exponentials_by_tile(x, w)
        return values, maxima * (1 - x.shape[1] * 2.0**-28), sums

    monkeypatch.setattr(kernels, "exponentials", truncated)
    arguments = operands(384, 256, 1024, 3.0, right=True)
    losses, gradients = expected(*arguments)
    assert np.median(losses) < 1e-3
    found, of_logits = jax.jit(hopper.cross_entropy)(*arguments)
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=2e-5)
    assert relative_error(of_logits, gradients) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("size, right", REGIMES)
@pytest.mark.parametrize("tokens, dim, vocabulary", [(128, 256, 256), (384, 768, 2560), (2048, 512, 12_288)])
def test_hopper_is_as_exact_as_bfloat16_allows(tokens, dim, vocabulary, size, right):
    def implementation(*arguments):
        return ops.cross_entropy(*arguments, implementation="hopper")

    check_rule_for_bfloat16(operands(tokens, dim, vocabulary, size, right), implementation)


def check_not_finite(implementation, value):
    """One bad number in one token makes the loss of that token bad, and no other's."""
    x, *rest = operands(128, 256, 512, 0.3)
    losses, _ = jax.jit(implementation)(x.at[70, 5].set(value), *rest)
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(128) != 70)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_a_bad_loss(monkeypatch, value):
    check_not_finite(reference.cross_entropy, value)
    monkeypatch.setattr(kernels, "exponentials", exponentials_by_tile)
    check_not_finite(hopper.cross_entropy, value)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_a_bad_loss_on_hopper(value):
    check_not_finite(hopper.cross_entropy, value)


def check_exponentials(found, wanted):
    values, maxima, sums = (np.asarray(array, np.float32) for array in found)
    np.testing.assert_allclose(maxima, wanted[1], atol=1e-4)
    np.testing.assert_allclose(sums, wanted[2], rtol=1e-4)
    np.testing.assert_allclose(values, np.asarray(wanted[0], np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic knows no transposed tile yet")
@pytest.mark.parametrize("cluster", [1, 2])
def test_kernel_in_the_interpreter(monkeypatch, cluster):
    monkeypatch.setattr(kernels, "core_count", lambda: 4)
    x, w, *_ = operands(256 * cluster, 128, 512, 0.3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = kernels.exponentials(x, w, kernels.Config(stages=2, cluster=cluster))
    check_exponentials(found, exponentials_by_tile(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [kernels.Config(), kernels.Config(cluster=1), kernels.Config(raster_width=16)])
def test_kernel(config):
    x, w, *_ = operands(2048, 512, 12_288, 0.1)
    for _ in range(2):
        check_exponentials(kernels.exponentials(x, w, config), exponentials_by_tile(x, w))


@pytest.mark.parametrize(
    "tokens, dim, vocabulary, dtype, message",
    [
        (192, 256, 512, jnp.bfloat16, "T = 192 must be a multiple of 128"),
        (128, 256, 384, jnp.bfloat16, "V = 384 must be a multiple of 256"),
        (128, 320, 512, jnp.bfloat16, "D = 320 must be a multiple of 256"),
        (128, 256, 512, jnp.float32, "takes bfloat16, not float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(tokens, dim, vocabulary, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        hopper.cross_entropy(*operands(tokens, dim, vocabulary, 1, dtype=dtype))


@pytest.mark.usefixtures("unchecked")
def test_operands_that_do_not_fit_are_refused():
    x, w, targets, weights = operands(16, 8, 32, 1, dtype=jnp.float32)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        ops.cross_entropy(x, w[:, 1:], targets, weights)
    with pytest.raises(ValueError, match="one dtype, not float32 and bfloat16"):
        ops.cross_entropy(x, w.astype(jnp.bfloat16), targets, weights)
    with pytest.raises(ValueError, match=r"targets must be int32\[16\], one for each row of x; got float32\[16\]"):
        ops.cross_entropy(x, w, weights, weights)
    with pytest.raises(ValueError, match=r"weights must be float32\[16\], one for each row of x; got float32\[15\]"):
        ops.cross_entropy(x, w, targets, weights[1:])
