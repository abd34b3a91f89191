"""Gradients of causal attention by the kernels for Hopper: in JAX's interpreter of such kernels, and on GPUs."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels.attention_gradients import attention_gradients, hopper_attention

PLAIN = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
# Sequences, positions, heads of queries and of keys, head width.
SHAPES = [(1, 256, 2, 1, 64), (2, 384, 2, 2, 128)]


def inputs(b, s, n, k, h, dtype=jnp.bfloat16):
    """Queries, keys, values and the gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (b, s, i, h), dtype) for key, i in zip(keys, (n, k, k, n), strict=True))


def exact(q, k, v, cotangent):
    """Output, logarithms of the sums along keys, and gradients: in float64, position by position."""
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    (b, s, n, h), group = q.shape, q.shape[2] // k.shape[2]
    out, sums, (dq, dk, dv) = np.zeros_like(q), np.zeros((b, n, s)), (np.zeros_like(x) for x in (q, k, v))
    for i, head, t in np.ndindex(b, n, s):
        own, seen = (i, t, head), (i, slice(t + 1), head // group)
        scores = np.exp(k[seen] @ q[own] / h**0.5)
        sums[i, head, t] = np.log(scores.sum())
        p = scores / scores.sum()
        out[own] = p @ v[seen]
        dp = v[seen] @ cotangent[own]
        ds = p * (dp - p @ dp) / h**0.5
        dq[own] = ds @ k[seen]
        dk[seen] += np.outer(ds, q[own])
        dv[seen] += np.outer(p, cotangent[own])
    return out, sums, (dq, dk, dv)


def errors(values, wanted):
    return [
        np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in zip(values, wanted, strict=True)
    ]


@pytest.fixture
def interpreted(monkeypatch):
    """Has kernels interpreted on the CPU, by threads and with races looked for."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("JAX before 0.11 cannot interpret these kernels")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call

    def wgmma(*, a_allocation_key_as_array, original=gpu_callbacks.wgmma, **options):
        """The interpreter's, which knows the first operand in shared memory alone, for one in registers."""
        a = np.asarray(a_allocation_key_as_array)
        if np.issubdtype(a.dtype, np.integer):
            return original(a_allocation_key_as_array=a_allocation_key_as_array, **options)
        memory, thread = gpu_callbacks._get_shared_memory(), options["thread"]
        info = gpu_callbacks.memory.GPULoggingInfo(options["mesh_location"], thread, None)

        def place(name):
            key = gpu_callbacks.HostAllocationKey.from_array(options[f"{name}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(options[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        (b, *_), (sums, *_) = (
            memory.get_buffer_content(*place(name), thread, logging_info=info) for name in ("b", "acc")
        )
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        memory.store_buffer_content(*place("acc"), sums + product, thread, logging_info=info)
        return options["token"]

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    params = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=params))
    yield
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_in_the_interpreter(interpreted, shape):
    q, k, v, cotangent = inputs(*shape)
    out, sums, wanted = exact(q, k, v, cotangent)
    saved = jnp.asarray(out, jnp.bfloat16), jnp.asarray(sums, jnp.float32)
    found = attention_gradients(q, k, v, *saved, cotangent)
    plain = jax.vjp(PLAIN, q, k, v)[1](cotangent)
    for ours, of_plain in zip(errors(found, wanted), errors(plain, wanted), strict=True):
        assert ours <= 1.5 * of_plain


@pytest.mark.parametrize("shape", [(1, 256, 4, 2, 64), (2, 512, 4, 4, 128)])
def test_kernels_lower_for_cuda(shape):
    """Lowering checks shared memory, registers' layouts and tiles."""
    q, k, v, cotangent = jax.eval_shape(lambda: inputs(*shape))
    sums = jax.ShapeDtypeStruct((shape[0], shape[2], shape[1]), jnp.float32)
    traced = jax.jit(attention_gradients).trace(q, k, v, cotangent, sums, cotangent)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    "shape, reason",
    [((1, 192, 2, 2, 64), "S = 192 must be a multiple of 128"), ((1, 128, 2, 2, 32), "H = 32 one of 64 and 128")],
)
def test_sizes_that_kernels_cannot_take_are_refused(shape, reason):
    q, k, v, cotangent = inputs(*shape)
    with pytest.raises(NotImplementedError, match=reason):
        attention_gradients(q, k, v, cotangent, jnp.zeros((shape[0], shape[2], shape[1])), cotangent)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 384, 8, 2, 64), (2, 384, 4, 4, 128), (3, 1152, 10, 2, 128)])
def test_kernels_on_a_gpu(shape):
    """At most 1.5 times the errors of XLA in bfloat16, and the same bits from every call."""
    q, k, v, cotangent = inputs(*shape)

    def compute(attention, *operands):
        out, vjp = jax.vjp(jax.jit(attention), *operands[:3])
        return [np.asarray(x, np.float64) for x in (out, *vjp(operands[3]))]

    with jax.default_matmul_precision("highest"):
        wanted = compute(PLAIN, *(x.astype(jnp.float32) for x in (q, k, v, cotangent)))
    found = compute(hopper_attention, q, k, v, cotangent)
    for ours, of_plain in zip(errors(found, wanted), errors(compute(PLAIN, q, k, v, cotangent), wanted), strict=True):
        assert ours <= 1.5 * of_plain
    for _ in range(3):
        for first, again in zip(found, compute(hopper_attention, q, k, v, cotangent), strict=True):
            np.testing.assert_array_equal(first, again)
