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


@pytest.mark.parametrize("implementation", ["reference", "kernel's arithmetic"])
def test_padding_is_no_class(monkeypatch, implementation):
    monkeypatch.setattr(kernels, "odds", odds_by_tile)
    compute = {"reference": reference.cross_entropy}.get(implementation, hopper.cross_entropy)
    x, w, targets = operands(128, 256, 512, 0.3)
    targets %= 300
    losses, odds = jax.jit(compute, static_argnums=3)(x, w, targets, 300)
    wanted, wanted_odds = expected(x, w[:300], targets)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    check_odds(odds[:, :300], x, w[:300], targets, wanted_odds)
    assert not odds[:, 300:].any()


def by_hopper(x, w, targets):
    return hopper.cross_entropy(x, w, targets, len(w))


def check_bfloat16(arguments, implementation):
    """Losses are exact to float32, small ones too, and odds are rounded once."""
    losses, odds = expected(*arguments)
    found, found_odds = jax.jit(implementation)(*arguments)
    assert jax.eval_shape(implementation, *arguments) == jax.eval_shape(ops.cross_entropy, *arguments)
    lost = check_odds(found_odds, *arguments, odds)
    assert (np.abs(found - losses) <= 2e-5 * losses + lost * np.minimum(losses, 1)).all()


def odds_by_tile(x, w, targets, of_targets, classes, config=None):
    """Computes what the kernel does, in XLA."""
    products = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    odds = jnp.exp(jnp.minimum(products - of_targets[:, None], 60))
    columns = jnp.arange(len(w))
    odds = jnp.where((targets[:, None] == columns) | (columns >= classes), 0, odds)
    return odds.astype(x.dtype), odds.reshape(len(x), -1, COLUMNS).sum(-1).T


@pytest.mark.parametrize("size, right", REGIMES)
def test_odds_by_tile(monkeypatch, size, right):
    monkeypatch.setattr(kernels, "odds", odds_by_tile)
    arguments = operands(384, 256, 1024, size, right)
    check_bfloat16(arguments, by_hopper)
    assert not right or np.quantile(expected(*arguments)[0], 0.2) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("size, right", REGIMES)
@pytest.mark.parametrize("tokens, dim, vocabulary", [(128, 256, 256), (384, 768, 2560), (2048, 512, 12_288)])
def test_hopper_is_as_exact_as_bfloat16_allows(tokens, dim, vocabulary, size, right):
    def implementation(*arguments):
        return ops.cross_entropy(*arguments, implementation="hopper")

    check_bfloat16(operands(tokens, dim, vocabulary, size, right), implementation)


def check_not_finite(implementation, value):
    """One bad number in one token makes the loss of that token bad, and no other's."""
    x, *rest = operands(128, 256, 512, 0.3)
    losses, _ = jax.jit(implementation)(x.at[70, 5].set(value), *rest)
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(128) != 70)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_a_bad_loss(monkeypatch, value):
    check_not_finite(ops.cross_entropy, value)
    monkeypatch.setattr(kernels, "odds", odds_by_tile)
    check_not_finite(by_hopper, value)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_a_bad_loss_on_hopper(value):
    check_not_finite(by_hopper, value)


def kernel_operands(tokens, dim, vocabulary, size):
    x, w, targets = operands(tokens, dim, vocabulary, size)
    targets = targets % (vocabulary - 300)
    rows = w[targets].astype(jnp.float32)
    return x, w, targets, jnp.sum(x.astype(jnp.float32) * rows, axis=1)


def check_kernel(arguments, config):
    """The last columns are padding, as far as no token has them for a target."""
    *_, odds = expected(*arguments[:3])
    classes = int(max(arguments[2])) + 1
    odds[:, classes:] = 0
    values, sums = kernels.odds(*arguments, classes, config)
    lost = check_odds(values, *arguments[:3], odds)
    by_tile = odds.reshape(len(odds), -1, COLUMNS).sum(-1)
    assert (np.abs(np.asarray(sums).T - by_tile) <= (lost + 1e-5)[:, None] * by_tile + 1e-30).all()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic knows no transposed tile yet")
@pytest.mark.parametrize("cluster, size", [(1, 0.3), (2, 3.0)])
def test_kernel_in_the_interpreter(monkeypatch, cluster, size):
    """The larger weights make some odds that are cut off at the largest."""
    monkeypatch.setattr(kernels, "core_count", lambda: 4)
    arguments = kernel_operands(256 * cluster, 128, 512, size)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        check_kernel(arguments, kernels.Config(stages=2, cluster=cluster))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0.1, 5.0])
@pytest.mark.parametrize("config", [kernels.Config(), kernels.Config(cluster=1), kernels.Config(raster_width=16)])
def test_kernel(config, size):
    arguments = kernel_operands(2048, 512, 12_288, size)
    for _ in range(2):
        check_kernel(arguments, config)


@pytest.mark.usefixtures("unchecked")
def test_operands_that_do_not_fit_are_refused():
    x, w, targets = operands(16, 8, 32, 1, dtype=jnp.float32)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        ops.cross_entropy(x, w[:, 1:], targets)
    with pytest.raises(ValueError, match="one dtype, not float32 and bfloat16"):
        ops.cross_entropy(x, w.astype(jnp.bfloat16), targets)
    with pytest.raises(ValueError, match="bfloat16 or float32, whose range odds need, not float16"):
        ops.cross_entropy(x.astype(jnp.float16), w.astype(jnp.float16), targets)
    with pytest.raises(ValueError, match=r"targets must be int32\[16\], one for each row of x; got float32\[16\]"):
        ops.cross_entropy(x, w, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"targets must be int32\[16\], one for each row of x; got int32\[15\]"):
        ops.cross_entropy(x, w, targets[1:])
    for classes in (0, 33):
        with pytest.raises(ValueError, match=rf"classes must be in 1..32, the rows of w, not {classes}"):
            ops.cross_entropy(x, w, targets, classes)
