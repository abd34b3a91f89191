"""Every kernel lowers for Hopper on a machine without a GPU: shapes, tiles and shared memory fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from sparse_lm.ops import hopper
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.hopper.frame import tuning
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES
from sparse_lm.ops.hopper.products.matmul_24 import Config as Config24
from sparse_lm.ops.hopper.products.matmul_venom import CANDIDATES as VENOM
from sparse_lm.ops.hopper.products.matmul_venom import Config as ConfigVenom
from sparse_lm.ops.hopper.products.matmul_venom_contiguous import CANDIDATES as VENOM_RUNS
from sparse_lm.ops.hopper.products.matmul_venom_contiguous import matmul_venom_contiguous
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES as SAMPLED
from sparse_lm.ops.hopper.products.sampled_rows_24 import CANDIDATES as SAMPLED_ROWS
from sparse_lm.ops.hopper.products.sampled_rows_24 import Config as ConfigSampledRows
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24
from sparse_lm.ops.hopper.products.scattered_matmul_24 import CANDIDATES as SCATTERED
from sparse_lm.ops.row_order import RowOrder
from tests.ops.hopper import sanitize

TUNED = json.loads(tuning.PATH.read_text())


def _with_tuned(candidates, kernel, config_type):
    """The candidates and a kernel's configurations in tuned.json, each once."""
    tuned = [config_type(**fields) for kinds in TUNED.values() for fields in kinds.get(kernel, {}).values()]
    return list(dict.fromkeys([*candidates, *tuned]))


def _lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


