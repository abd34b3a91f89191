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
from sparse_lm.ops.hopper.products.matmul_24 import Config
from tests.ops.operands import random, random_24, random_contiguous, random_venom, random_venom_contiguous

ONLY = flags.DEFINE_string("only", ".", "Regular expression found in the names of the calls to make.")

TYPE = jnp.bfloat16
TOKENS, NEURONS, DIM, KEPT = 1000, 1024, 392, 256

Call = tuple[Callable, tuple]  # a kernel and its operands


def matmul_24(m: int, k: int, n: int, *, out_transposed: bool = False, config: Config | None = None) -> Call:
    operands = random_24(m, k, TYPE, seed=0), random((k, n), TYPE, seed=1)
    return functools.partial(hopper.matmul_24, out_transposed=out_transposed, config=config), operands


def matmul_24_fp8() -> Call:
    a, b_t = random_24(300, 1152, fp8.E4M3, seed=0), random((1001, 1152), fp8.E4M3, seed=1)
    return hopper.matmul_24_fp8, (a, b_t, jnp.ones((300, 1)))


def matmul_venom(v: int, *, contiguous: int = 1) -> Call:
    if contiguous > 1:
        a = random_venom_contiguous(TOKENS, NEURONS, KEPT, v, contiguous, TYPE, seed=0)
    else:
        a = random_venom(TOKENS, NEURONS, v, 16, TYPE, seed=0)
    return hopper.matmul_venom, (a, random((NEURONS, DIM), TYPE, seed=2))


