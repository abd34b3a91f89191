"""The sparse products of every backend against float64, at every tiling; the same operands give the same bits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import fp8, hopper, reference
from sparse_lm.ops.formats import Sparse24
from sparse_lm.ops.hopper.frame import tiling as hopper_tiling
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24
from tests.ops import jitted
from tests.ops.kernels import BACKENDS, candidates, each_backend
from tests.ops.operands import (
    assert_as_good_as_reference,
    assert_repeats,
    exact_product,
    product_operands,
    random,
    random_24,
    random_contiguous,
    random_rows,
)

pytestmark = pytest.mark.gpu


class Tiling(NamedTuple):
    """A kernel with a tiling, whose blocks v are multiples of `v`, and which may need contiguous neurons."""

    op: str
    kernel: Callable
    config: Any
    v: int = 0
    contiguous: bool = False

    def __str__(self) -> str:
        backend = self.kernel.__module__.split(".")[2]
        return f"{backend}-{self.kernel.__name__}-{self.config}{'-contiguous' * self.contiguous}"

    @property
    def product(self) -> Callable:
        return functools.partial(self.kernel, config=self.config)


def tilings():
    for name, backend in BACKENDS.items():
        for config in candidates(name, "matmul_24"):
            yield Tiling("matmul_24", backend.matmul_24, config)
            if name == "triton":
                yield Tiling("scattered_matmul_24", backend.scattered_matmul_24, config, contiguous=True)
        for config in candidates(name, "matmul_venom"):
            yield Tiling("matmul_venom", backend.matmul_venom, config, config.tile_m)
        for config in candidates(name, "sampled_matmul_24"):
            yield Tiling("sampled_matmul_24", backend.sampled_matmul_24, config, config.tile_n, name == "hopper")
    yield Tiling("matmul_24", hopper.matmul_24, hopper_tiling.Tiling(128, 128))
    for config in candidates("hopper", "matmul_24"):
        yield Tiling("matmul_24_fp8", hopper.matmul_24_fp8, config)
    for config in candidates("hopper", "matmul_venom", "CONTIGUOUS"):
        yield Tiling("matmul_venom", hopper.matmul_venom, config, 256, contiguous=True)
    for tokens in candidates("hopper", "sampled_rows_24"):
        yield Tiling("sampled_matmul_24", sampled_rows_24, tokens, tokens)
    for config in candidates("hopper", "scattered_matmul_24"):
        yield Tiling("scattered_matmul_24", hopper.scattered_matmul_24, config, contiguous=True)


TILINGS = list(tilings())

# As `product_operands` takes them, by op and whether neurons are contiguous; some v are multiples of a tile's.
SHAPES = {
    ("matmul_24", False): [(512, 320, 768), (300, 333, 1001), (1, 4, 1), (256, 4096, 192), (2048, 1536, 16384)],
    ("matmul_24_fp8", False): [(512, 384, 768), (300, 1152, 1001), (256, 8192, 192), (1, 128, 1)],
    ("matmul_venom", False): [(512, 1024, 256, 512, 1, 1), (300, 1008, 252, 261, 1, 1), (1000, 960, 480, 200, 2, 1)],
    ("matmul_venom", True): [
        *[(1000, 2048, 512, 200, 1, 128), (300, 384, 192, 1001, 2, 64), (700, 8192, 2048, 1024, 1, 2048)],
    ],
    ("sampled_matmul_24", False): [(768, 512, 1024, 512, 1, 1), (1000, 333, 1280, 601, 2, 1), (1, 100, 64, 8, 1, 1)],
    ("sampled_matmul_24", True): [
        *[(768, 512, 1024, 512, 2, 512), (1000, 333, 1280, 640, 1, 128), (1, 100, 256, 64, 1, 64)],
        *[(1536, 1024, 4096, 1024, 1, 256), (1153, 2048, 1152, 1152, 1, 192)],
    ],
    ("scattered_matmul_24", True): [
        *[(2048, 512, 512, 2048, 256, 512), (1000, 200, 512, 1024, 192, 512), (900, 1001, 1024, 1536, 64, 512)],
        *[(100, 64, 512, 512, 128, 512), (16384, 768, 1024, 4096, 256, 512)],
    ],
}


def operands_of(tiling, shape, dtype=jnp.bfloat16):
    if tiling.v:
        *shape, blocks, contiguous = shape
        shape = *shape, blocks * tiling.v, contiguous
    operands, options = product_operands(tiling.op, shape, dtype)
    if tiling.op == "sampled_matmul_24" and not tiling.contiguous:
        options.pop("contiguous")
    return operands, options


def check(op, kernel, operands, options, out_dtype=None):
    """The error is at most 1.5 times that of the reference, of FP8 that of its sums, and runs agree."""
    options = dict(options, out_dtype=out_dtype or operands[1].dtype) if op != "matmul_24_fp8" else options
    out = assert_repeats(lambda *operands: kernel(*operands, **options), *operands, runs=4)
    exact = exact_product(op, jitted.dense(operands[0]), *operands[1:], **options)
    if op != "matmul_24_fp8":
        return assert_as_good_as_reference(out, getattr(reference, op)(*operands, **options), exact)
    # By rows, whose scales differ. Of the sum so far the tensor cores keep some 14 bits, and drop the rest.
    error = np.linalg.norm(np.asarray(out, np.float64) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    precision = 0.004 if out.dtype == jnp.bfloat16 else 0
    assert error.max() < operands[0].shape[1] / 64 * 2**-13 + precision


@pytest.mark.parametrize(
    "tiling, shape", [(tiling, shape) for tiling in TILINGS for shape in SHAPES[tiling.op, tiling.contiguous]], ids=str
)
def test_tilings_match_the_reference(tiling, shape):
    operands, options = operands_of(tiling, shape)
    check(tiling.op, tiling.product, operands, options)
    if tiling.op == "matmul_24":
        check(tiling.op, tiling.product, operands, dict(options, out_transposed=True))


@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if tiling.op == "matmul_venom"], ids=str)
@pytest.mark.parametrize(
    "tokens, n, dtype", [(2000, 512, jnp.bfloat16), (333, 200, jnp.float16), (129, 1001, jnp.bfloat16)]
)
def test_rows_are_put_back_in_the_order_of_the_tokens(tokens, n, dtype, tiling):
    rows = random_rows(tokens, (tokens + 2 * 256) // 256 * 256, seed=14)
    shape = rows.slots.shape[0], 1024, 256, n, 256 // tiling.v, 64 if tiling.contiguous else 1
    operands, _ = operands_of(tiling, shape, dtype)
    check(tiling.op, tiling.product, operands, dict(rows=rows), out_dtype=jnp.float32 if dtype == jnp.float16 else None)


# What no one chose a tiling for, of which some fit only kernels that take single rows.
CHOSEN = {
    "matmul_24": [(200, 500, 392)],
    "matmul_venom": [
        *[(256, 1024, 256, 256, v, 1) for v in (64, 128, 256)],
        *[(700, 1024, 256, 256, v, contiguous) for v, contiguous in ((64, 128), (256, 128), (64, 64), (128, 32))],
    ],
    "sampled_matmul_24": [
        *[(700, 256, 512, 256, v, 1) for v in (64, 192)],
        *[(700, 256, 512, 256, v, contiguous) for v, contiguous in ((64, 32), (128, 128), (192, 128), (256, 32))],
    ],
    "scattered_matmul_24": [(3000, 520, 512, 1024, 256, 256)],
}


@each_backend
@pytest.mark.parametrize("dtype, out_dtype", [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("op, shape", [(op, shape) for op, shapes in CHOSEN.items() for shape in shapes])
def test_dtypes(op, shape, dtype, out_dtype, backend):
    operands, options = product_operands(op, shape, dtype, scale=0.1)
    check(op, getattr(backend, op), operands, options, out_dtype)


@each_backend
@pytest.mark.parametrize("lists", [1, 16, 32])
@pytest.mark.parametrize("rows", [4096, 8192])
def test_scattered_slices_that_one_block_lists_or_all_or_none(rows, lists, backend):
    a, b = random_24(512, 4096, jnp.bfloat16, seed=3), random((4096, 520), jnp.bfloat16, seed=4)
    neuron_ids = random_contiguous(32, 512, 128, rows - 128, seed=5, lists=lists) + 128
    neuron_ids = neuron_ids.at[:, :128].set(jnp.arange(128))
    neuron_ids = neuron_ids.at[7].set(rows + jnp.arange(512))  # lists nothing that there is
    options = dict(v=128, rows=rows, contiguous=128)
    check("scattered_matmul_24", backend.scattered_matmul_24, (a, b, neuron_ids), options)


@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if tiling.v and tiling.contiguous], ids=str)
@pytest.mark.parametrize("steps", [8, 5])  # along what is contracted: an even and an odd number
def test_blocks_that_list_nothing_are_zeros(steps, tiling):
    nothing, v = jnp.array([2, 6, 7, 8]), 256 if tiling.op == "matmul_venom" else 2 * tiling.v
    for listing_nothing in (nothing, slice(None)):
        if tiling.op == "matmul_venom":
            (a, b), options = product_operands(tiling.op, (9 * v, 1280, 64 * steps, 1000, v, 64))
            operands = dataclasses.replace(a, columns=a.columns.at[listing_nothing].set(1280)), b
        else:
            (w, x, ids), options = product_operands(tiling.op, (9 * v, 64 * steps, 1024, 512, v, 128))
            operands = w, x, ids.at[listing_nothing].set(1024)
        check(tiling.op, tiling.product, operands, options)


MIDDLING = {
    "matmul_24": (192, 256, 192),
    "matmul_24_fp8": (192, 256, 192),
    "matmul_venom": (512, 1024, 256, 512, 1),
    "sampled_matmul_24": (384, 256, 512, 128, 1),
    "scattered_matmul_24": (512, 512, 512, 1024, 256, 512),
}


def bad_in(x):
    return ~np.isfinite(np.asarray(x, np.float32))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_reach_what_reads_them_and_nothing_else(bad, tiling):
    """Among them are numbers of rows that no block lists, and of groups of four that do not keep them."""
    bad = np.nan if tiling.op == "matmul_24_fp8" else bad
    shape = MIDDLING[tiling.op] + ((64 if tiling.contiguous else 1,) if tiling.v else ())
    (sparse, dense, *more), options = operands_of(tiling, shape)
    if tiling.op == "matmul_24_fp8":
        more = [jnp.ones_like(more[0])]
    if tiling.op == "sampled_matmul_24":  # the neuron past the last is zeros, by which bad numbers are multiplied
        more = [jnp.minimum(more[0], sparse.shape[0] - 1)]
    ones = jnp.ones_like(dense, jnp.float32)

    spoiled = dense.at[[101, dense.shape[0] - 1], [17, 7]].set(bad)
    out = tiling.product(sparse, spoiled, *more, **options)
    reads = exact_product(tiling.op, jitted.mask(sparse), bad_in(spoiled), *more, **options)
    np.testing.assert_array_equal(bad_in(out), reads > 0)

    worse = dataclasses.replace(sparse, values=sparse.values.at[5::50, 3].set(bad))
    out = tiling.product(worse, dense, *more, **options)
    reads = exact_product(tiling.op, bad_in(jitted.dense(worse)), ones, *more, **options)
    assert reads.any()
    np.testing.assert_array_equal(bad_in(out), reads > 0)


@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if tiling.kernel is hopper.sampled_matmul_24], ids=str)
def test_a_sampled_product_may_be_squared(tiling):
    for shape in SHAPES["sampled_matmul_24", True]:
        operands, options = operands_of(tiling, shape)
        h = tiling.product(*operands, **options)
        squared = tiling.product(*operands, **options, squared_relu=True)
        np.testing.assert_array_equal(squared, jnp.square(jax.nn.relu(h)))


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if tiling.op == "matmul_24_fp8"], ids=str)
def test_columns_of_a_product_in_fp8_may_have_scales(tiling, out_dtype):
    for shape in SHAPES["matmul_24_fp8", False]:
        operands, _ = operands_of(tiling, shape)
        columns = jnp.exp2(jnp.arange(shape[2]) % 9 - 4.0)[None]
        product = functools.partial(tiling.product, out_dtype=out_dtype)
        np.testing.assert_array_equal(product(*operands, columns), product(*operands) * columns.astype(out_dtype))


def test_the_error_of_fp8_is_that_of_the_rounding_to_e4m3():
    y = ops.sparsify_24(jnp.square(jax.nn.relu(random((512, 2048), seed=4))), "magnitude", dtype=jnp.bfloat16)
    w = random((2048, 384), jnp.bfloat16, seed=5)
    rows, matrix = fp8.by_rows(y.values), fp8.whole(w)
    a, scale = Sparse24(rows.values, y.metadata, y.shape), rows.scale * matrix.scale
    operands = a, matrix.values.T, scale
    check("matmul_24_fp8", functools.partial(hopper.matmul_24_fp8, out_dtype=jnp.float32), operands, {})
    out, emulation = hopper.matmul_24_fp8(*operands), exact_product("matmul_24_fp8", a.to_dense(), *operands[1:])
    exact = np.asarray(y.to_dense(), np.float64) @ np.asarray(w, np.float64)
    assert_as_good_as_reference(out, jnp.asarray(emulation, jnp.bfloat16), exact)
