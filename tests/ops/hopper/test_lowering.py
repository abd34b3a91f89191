"""Every kernel of a product lowers for Hopper on a machine without a GPU: shapes, tiles and shared memory fit."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from sparse_lm.ops import fp8, hopper, tuned
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES
from sparse_lm.ops.hopper.products.matmul_24 import Config as Config24
from sparse_lm.ops.hopper.products.matmul_venom import CANDIDATES as VENOM
from sparse_lm.ops.hopper.products.matmul_venom import CONTIGUOUS
from sparse_lm.ops.hopper.products.matmul_venom import Config as ConfigVenom
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES as SAMPLED
from sparse_lm.ops.hopper.products.sampled_rows_24 import CANDIDATES as SAMPLED_ROWS
from sparse_lm.ops.hopper.products.sampled_rows_24 import Config as ConfigSampledRows
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24
from sparse_lm.ops.hopper.products.scattered_matmul_24 import CANDIDATES as SCATTERED
from sparse_lm.ops.row_order import RowOrder
from tests.ops.hopper import sanitize

TUNED = json.loads(tuned.HOPPER.read_text())


def _with_tuned(candidates, kernel, config_type):
    """The candidates and a kernel's configurations in tuned.json, each once."""
    tuned = [config_type(**fields) for kinds in TUNED.values() for fields in kinds.get(kernel, {}).values()]
    return list(dict.fromkeys([*candidates, *tuned]))


def _lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


