"""The rest of the step's benchmark at sizes for CPUs: rival losses against float64, and a kernel against JAX."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import exponentials as kernels
from sparse_lm.model.loss import chunked_cross_entropy

T, D, V, CHUNK = 512, 256, 1024, 128


@pytest.fixture
def bench(script, monkeypatch):
    module = script("experiments.bench.rest_of_step")
    monkeypatch.setattr(module, "exponentials", reference)
    return module


def reference(hidden, table):
    """Computes what the kernel does, with a product in float32."""
    logits = (hidden.astype(jnp.float32) @ table.astype(jnp.float32).T).reshape(len(hidden), -1, kernels.COLUMNS)
    maxima = logits.max(-1)
    values = jnp.exp(logits - maxima[..., None])
    return values.astype(hidden.dtype).reshape(len(hidden), -1), maxima.T, values.sum(-1).T


def random_hidden_and_table(tokens, dim, vocabulary, size):
    rng = np.random.default_rng(vocabulary)
    hidden = jnp.asarray(rng.normal(size=(tokens, dim)), jnp.bfloat16)
    return hidden, jnp.asarray(rng.normal(size=(vocabulary, dim)) * size, jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("rival", ["one_pass", "from_exponentials"])
@pytest.mark.parametrize("size, right", [(0.05, False), (0.3, False), (0.3, True), (3.0, False)])
def test_rival_loss_keeps_to_the_rule_for_bfloat16(bench, rival, size, right):
    """Errors are at most 1.5 times the model's, for models that know nothing, that are sure, and that are wrong."""
    hidden, table = random_hidden_and_table(T, D, V, size)
    logits = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    targets = logits.argmax(-1) if right else np.random.default_rng(1).integers(0, V, T)
    maximum = logits.max(-1, keepdims=True)
    log_normaliser = maximum + np.log(np.exp(logits - maximum).sum(-1, keepdims=True))
    loss = np.mean(log_normaliser[:, 0] - logits[np.arange(T), targets])
    grad_logits = (np.exp(logits - log_normaliser) - np.eye(V)[targets]) / T
    wanted = grad_logits @ np.asarray(table, np.float64), grad_logits.T @ np.asarray(hidden, np.float64)

    arguments = hidden, table, jnp.asarray(targets), CHUNK
    _, model = jax.value_and_grad(chunked_cross_entropy, argnums=(0, 1))(*arguments)
    found, gradients = bench.cross_entropy(*arguments, getattr(bench, rival))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for exact, of_model, of_rival in zip(wanted, model, gradients, strict=True):
        assert of_rival.dtype == of_model.dtype
        assert relative_error(of_rival, exact) <= 1.5 * relative_error(of_model, exact)


def relative_error(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX's interpreter of Mosaic knows no transposed tile yet")
@pytest.mark.parametrize("cluster", [1, 2])
def test_kernel_in_the_interpreter(monkeypatch, cluster):
    monkeypatch.setattr(kernels, "core_count", lambda: 4)
    hidden, table = random_hidden_and_table(256 * cluster, 128, 512, 0.3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = kernels.exponentials(hidden, table.astype(hidden.dtype), kernels.Config(stages=2, cluster=cluster))
    check(found, reference(hidden, table))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [kernels.Config(), kernels.Config(cluster=1), kernels.Config(raster_width=16)], ids=str
)
def test_kernel_on_a_gpu(config):
    hidden, table = random_hidden_and_table(2048, 512, 12_288, 0.1)
    for _ in range(2):
        found = kernels.exponentials(hidden, table.astype(hidden.dtype), config)
        check(found, reference(hidden, table))


def check(found, wanted):
    values, maxima, sums = (np.asarray(array, np.float32) for array in found)
    np.testing.assert_allclose(maxima, wanted[1], atol=1e-4)
    np.testing.assert_allclose(sums, wanted[2], rtol=1e-4)
    np.testing.assert_allclose(values, np.asarray(wanted[0], np.float32), rtol=2**-7, atol=1e-6)


def test_kernel_lowers_for_hopper():
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2048), (128_256, 2048)))
    lowered = jax.jit(kernels.exponentials).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_parts_of_tiles_are_refused():
    hidden, table = random_hidden_and_table(256, 128, 384, 1)
    with pytest.raises(ValueError, match="whole tiles"):
        kernels.exponentials(hidden, table)
