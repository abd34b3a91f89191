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
REGIMES = [(0.05, False), (0.3, False), (1.0, True), (1.0, False)]


def operands(tokens, dim, vocabulary, size, right=False, dtype=jnp.bfloat16):
    """Random x, w and targets."""
    rng = np.random.default_rng(vocabulary)
    x = jnp.asarray(rng.normal(size=(tokens, dim)), dtype)
    w = jnp.asarray(rng.normal(size=(vocabulary, dim)) * size * 16 / np.sqrt(dim), dtype)
    targets = logits(x, w).argmax(-1) if right else rng.integers(0, vocabulary, tokens)
    return x, w, jnp.asarray(targets, jnp.int32)


def logits(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def expected(x, w, targets):
    """Losses and odds in float64."""
    exact = logits(x, w)
    tokens = np.arange(len(x))
    odds = np.exp(np.minimum(exact - exact[tokens, targets][:, None], 60))
    odds[tokens, targets] = 0
    return np.log1p(odds.sum(-1)), odds


def check_odds(found, x, w, targets, wanted, rounding=2**-8):
    """All odds of a token may have one factor, which comes of the sums of D / 16 products of tensor cores."""
    lost = x.shape[1] / 16 * np.finfo(np.float32).eps * np.abs(logits(x, w)).max(-1, keepdims=True)
    found = np.asarray(found, np.float64)
    np.testing.assert_array_equal(found[np.arange(len(x)), targets], 0)
    assert (np.abs(found - wanted) <= (rounding + 4 * lost + 1e-5) * wanted + 1e-30).all()
    return 4 * lost[:, 0]


@pytest.mark.parametrize("size, right", REGIMES)
def test_reference(size, right):
    arguments = operands(60, 48, 101, size, right, jnp.float32)
    losses, odds = expected(*arguments)
    found, found_odds = jax.jit(ops.cross_entropy)(*arguments)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    np.testing.assert_allclose(found_odds, odds, rtol=1e-4, atol=1e-30)


def odds_by_tile(x, w, targets, of_targets, classes):
    """Computes what the kernel does, in XLA."""
    products = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    odds = jnp.exp(jnp.minimum(products - of_targets[:, None], 60))
    columns = jnp.arange(len(w))
    odds = jnp.where((targets[:, None] == columns) | (columns >= classes), 0, odds)
    return odds.astype(x.dtype), odds.reshape(len(x), -1, COLUMNS).sum(-1).T


def by_hopper(monkeypatch, odds):
    monkeypatch.setattr(kernels, "odds", odds)
    return jax.jit(lambda *args: hopper.cross_entropy(*args), static_argnums=3)


@pytest.fixture(params=["reference", "around the kernel", pytest.param("hopper", marks=pytest.mark.gpu)])
def compiled(request, monkeypatch):
    """A compiled function of x, w, targets and the number of classes."""
    if request.param == "reference":
        return jax.jit(reference.cross_entropy, static_argnums=3)
    return by_hopper(monkeypatch, odds_by_tile if request.param == "around the kernel" else kernels.odds)


def check_padding(compiled, *shape):
    """The last 212 rows of w are no classes."""
    x, w, targets = operands(*shape)
    classes = len(w) - 212
    targets %= classes
    losses, odds = compiled(x, w, targets, classes)
    wanted, wanted_odds = expected(x, w[:classes], targets)
    lost = check_odds(odds[:, :classes], x, w[:classes], targets, wanted_odds)
    assert (np.abs(losses - wanted) <= 1e-4 * wanted + lost).all()
    assert not odds[:, classes:].any()


def test_padding_is_no_class(compiled):
    check_padding(compiled, 256, 256, 512, 0.3)


GPU_SHAPES = [pytest.param(shape, marks=pytest.mark.gpu) for shape in ((128, 256, 256), (2048, 512, 12_288))]


@pytest.mark.parametrize("shape", [(384, 768, 2560), *GPU_SHAPES])
@pytest.mark.parametrize("size, right", REGIMES)
def test_losses_are_exact_to_float32_and_odds_are_rounded_once(compiled, shape, size, right):
    arguments = operands(*shape, size, right)
    losses, odds = expected(*arguments)
    assert not right or np.quantile(losses, 0.2) < 0.01
    found, found_odds = compiled(*arguments, shape[2])
    assert (found.dtype, found_odds.dtype, found_odds.shape) == (jnp.float32, jnp.bfloat16, odds.shape)
    lost = check_odds(found_odds, *arguments, odds)
    assert (np.abs(found - losses) <= 2e-5 * losses + lost * np.minimum(losses, 1)).all()


def test_the_loss_of_a_target_that_is_no_class_is_nan():
    x, w = jnp.ones((6, 4)), jnp.ones((5, 4))
    losses, _ = ops.cross_entropy(x, w, jnp.array([-100, -1, 0, 2, 3, 5], jnp.int32), 3)
    np.testing.assert_allclose(losses, [np.nan, np.nan, np.log(3), np.log(3), np.nan, np.nan], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_the_loss_of_its_token_bad(compiled, value):
    x, *rest = operands(128, 256, 512, 0.3)
    losses, _ = compiled(x.at[70, 5].set(value), *rest, 512)
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(128) != 70)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic knows no transposed tile yet")
@pytest.mark.parametrize("tokens, size", [(384, 0.3), (512, 3.0)])
def test_kernel_in_the_interpreter(monkeypatch, tokens, size):
    """Two tiles make a cluster where their number is even. The larger weights make odds that are cut off."""
    monkeypatch.setattr(kernels, "core_count", lambda: 4)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        check_padding(by_hopper(monkeypatch, kernels.odds), tokens, 256, 512, size)