def listed(kernel: Callable, v: int, contiguous: int) -> Call:
    """A product of the rows of the weight that blocks of v tokens list."""
    columns = random_contiguous(-(-TOKENS // v), KEPT, contiguous, NEURONS, seed=2)
    operands = random_24(NEURONS, DIM, TYPE, seed=0), random((TOKENS, DIM), TYPE, seed=1), columns
    return functools.partial(kernel, v=v, contiguous=contiguous), operands


def scattered_matmul_24(v: int, contiguous: int) -> Call:
    columns = random_contiguous(-(-TOKENS // v), KEPT, contiguous, NEURONS, seed=2)
    operands = random_24(KEPT, TOKENS, TYPE, seed=0), random((TOKENS, DIM), TYPE, seed=1), columns
    return functools.partial(hopper.scattered_matmul_24, v=v, rows=NEURONS, contiguous=contiguous), operands


def grouped(product: str, **options) -> Call:
    """A dense product of three experts, of which the second has no tokens."""
    x, y, w = random((1024, 512), TYPE, seed=0), random((1024, 768), TYPE, seed=1), random((3 * 768, 512), TYPE, seed=2)
    operands = dict(grouped_up=(x, w), grouped_down=(y, w), grouped_weights=(y, x))[product]
    kernel = functools.partial(getattr(hopper, product), v=256, experts=3, **options)
    return kernel, (*operands, jnp.array([0, 0, 2, 2], jnp.int32))


def cross_entropy(tokens: int) -> Call:
    operands = random((tokens, 256), TYPE, seed=0), random((768, 256), TYPE, seed=1)
    return functools.partial(hopper.cross_entropy, classes=767), (*operands, jnp.arange(tokens, dtype=jnp.int32))


def fp8_pass(kernel: Callable, inputs: int) -> Call:
    products = [fp8.Unscaled(random((96, 1152), TYPE, seed=seed), jnp.ones((96, 1), TYPE)) for seed in range(inputs)]
    return kernel, tuple(products)


def add_norm(tokens: int, *, gradients: bool) -> Call:
    x, update, scale = random((tokens, 768), TYPE, seed=0), random((tokens, 768), TYPE, seed=1), jnp.ones(768)
    kernel = functools.partial(hopper.add_norm, epsilon=1e-5)

    def of_both(x, update, scale):
        return jax.vjp(kernel, x, update, scale)[1]((update, x))

    return of_both if gradients else kernel, (x, update, scale)


def sparsify_24(method: str, axis: int) -> Call:
    def kernel(x, key):
        return hopper.sparsify_24(x, method, axis, scale=1.5, dtype=TYPE, key=key)

    return kernel, (random((300, 200), TYPE, seed=0), jax.random.key(1))


def soft_threshold_24() -> Call:
    w, scale = random((2 * 64, 200), jnp.float32, seed=0), jnp.ones(2)
    return functools.partial(hopper.soft_threshold_24, dtype=TYPE), (w, scale)


def sparsify_24_tiles() -> Call:
    x = random((100, 300), jnp.float32, seed=0)
    return functools.partial(hopper.sparsify_24_tiles, dtype=TYPE), (x, x > 0)


def venom_pass(kernel: Callable, v: int, m: int, **options) -> Call:
    return functools.partial(kernel, v=v, m=m, **options), (random((300, NEURONS), TYPE, seed=0),)


def squared_relu_24() -> Call:
    return hopper.squared_relu_24, (random((100, 300), TYPE, seed=0),)


def squared_relu_gradients(*, venom: bool, key: int | None = None) -> Call:
    y = random_venom(300, NEURONS, 128, 16, TYPE, seed=0) if venom else random_24(300, KEPT, TYPE, seed=0)
    key = None if key is None else jax.random.key(key)

    def kernel(dy, y, key):
        return hopper.squared_relu_gradients(dy, y, key=key)

    return kernel, (random((300, KEPT), TYPE, seed=2), y, key)


def gated_squared_relu_24() -> Call:
    return hopper.gated_squared_relu_24, (random((300, 2 * KEPT), TYPE, seed=0),)


def gated_squared_relu_gradients() -> Call:
    dy, h = random((300, KEPT), TYPE, seed=2), random((300, 2 * KEPT), TYPE, seed=1)
    y, key = random_24(300, KEPT, TYPE, seed=0), jax.random.key(1)
    return lambda dy, h, y, key: hopper.gated_squared_relu_gradients(dy, h, y, key=key), (dy, h, y, key)


CALLS: dict[str, Callable[[], Call]] = {
    "grouped_up": lambda: grouped("grouped_up"),
    "grouped_up, padded": lambda: grouped("grouped_up", padded=True),
    "grouped_down": lambda: grouped("grouped_down"),
    "grouped_down, padded": lambda: grouped("grouped_down", padded=True),
    "grouped_weights": lambda: grouped("grouped_weights", out_dtype=TYPE),
    "add_norm": lambda: add_norm(1000, gradients=False),
    "add_norm, gradients": lambda: add_norm(1000, gradients=True),
    "add_norm, fewer rows than blocks": lambda: add_norm(3, gradients=True),
    "cross_entropy": lambda: cross_entropy(384),
    "cross_entropy, clusters of two": lambda: cross_entropy(512),
    "fp8_rows": lambda: (hopper.fp8_rows, (random((96, 2048), TYPE, seed=0),)),
    "fp8_squared_relu": lambda: fp8_pass(hopper.fp8_squared_relu, 1),
    "fp8_squared_relu_gradients": lambda: fp8_pass(hopper.fp8_squared_relu_gradients, 2),
    "matmul_24": lambda: matmul_24(300, 1100, 1001),
    "matmul_24, the result transposed": lambda: matmul_24(300, 333, 1001, out_transposed=True),
    "matmul_24, several tiles a block": lambda: matmul_24(1100, 200, 3000, config=Config(128, 128, cluster=1)),
    "matmul_24, split along k": lambda: matmul_24(256, 4096, 192),
    "matmul_24_fp8": matmul_24_fp8,
    "matmul_venom 64:2:16": lambda: matmul_venom(64),
    "matmul_venom 128:2:16": lambda: matmul_venom(128),
    "matmul_venom 256:2:16": lambda: matmul_venom(256),
    "matmul_venom, contiguous 128": lambda: matmul_venom(128, contiguous=128),
    "sampled_matmul_24": lambda: listed(hopper.sampled_matmul_24, v=128, contiguous=1),
    "sampled_matmul_24, contiguous 128": lambda: listed(hopper.sampled_matmul_24, v=128, contiguous=128),
    "sampled_squared_relu_24": lambda: listed(hopper.sampled_squared_relu_24, v=128, contiguous=128),
    "scattered_matmul_24, contiguous 128": lambda: scattered_matmul_24(v=128, contiguous=128),
    "scattered_matmul_24, contiguous 256": lambda: scattered_matmul_24(v=256, contiguous=256),
    "sparsify_24 magnitude, rows": lambda: sparsify_24("magnitude", -1),
    "sparsify_24 soft threshold, columns": lambda: sparsify_24("soft_threshold", 0),
    "sparsify_24 mvue, columns": lambda: sparsify_24("mvue", 0),
    "soft_threshold_24": soft_threshold_24,
    "sparsify_24_tiles": sparsify_24_tiles,
    "sparsify_venom 128:2:16": lambda: venom_pass(hopper.sparsify_venom, 128, 16, dtype=TYPE),
    "squared_relu_venom 128:2:8": lambda: venom_pass(hopper.squared_relu_venom, 128, 8),
    "squared_relu_venom 256:2:32": lambda: venom_pass(hopper.squared_relu_venom, 256, 32),
    "squared_relu_24": squared_relu_24,
    "squared_relu_gradients": lambda: squared_relu_gradients(venom=False),
    "squared_relu_gradients 128:2:16": lambda: squared_relu_gradients(venom=True),
    "squared_relu_gradients, drawn": lambda: squared_relu_gradients(venom=False, key=1),
    "squared_relu_gradients 128:2:16, drawn": lambda: squared_relu_gradients(venom=True, key=1),
    "gated_squared_relu_24": gated_squared_relu_24,
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