def _sparse_24(m, k, dtype=jnp.bfloat16):
    rows, columns = -(-m // 64) * 64, -(-k // 64) * 64
    values = jax.ShapeDtypeStruct((rows, columns // 2), dtype)
    return Sparse24(values, jax.ShapeDtypeStruct((rows // 64, columns // 64, 128), jnp.int32), (m, k))


CONFIGS_24 = _with_tuned((config for config, _ in CANDIDATES), "matmul_24", Config24)


@pytest.mark.parametrize("config", CONFIGS_24)
@pytest.mark.parametrize("out_transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_matmul_24(config, out_transposed, out_dtype):
    options = dict(out_transposed=out_transposed, out_dtype=out_dtype, config=config)
    b = jax.ShapeDtypeStruct((392, 500), jnp.bfloat16)
    lowered = _lower(lambda w, b: hopper.matmul_24(w, b, **options), _sparse_24(300, 392), b)
    assert lowered.out_info.shape == ((500, 300) if out_transposed else (300, 500))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("config", _with_tuned((config for config, _ in VENOM), "matmul_venom", ConfigVenom))
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_matmul_venom(config, out_dtype):
    condensed = _sparse_24(512, 512 // 4)
    columns = jax.ShapeDtypeStruct((512 // config.tile_m, condensed.shape[1]), jnp.int32)
    a = SparseVenom(condensed.values, condensed.metadata, columns, shape=(300, 512), v=config.tile_m, m=16)
    b = jax.ShapeDtypeStruct((512, 500), jnp.bfloat16)
    lowered = _lower(lambda a, b: hopper.matmul_venom(a, b, out_dtype=out_dtype, config=config), a, b)
    assert lowered.out_info.shape == (300, 500)
    assert "mosaic_gpu" in lowered.as_text()


def test_matmul_venom_of_one_layer_of_several_has_the_tiling_of_one(monkeypatch):
    tuned_for = []
    monkeypatch.setattr(tuning, "lookup", lambda _, shape, config: tuned_for.append(shape))
    neurons, layers = 512, 3
    condensed = _sparse_24(384, 4 * neurons // 16)
    a = SparseVenom(condensed.values, condensed.metadata, _columns(3, 128), (300, layers * neurons), v=128, m=16)
    _lower(hopper.matmul_venom, a, jax.ShapeDtypeStruct((layers * neurons, 500), jnp.bfloat16))
    assert tuned_for == [(300, 500, neurons, 128, 16)]


@pytest.mark.parametrize(
    "name",
    ["matmul_24, split along k", "matmul_venom 128:2:16", "sampled_matmul_24", "scattered_matmul_24, contiguous 128"],
)
def test_a_stack_of_products_is_one_after_the_other(name):
    """Semaphores, by which clusters signal one another, belong to one product."""
    product, operands = sanitize.CALLS[name]()
    one = jax.eval_shape(product, *operands)
    stacks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), operands)
    lowered = _lower(jax.vmap(product), *stacks)
    assert lowered.out_info.shape == (3, *one.shape)
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.while" in text


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(tile_m=192, tile_n=128), "tile_m must be 64, 128 or 256"),
        (dict(tile_m=64, tile_n=192), "a multiple of 128"),
        (dict(tile_m=128, tile_n=320), "up to 256"),
        (dict(tile_m=128, tile_n=128, store_slots=1), "store_slots = 1 must be at least 2"),
    ],
)
def test_tilings_that_kernels_do_not_have_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Config24(**sizes)


@pytest.mark.parametrize("tokens, stages", [(96, 5), (128, 2)])
def test_tilings_of_gathered_rows_that_the_kernel_does_not_have_are_refused(tokens, stages):
    with pytest.raises(ValueError, match="stages at least 3"):
        ConfigSampledRows(rows=256, tokens=tokens, stages=stages)


def test_tiles_that_do_not_lie_in_one_block_are_refused():
    condensed, b = _sparse_24(256, 128), jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    a = SparseVenom(condensed.values, condensed.metadata, _columns(2, 128), (256, 512), v=128, m=16)
    with pytest.raises(ValueError, match="the 256 rows of a tile must divide the 128"):
        hopper.matmul_venom(a, b, config=ConfigVenom(256, 192))
    clusters_of_256_rows, _ = VENOM_RUNS[1]
    with pytest.raises(ValueError, match="the 256 rows of a tile must divide the 128"):
        matmul_venom_contiguous(dataclasses.replace(a, contiguous=64), b, config=clusters_of_256_rows)
    w, x = _sparse_24(256, 128), jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="the 192 tokens of a tile must divide the 128"):
        hopper.sampled_matmul_24(w, x, _columns(2, 128), 128, contiguous=64, config=SAMPLED[0][0])
    with pytest.raises(ValueError, match="the 128 tokens of a tile must divide the 64"):
        sampled_rows_24(w, x, _columns(4, 128), 64, config=SAMPLED_ROWS[0])
    with pytest.raises(ValueError, match="the 512 rows of a tile must divide the 128"):
        hopper.scattered_matmul_24(
            _sparse_24(128, 256), x, _columns(2, 128), 128, 256, contiguous=128, config=SCATTERED[0][0]
        )


def _rows(tokens, slots):
    return RowOrder(jax.ShapeDtypeStruct((slots,), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.int32))


@pytest.mark.parametrize("config", [config for config, _ in VENOM + VENOM_RUNS])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_matmul_venom_in_the_order_of_the_tokens(config, out_dtype):
    condensed = _sparse_24(512, 256)
    contiguous, product = (
        (64, matmul_venom_contiguous) if config in [config for config, _ in VENOM_RUNS] else (1, hopper.matmul_venom)
    )
    a = SparseVenom(
        condensed.values, condensed.metadata, _columns(2, 256), (512, 1024), v=256, m=16, contiguous=contiguous
    )
    b = jax.ShapeDtypeStruct((1024, 500), jnp.bfloat16)
    lowered = _lower(
        lambda a, b, rows: product(a, b, rows=rows, out_dtype=out_dtype, config=config), a, b, _rows(300, 512)
    )
    assert lowered.out_info.shape == (300, 500)
    assert "mosaic_gpu" in lowered.as_text()


def _columns(blocks, kept):
    return jax.ShapeDtypeStruct((blocks, kept), jnp.int32)


def _lower_sampled(product, config, contiguous):
    """Of 500 tokens, each block of which lists 512 neurons."""
    v = config.tile_n
    x, columns = jax.ShapeDtypeStruct((500, 392), jnp.bfloat16), _columns(-(-500 // v), 512)
    lowered = _lower(
        lambda w, x, columns: product(w, x, columns, v, contiguous=contiguous, config=config),
        _sparse_24(2048, 392),
        x,
        columns,
    )
    assert "mosaic_gpu" in lowered.as_text()
    return lowered.out_info


@pytest.mark.parametrize("config", [config for config, _ in SAMPLED])
@pytest.mark.parametrize("contiguous", [64, 512])
def test_sampled_matmul_24(config, contiguous):
    assert _lower_sampled(hopper.sampled_matmul_24, config, contiguous).shape == (500, 512)


@pytest.mark.parametrize("config", [config for config, _ in SAMPLED])
@pytest.mark.parametrize("contiguous", [64, 512])
def test_sampled_squared_relu_24(contiguous, config):
    y, _ = _lower_sampled(hopper.sampled_squared_relu_24, config, contiguous)
    assert y.shape == (500, 512) and y.values.shape == (512, 256)


@pytest.mark.parametrize("config", [config for config, _ in VENOM_RUNS])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_matmul_venom_contiguous(config, out_dtype):
    condensed = _sparse_24(512, 256)
    a = SparseVenom(condensed.values, condensed.metadata, _columns(2, 256), (300, 1024), v=256, m=16, contiguous=64)
    b = jax.ShapeDtypeStruct((1024, 500), jnp.bfloat16)
    lowered = _lower(lambda a, b: matmul_venom_contiguous(a, b, out_dtype=out_dtype, config=config), a, b)
    assert lowered.out_info.shape == (300, 500)
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("config", [config for config, _ in SCATTERED])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_scattered_matmul_24(config, out_dtype):
    b = jax.ShapeDtypeStruct((700, 4096), jnp.bfloat16)
    options = dict(v=256, rows=2048, contiguous=config.cluster_m, out_dtype=out_dtype, config=config)
    lowered = _lower(
        lambda a, b, columns: hopper.scattered_matmul_24(a, b, columns, **options),
        _sparse_24(512, 700),
        b,
        _columns(3, 512),
    )
    assert lowered.out_info.shape == (2048, 4096)
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("config", _with_tuned(SAMPLED_ROWS, "sampled_rows_24", ConfigSampledRows))
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_sampled_rows_24(config, out_dtype):
    v, dim = config.tokens, 300
    x = jax.ShapeDtypeStruct((3 * v - 10, dim), jnp.bfloat16)
    columns = jax.ShapeDtypeStruct((3, 300), jnp.int32)
    product = lambda *args: sampled_rows_24(*args, v, out_dtype=out_dtype, config=config)  # noqa: E731
    lowered = _lower(product, _sparse_24(1000, dim), x, columns)
    assert lowered.out_info.shape == (3 * v - 10, 300)
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("method", ["magnitude", "soft_threshold", "mvue"])
def test_sparsify_24(method, axis, dtype):
    options = dict(method=method, axis=axis, scale=1.5, dtype=jnp.bfloat16, key=jax.random.key(0))
    lowered = _lower(lambda x: hopper.sparsify_24(x, **options), jax.ShapeDtypeStruct((300, 200), dtype))
    assert lowered.out_info.shape == ((200, 300) if axis == 0 else (300, 200))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_sparsify_24_tiles(given, dtype):
    x, mask = (jax.ShapeDtypeStruct((300, 200), d) for d in (dtype, bool))
    sparsify = lambda x, mask: hopper.sparsify_24_tiles(x, mask, dtype=jnp.bfloat16)  # noqa: E731
    lowered = _lower(sparsify, x, mask if given else None)
    assert [form.shape for form in lowered.out_info] == [(300, 200), (200, 300)]
    assert "mosaic_gpu" in lowered.as_text()


def test_too_much_shared_memory_is_refused():
    config = Config24(tile_m=256, tile_n=256, stages=5)
    b = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="shared memory"):
        _lower(lambda w, b: hopper.matmul_24(w, b, config=config), _sparse_24(256, 256), b)