def _dense(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _sparse_24(m, k):
    rows, columns = -(-m // 64) * 64, -(-k // 64) * 64
    return Sparse24(_dense(rows, columns // 2), _ids(rows // 64, columns // 64, 128), (m, k))


def _venom(rows, k, v, *, contiguous=1):
    """A matrix in 512 padded rows, which keeps a fourth of its columns."""
    condensed = _sparse_24(512, k // 4)
    columns = _ids(512 // v, k // 4)
    return SparseVenom(condensed.values, condensed.metadata, columns, (rows, k), v, 16, contiguous)


def _products():
    """Each kernel in each of its tilings, options in turn: the call, shapes of its operands, and of its result."""
    turns = itertools.cycle((False, True))
    rows = RowOrder(_ids(512), _ids(300))
    of_matmul_24 = _with_tuned((config for config, _ in CANDIDATES), "matmul_24", Config24)
    for config, out_transposed in zip(of_matmul_24, turns, strict=False):
        product = functools.partial(hopper.matmul_24, out_transposed=out_transposed, config=config)
        yield product, (_sparse_24(300, 392), _dense(392, 500)), (500, 300) if out_transposed else (300, 500)
    of_venom = [
        *((config, 1) for config in _with_tuned((c for c, _ in VENOM), "matmul_venom", ConfigVenom)),
        *((config, 64) for config, _ in CONTIGUOUS),
    ]
    for (config, contiguous), sorted_rows in zip(of_venom, turns, strict=False):
        v = config.tile_m if contiguous == 1 else 256
        product = functools.partial(hopper.matmul_venom, config=config)
        if sorted_rows:
            in_order = functools.partial(_in_order, product)
            yield in_order, (_venom(512, 1024, 256, contiguous=contiguous), _dense(1024, 500), rows), (300, 500)
        else:
            yield product, (_venom(300, 512, v, contiguous=contiguous), _dense(512, 500)), (300, 500)
    for (config, _), whole in zip(SAMPLED, turns, strict=False):
        v, contiguous = config.tile_n, 512 if whole else 64
        product = functools.partial(hopper.sampled_matmul_24, v=v, contiguous=contiguous, config=config)
        yield product, (_sparse_24(2048, 392), _dense(500, 392), _ids(-(-500 // v), 512)), (500, 512)
    for config in _with_tuned(SAMPLED_ROWS, "sampled_rows_24", ConfigSampledRows):
        tokens = 3 * config.tokens - 10
        product = functools.partial(sampled_rows_24, v=config.tokens, config=config)
        yield product, (_sparse_24(1000, 300), _dense(tokens, 300), _ids(3, 300)), (tokens, 300)
    for config, _ in SCATTERED:
        options = dict(v=256, rows=2048, contiguous=config.cluster_m, config=config)
        product = functools.partial(hopper.scattered_matmul_24, **options)
        yield product, (_sparse_24(512, 700), _dense(700, 4096), _ids(3, 512)), (2048, 4096)


@pytest.mark.parametrize(
    "out_dtype, config", list(zip((jnp.bfloat16, jnp.float32), (config for config, _ in CANDIDATES), strict=True))
)
def test_matmul_24_fp8(out_dtype, config):
    a = dataclasses.replace(_sparse_24(300, 384), values=jax.ShapeDtypeStruct((320, 192), fp8.E4M3))
    scale = jax.ShapeDtypeStruct((300, 1), jnp.float32)
    product = functools.partial(hopper.matmul_24_fp8, out_dtype=out_dtype, config=config)
    lowered = _lower(product, a, jax.ShapeDtypeStruct((500, 384), fp8.E4M3), scale)
    assert lowered.out_info.shape == (300, 500) and lowered.out_info.dtype == out_dtype


def _in_order(product, a, b, rows, **options):
    return product(a, b, rows=rows, **options)


@pytest.mark.parametrize("number, case", list(enumerate(_products())))
def test_products(number, case):
    (product, operands, shape), out_dtype = case, (jnp.bfloat16, jnp.float32)[number // 2 % 2]
    lowered = _lower(functools.partial(product, out_dtype=out_dtype), *operands)
    assert lowered.out_info.shape == shape and lowered.out_info.dtype == out_dtype
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("tokens", [8192, 384])
def test_cross_entropy(tokens):
    vocabulary, dim = 128_256, 2048
    cross_entropy = functools.partial(hopper.cross_entropy, classes=vocabulary - 252)
    operands = _dense(tokens, dim), _dense(vocabulary, dim), _ids(tokens)
    lowered = _lower(cross_entropy, *operands)
    assert [out.shape for out in lowered.out_info] == [(tokens,), (tokens, vocabulary)]
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("tokens, dim", [(32_768, 2560), (1000, 8192), (3, 256)])
@pytest.mark.parametrize("updates", [0, 1])
def test_add_norm(tokens, dim, updates):
    def both(x, scale, gradients, *updates):
        return jax.vjp(lambda *args: hopper.add_norm(*args, 1e-5), x, *(updates or [None]), scale)[1](gradients)

    x, scale = _dense(tokens, dim), jax.ShapeDtypeStruct((dim,), jnp.float32)
    lowered = _lower(both, x, scale, (x, x), *[x] * updates)
    assert jax.tree.map(lambda out: out.shape, lowered.out_info) == (x.shape, x.shape if updates else None, (dim,))
    assert lowered.as_text().count("mosaic_gpu") >= 2


def test_sampled_squared_relu_24():
    config, _ = SAMPLED[0]
    product = functools.partial(hopper.sampled_squared_relu_24, v=config.tile_n, contiguous=512, config=config)
    neuron_ids = _ids(-(-500 // config.tile_n), 512)
    y, _ = _lower(product, _sparse_24(2048, 392), _dense(500, 392), neuron_ids).out_info
    assert y.shape == (500, 512) and y.values.shape == (512, 256)


def test_matmul_venom_of_one_layer_of_several_has_the_tiling_of_one(monkeypatch):
    tuned_for = []
    monkeypatch.setattr(tuned, "lookup", lambda _, kernel, shape, config: tuned_for.append(shape))
    neurons, layers = 512, 3
    a = dataclasses.replace(_venom(300, neurons, 128), shape=(300, layers * neurons))
    _lower(hopper.matmul_venom, a, _dense(layers * neurons, 500))
    assert tuned_for == [(300, 500, neurons, 128, 16)]


@pytest.mark.parametrize("name", ["matmul_24, split along k", "scattered_matmul_24, contiguous 128"])
def test_a_stack_of_products_is_one_after_the_other(name):
    """Semaphores, by which clusters signal one another, belong to one product."""
    product, operands = sanitize.CALLS[name]()
    one = jax.eval_shape(product, *operands)
    stacks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), operands)
    lowered = _lower(jax.vmap(product), *stacks)
    assert lowered.out_info.shape == (3, *one.shape)
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.while" in text
