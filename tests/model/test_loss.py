"""The chunked loss against float64 numpy, without a [T, V] array on the way."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparse_lm.model.loss import chunked_cross_entropy, token_losses
from sparse_lm.ops import fp8
from tests.model import numpy_llama
from tests.model.jaxprs import equations
from tests.ops.numpy_fp8 import rounded
from tests.ops.operands import relative_error

D, V = 24, 101
losses_of_tokens, mean_loss = (jax.jit(f, static_argnums=3) for f in (token_losses, chunked_cross_entropy))
loss_and_gradients = jax.value_and_grad(chunked_cross_entropy, argnums=(0, 1))
thrice_the_loss = jax.value_and_grad(lambda *args: 3 * chunked_cross_entropy(*args), argnums=(0, 1))
mean_loss_and_gradients, thrice = (jax.jit(f, static_argnums=3) for f in (loss_and_gradients, thrice_the_loss))


def inputs(tokens, seed, dtype=jnp.float32, dim=D, vocabulary=V):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, dim)), dtype)
    unembedding = jnp.asarray(rng.normal(size=(vocabulary, dim)), jnp.float32)
    return hidden, unembedding, jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32)


def expected(hidden, unembedding, targets):
    """Losses and the gradients of their mean, float64."""
    hidden, unembedding = np.asarray(hidden, np.float64), np.asarray(unembedding, np.float64)
    logits = hidden @ unembedding.T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    grad_logits = (probabilities - np.eye(len(unembedding))[targets]) / len(targets)
    return numpy_llama.cross_entropy(logits, targets), grad_logits @ unembedding, grad_logits.T @ hidden


@pytest.mark.parametrize(("tokens", "chunk"), [(61, 16), (5, 16), (7, 1)])
def test_matches_float64(tokens, chunk):
    arguments = inputs(tokens, seed=tokens)
    losses, *_ = expected(*arguments)
    np.testing.assert_allclose(losses_of_tokens(*arguments, chunk), losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mean_loss(*arguments, chunk), losses.mean(), rtol=1e-6)
    check_loss_and_gradients(*arguments, chunk)


def check_loss_and_gradients(hidden, unembedding, targets, chunk):
    losses, *wanted = expected(hidden, unembedding, np.asarray(targets))
    for factor, computed in ((1, mean_loss_and_gradients), (3, thrice)):
        loss, grads = computed(hidden, unembedding, targets, chunk)
        np.testing.assert_allclose(loss, factor * losses.mean(), rtol=1e-6)
        for found, of_formula in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(found, factor * of_formula, rtol=1e-4, atol=factor * 1e-7)


def test_a_large_vocabulary_is_padded_and_nothing_is_seen_of_it():
    check_loss_and_gradients(*inputs(20, seed=8, dim=8, vocabulary=8200), 8)


def test_bfloat16_hidden_keeps_float32_sums():
    hidden, unembedding, targets = inputs(2048, seed=2, dtype=jnp.bfloat16)
    unembedding = unembedding.astype(jnp.bfloat16).astype(jnp.float32)
    losses, grad_hidden, grad_unembedding = expected(hidden, unembedding, np.asarray(targets))

    loss, grads = loss_and_gradients(hidden, unembedding, targets, 16)
    assert (loss.dtype, grads[0].dtype, grads[1].dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
    assert relative_error(grads[0], grad_hidden) < 5e-3
    # 128 chunks: summed in bfloat16, this would be several times as large.
    assert relative_error(grads[1], grad_unembedding) < 2e-3


def test_a_third_of_the_loss_has_a_third_of_both_gradients():
    """As one of three microbatches has. A third that is rounded to bfloat16 would be 0.2% too large."""
    arguments = inputs(64, seed=3, dtype=jnp.bfloat16)
    third = jax.grad(lambda *args: chunked_cross_entropy(*args, 16) / 3, argnums=(0, 1))(*arguments)
    _, whole = mean_loss_and_gradients(*arguments, 16)
    for part, all_of_it in zip(third, whole, strict=True):
        part, all_of_it = (np.asarray(g, np.float64) for g in (part, all_of_it))
        assert np.vdot(part, all_of_it) / np.vdot(all_of_it, all_of_it) == pytest.approx(1 / 3, rel=3e-4)


def test_gradients_of_a_sure_model_do_not_cancel():
    """Gradients made of p - 1 in bfloat16 would be wrong by a multiple of themselves where p is nearly 1."""
    hidden, unembedding, _ = inputs(512, seed=7, dtype=jnp.bfloat16)
    unembedding = (4 * unembedding).astype(jnp.bfloat16).astype(jnp.float32)
    targets = jnp.argmax(hidden.astype(jnp.float32) @ unembedding.T, axis=1).astype(jnp.int32)
    losses, *wanted = expected(hidden, unembedding, np.asarray(targets))
    assert np.median(losses) < 0.01
    loss, grads = mean_loss_and_gradients(hidden, unembedding, targets, 64)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
    sure = losses < np.median(losses)
    assert relative_error(np.asarray(grads[0], np.float64)[sure], wanted[0][sure]) < 5e-3
    assert relative_error(grads[1], wanted[1]) < 5e-3


def test_at_most_one_chunk_has_logits():
    tokens, chunk = 64, 8
    arguments = inputs(tokens, seed=4)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: chunked_cross_entropy(*a, chunk), argnums=(0, 1)))(*arguments)
    shapes = [v.aval.shape for equation in equations(jaxpr.jaxpr) for v in equation.outvars]
    assert (chunk, V) in shapes
    assert max(np.prod(shape) for shape in shapes if V in shape) == max(chunk, D) * V


in_fp8 = jax.jit(lambda *args: loss_and_gradients(*args, fp8.PRECISION), static_argnums=3)


def expected_in_fp8(hidden, unembedding, targets):
    """The loss, and both gradients, in float64 of operands that are rounded as FP8's are."""
    hidden, unembedding = np.float64(hidden), np.float64(unembedding)
    matrix = rounded(unembedding - unembedding.mean(0), None)
    logits = rounded(hidden, 1) @ matrix.T
    losses = numpy_llama.cross_entropy(logits, targets)
    of_target = np.arange(len(matrix)) == targets[:, None]
    probabilities = np.exp(logits - logits[of_target][:, None] - losses[:, None])
    others = np.float32(np.where(of_target, 0, 2**15 * probabilities)).astype(ml_dtypes.float8_e5m2)
    others = np.float64(others) / 2**15 / len(targets)
    own = np.where(of_target, np.expm1(-losses)[:, None], 0) / len(targets)
    return losses.mean(), (others + own) @ matrix, others.T @ rounded(hidden, 0) + own.T @ hidden


