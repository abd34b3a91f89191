"""Every Hopper kernel once or twice at small ragged shapes: a program for compute-sanitizer.

    compute-sanitizer --tool=memcheck --kernel-name=kns=mosaic_gpu python -m tests.ops.hopper.sanitize

or racecheck, synccheck, initcheck. XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async lets memcheck see where an array ends: with
JAX's others it misses stores just past the end. Whether results are right is for the tests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags

from sparse_lm.ops import fp8, hopper
from sparse_lm.ops.hopper.frame.tiling import Tiling
from sparse_lm.recipes import routing
from tests.ops.operands import random, random_24, random_contiguous, random_venom

ONLY = flags.DEFINE_string("only", ".", "Regular expression found in the names of the calls to make.")

TYPE = jnp.bfloat16
TOKENS, NEURONS, DIM, KEPT = 1000, 1024, 392, 256

Call = tuple[Callable, tuple]  # a kernel and its operands


def named(kernel: Callable, *names: str, **options) -> Callable:
    """A kernel with options, whose last operands go by names."""

    def of_operands(*args):
        first = len(args) - len(names)
        return kernel(*args[:first], **dict(zip(names, args[first:], strict=True)), **options)

    return of_operands


def call(kernel: Callable, *operands, names: tuple[str, ...] = (), **options) -> Call:
    return named(kernel, *names, **options), operands


def x(*shape: int, seed: int = 0) -> jax.Array:
    return random(shape, TYPE, seed)


def matmul_24(m: int, k: int, n: int, **options) -> Call:
    return call(hopper.matmul_24, random_24(m, k, TYPE, seed=0), x(k, n, seed=1), **options)


def matmul_venom(v: int, *, contiguous: int = 1) -> Call:
    a = random_venom(TOKENS, NEURONS, v, 16, TYPE, 0, contiguous)
    return call(hopper.matmul_venom, a, x(NEURONS, DIM, seed=2))


def matmul_venom_to_rows() -> Call:
    """As `matmul_venom`, stored in the order of the tokens, of which some slots have none."""
    experts = jax.random.randint(jax.random.key(3), (TOKENS - 300,), 0, 4)
    rows, _ = routing.dispatch_order(experts, 4, 64, None)
    a = random_venom(rows.slots.shape[0], NEURONS, 64, 16, TYPE, 0, 64)
    return call(hopper.matmul_venom, a, x(NEURONS, DIM, seed=2), rows, names=("rows",))


def listed(kernel: Callable, v: int, contiguous: int, *shape: int, **options) -> Call:
    """A product with a 2:4 matrix of this shape, whose rows, or those of the result, blocks of v tokens list."""
    neuron_ids = random_contiguous(-(-TOKENS // v), KEPT, contiguous, NEURONS, seed=2)
    operands = random_24(*shape, TYPE, seed=0), x(TOKENS, DIM, seed=1), neuron_ids
    return call(kernel, *operands, v=v, contiguous=contiguous, **options)


def grouped(product: str, **options) -> Call:
    """A dense product of three experts, of which the second has no tokens."""
    of_x, y, w = x(1024, 512), x(1024, 768, seed=1), x(3 * 768, 512, seed=2)
    operands = dict(grouped_up=(of_x, w), grouped_down=(y, w), grouped_weights=(y, of_x))[product]
    return call(getattr(hopper, product), *operands, jnp.array([0, 0, 2, 2], jnp.int32), v=256, experts=3, **options)


def cross_entropy(tokens: int) -> Call:
    operands = x(tokens, 256), x(768, 256, seed=1), jnp.arange(tokens, dtype=jnp.int32)
    return call(hopper.cross_entropy, *operands, classes=767)


def fp8_pass(kernel: Callable, inputs: int) -> Call:
    return call(kernel, *(fp8.Unscaled(x(96, 1152, seed=seed), jnp.ones((96, 1), TYPE)) for seed in range(inputs)))


def add_norm_gradients(tokens: int) -> Call:
    def of_both(x, update, scale):
        return jax.vjp(functools.partial(hopper.add_norm, epsilon=1e-5), x, update, scale)[1]((update, x))

    return of_both, (x(tokens, 768), x(tokens, 768, seed=1), jnp.ones(768))


def sparsify_24(method: str, axis: int) -> Call:
    options = dict(method=method, axis=axis, dtype=TYPE)
    return call(hopper.sparsify_24, x(300, 200), jax.random.key(1), names=("key",), **options)


def soft_threshold_24(rows: int, scales: int, axis: int) -> Call:
    return call(hopper.soft_threshold_24, random((rows, 200)), jnp.ones(scales), axis=axis, dtype=TYPE)


def squared_relu_gradients(*, venom: bool, drawn: bool = False) -> Call:
    y = random_venom(300, NEURONS, 128, 16, TYPE, seed=0) if venom else random_24(300, KEPT, TYPE, seed=0)
    operands = x(300, KEPT, seed=2), y, *([jax.random.key(1)] if drawn else [])
    return call(hopper.squared_relu_gradients, *operands, names=("key",) * drawn)


def gated_squared_relu_gradients() -> Call:
    operands = x(300, KEPT, seed=2), x(300, 2 * KEPT, seed=1), random_24(300, KEPT, TYPE, seed=0), jax.random.key(1)
    return call(hopper.gated_squared_relu_gradients, *operands, names=("key",))


def hidden_gradients(activation: str, columns: int) -> Call:
    operands = x(300, 128, seed=2), x(300, columns, seed=1), jax.random.key(1)
    return call(hopper.hidden_gradients, *operands, names=("key",), activation=activation)


def matmul_24_fp8(*columns: jax.Array) -> Call:
    a, b_t = random_24(300, 1152, fp8.E4M3, seed=0), random((1001, 1152), fp8.E4M3, seed=1)
    return call(hopper.matmul_24_fp8, a, b_t, jnp.ones((300, 1)), *columns)


CALLS: dict[str, Callable[[], Call]] = {
    "grouped_up": lambda: grouped("grouped_up"),
    "grouped_up, padded": lambda: grouped("grouped_up", padded=True),
    "grouped_down": lambda: grouped("grouped_down"),
    "grouped_down, padded": lambda: grouped("grouped_down", padded=True),
    "grouped_weights": lambda: grouped("grouped_weights", out_dtype=TYPE),
    "add_norm": lambda: call(hopper.add_norm, x(1000, 768), x(1000, 768, seed=1), jnp.ones(768), epsilon=1e-5),
    "add_norm, gradients": lambda: add_norm_gradients(1000),
    "add_norm, fewer rows than blocks": lambda: add_norm_gradients(3),
    "cross_entropy": lambda: cross_entropy(384),
    "cross_entropy, clusters of two": lambda: cross_entropy(512),
    "fp8_rows": lambda: call(hopper.fp8_rows, x(96, 2048)),
    "fp8_squared_relu": lambda: fp8_pass(hopper.fp8_squared_relu, 1),
    "fp8_squared_relu_gradients": lambda: fp8_pass(hopper.fp8_squared_relu_gradients, 2),
    "matmul_24": lambda: matmul_24(300, 1100, 1001),
    "matmul_24, the result transposed": lambda: matmul_24(300, 333, 1001, out_transposed=True),
    "matmul_24, several tiles a block": lambda: matmul_24(1100, 200, 3000, config=Tiling(128, 128)),
    "matmul_24, split along k": lambda: matmul_24(256, 4096, 192),
    "matmul_24_fp8": matmul_24_fp8,
    "matmul_24_fp8, scales of columns": lambda: matmul_24_fp8(jnp.ones((1, 1001))),
    "matmul_venom 64:2:16": lambda: matmul_venom(64),
    "matmul_venom 128:2:16": lambda: matmul_venom(128),
    "matmul_venom 256:2:16": lambda: matmul_venom(256),
    "matmul_venom, contiguous 128": lambda: matmul_venom(128, contiguous=128),
    "matmul_venom, rows in the tokens' order": matmul_venom_to_rows,
    "sampled_matmul_24": lambda: listed(hopper.sampled_matmul_24, 128, 1, NEURONS, DIM),
    "sampled_matmul_24, contiguous 128": lambda: listed(hopper.sampled_matmul_24, 128, 128, NEURONS, DIM),
    "sampled_matmul_24, squared": lambda: listed(hopper.sampled_matmul_24, 128, 128, NEURONS, DIM, squared_relu=True),
    **{
        f"scattered_matmul_24, contiguous {v}": lambda v=v: listed(
            hopper.scattered_matmul_24, v, v, KEPT, TOKENS, rows=NEURONS
        )
        for v in (128, 256)
    },
    "sparsify_24 magnitude, rows": lambda: sparsify_24("magnitude", -1),
    "sparsify_24 mvue, columns": lambda: sparsify_24("mvue", 0),
    "soft_threshold_24": lambda: soft_threshold_24(2 * 64, 2, -1),
    "soft_threshold_24, one scale": lambda: soft_threshold_24(100, 1, -1),
    "soft_threshold_24, columns": lambda: soft_threshold_24(100, 1, 0),
    "sparsify_24_tiles": lambda: call(
        hopper.sparsify_24_tiles, random((100, 300), jnp.float32), random((100, 300)) > 0, dtype=TYPE
    ),
    "squared_relu_venom 128:2:8": lambda: call(hopper.squared_relu_venom, x(300, NEURONS), v=128, m=8),
    "squared_relu_venom 256:2:32": lambda: call(hopper.squared_relu_venom, x(300, NEURONS), v=256, m=32),
    "squared_relu_24": lambda: call(hopper.squared_relu_24, x(100, 300)),
    "squared_relu_24, unscaled rows": lambda: call(hopper.squared_relu_24, x(100, 300), x(100, 1), names=("factor",)),
    "hidden_gradients": lambda: hidden_gradients("squared_relu", 128),
    "hidden_gradients, with a gate": lambda: hidden_gradients("swiglu", 256),
    "squared_relu_gradients": lambda: squared_relu_gradients(venom=False),
    "squared_relu_gradients 128:2:16": lambda: squared_relu_gradients(venom=True),
    "squared_relu_gradients, drawn": lambda: squared_relu_gradients(venom=False, drawn=True),
    "squared_relu_gradients 128:2:16, drawn": lambda: squared_relu_gradients(venom=True, drawn=True),
    "gated_squared_relu_24": lambda: call(hopper.gated_squared_relu_24, x(300, 2 * KEPT)),
    "gated_squared_relu_gradients, drawn": gated_squared_relu_gradients,
}


def main(_) -> None:
    host, device = jax.devices("cpu")[0], jax.devices()[0]
    for name in filter(re.compile(ONLY.value).search, CALLS):
        with jax.default_device(host):  # initcheck sees a copy that writes an operand, but not all that kernels write
            kernel, operands = CALLS[name]()
        print(f"{name} ...", flush=True)
        jax.block_until_ready(jax.jit(kernel)(*jax.device_put(operands, device)))
    print("done", flush=True)


if __name__ == "__main__":
    app.run(main)