@pytest.mark.parametrize("vocabulary, scale", [(101, 1), (8200, 0.1)])
def test_fp8_is_the_formula_of_rounded_operands(vocabulary, scale):
    hidden, unembedding, targets = inputs(61, seed=vocabulary, dim=32, vocabulary=vocabulary)
    unembedding *= scale
    loss, *wanted = expected_in_fp8(hidden, unembedding, np.asarray(targets))
    found_loss, found = in_fp8(hidden, unembedding, targets, 16)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    losses, *in_float64 = expected(hidden, unembedding, np.asarray(targets))
    np.testing.assert_allclose(found_loss, losses.mean(), rtol=0.01)
    for gradient, of_formula, exact in zip(found, wanted, in_float64, strict=True):
        assert relative_error(gradient, of_formula) < 2e-3  # some probabilities are on the edge of two numbers
        assert 1e-4 < relative_error(gradient, exact) < 0.1


def test_fp8_sees_probabilities_of_a_millionth():
    """A uniform model gives each class as much of the gradient, which e4m3 would round to nothing."""
    targets = jnp.zeros(16, jnp.int32)
    _, (of_hidden, of_unembedding) = in_fp8(jnp.ones((16, 8)), jnp.zeros((2**20, 8)), targets, 16)
    np.testing.assert_allclose(of_unembedding[1:], 2.0**-20, rtol=1e-3)
    np.testing.assert_array_equal(of_hidden, 0)


@pytest.mark.parametrize("classes", [128, 96, 320])  # e5m2 has 1 / 128, and rounds 1 / 96 and 1 / 320
def test_fp8_pulls_nothing_where_all_classes_have_one_row(classes):
    hidden, unembedding, targets = inputs(16, seed=9, vocabulary=1)
    _, (of_hidden, _) = in_fp8(hidden, jnp.tile(unembedding, (classes, 1)), targets + jnp.arange(16), 16)
    np.testing.assert_allclose(of_hidden, 0, atol=1e-6)


def test_fp8_hides_nothing_that_is_not_finite():
    hidden, unembedding, targets = inputs(32, seed=6)
    for bad in (np.nan, np.inf):
        loss, gradients = in_fp8(hidden.at[3, 2].set(bad), unembedding, targets, 16)
        assert not np.isfinite(loss)
        assert np.isnan(gradients[0][3]).all() and np.isnan(gradients[1]).any()


@pytest.mark.gpu
def test_fp8_on_a_gpu():
    hidden, unembedding, targets = inputs(4096, seed=5, dtype=jnp.bfloat16, dim=256, vocabulary=16_384)
    unembedding = jnp.float32((0.1 * unembedding).astype(jnp.bfloat16))  # numbers that bf16 rounds no more
    loss, *wanted = expected_in_fp8(hidden, unembedding, np.asarray(targets))
    program = in_fp8.lower(hidden, unembedding, targets, 1024).compile(fp8.COMPILER_OPTIONS)
    assert program.as_text().count("__cublas$lt$matmul$f8") >= 3
    found_loss, found = program(hidden, unembedding, targets)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-3)
    for gradient, of_formula in zip(found, wanted, strict=True):
        assert relative_error(gradient, of_formula) < 0.01
