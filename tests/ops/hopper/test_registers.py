"""No kernel spills registers to memory. Needs the CUDA plugin and ptxas, but no GPU."""

import functools
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from sparse_lm.ops import fp8, hopper
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.hopper.frame.compat import TRANSPOSING_LOADS
from sparse_lm.ops.hopper.passes import add_norm
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES as DENSE
from sparse_lm.ops.hopper.products.matmul_venom import CANDIDATES as VENOM
from sparse_lm.ops.hopper.products.matmul_venom import CONTIGUOUS
from sparse_lm.ops.hopper.products.sampled_matmul_24 import CANDIDATES as SAMPLED
from sparse_lm.ops.hopper.products.sampled_rows_24 import CANDIDATES as SAMPLED_ROWS
from sparse_lm.ops.hopper.products.sampled_rows_24 import sampled_rows_24
from sparse_lm.ops.hopper.products.scattered_matmul_24 import CANDIDATES as SCATTERED
from sparse_lm.ops.row_order import RowOrder

T, F, D, KEPT = 8192, 8192, 2048, 2048
KEY = jax.eval_shape(lambda: jax.random.key(0))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin, to compile for a GPU"
)


@pytest.fixture
def report(monkeypatch, capfd):
    """Compiles a function for an H100 as if for the first time: what ptxas says of its kernels."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    target = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
    topology = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=target)
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def compile(function, *shapes):
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
        jax.jit(function).lower(*placed).compile()
        return "".join(capfd.readouterr())

    jax.config.update("jax_enable_compilation_cache", False)
    yield compile
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def spilled_bytes(report):
    """Compiles a function: the bytes that each of its kernels spills."""
    return lambda *args: [int(bytes_) for bytes_ in re.findall(r"frame, (\d+) bytes spill stores", report(*args))]


def _dense(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _sparse(m, k):
    return Sparse24(_dense(m, k // 2), jax.ShapeDtypeStruct((m // 64, k // 64, 128), jnp.int32), (m, k))


def _columns(v):
    return jax.ShapeDtypeStruct((T // v, KEPT), jnp.int32)


def _venom(v, contiguous):
    condensed = _sparse(T, KEPT)
    return SparseVenom(condensed.values, condensed.metadata, _columns(v), (T, F), v, 4 * F // KEPT, contiguous)


@pytest.mark.parametrize("config", [config for config, _ in DENSE])
@pytest.mark.parametrize("out_transposed", [False, True])
def test_matmul_24(spilled_bytes, config, out_transposed):
    options = dict(out_transposed=out_transposed, config=config)
    assert spilled_bytes(lambda w, b: hopper.matmul_24(w, b, **options), _sparse(F, D), _dense(D, T)) == [0]


@pytest.mark.parametrize("config", [config for config, _ in DENSE])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_matmul_24_fp8(spilled_bytes, out_dtype, config):
    a, b_t = (jax.tree.map(_in_e4m3, operand) for operand in (_sparse(F, D), _dense(T, D)))
    product = lambda *args: hopper.matmul_24_fp8(*args, out_dtype=out_dtype, config=config)  # noqa: E731
    (spilled,) = spilled_bytes(product, a, b_t, _float32(F, 1))
    # What the largest tile spills lies outside of the loop over k.
    assert spilled <= (64 if config.tile_m * config.tile_n == 256 * 192 else 0)


def _in_e4m3(shape):
    return jax.ShapeDtypeStruct(shape.shape, fp8.E4M3) if shape.dtype == jnp.bfloat16 else shape


def _rows(ordered):
    slots = jax.ShapeDtypeStruct((T,), jnp.int32)
    return RowOrder(slots, slots) if ordered else None


@pytest.mark.parametrize("config", [config for config, _ in VENOM])
@pytest.mark.parametrize("ordered", [False, True])
def test_matmul_venom(spilled_bytes, ordered, config):
    a = _venom(config.tile_m, contiguous=1)
    product = lambda a, b, rows: hopper.matmul_venom(a, b, rows=rows, config=config)  # noqa: E731
    (spilled,) = spilled_bytes(product, a, _dense(F, D), _rows(ordered))
    # What the largest tile spills lies outside of the loop over k: the gather leaves too few registers to consumers.
    assert spilled <= (64 if config.tile_m * config.tile_n == 256 * 192 else 0)


@pytest.mark.parametrize("config", [config for config, _ in CONTIGUOUS])
@pytest.mark.parametrize("ordered", [False, True])
def test_matmul_venom_contiguous(spilled_bytes, ordered, config):
    a = _venom(v=256, contiguous=256)
    product = lambda a, b, rows: hopper.matmul_venom(a, b, rows=rows, config=config)  # noqa: E731
    assert spilled_bytes(product, a, _dense(F, D), _rows(ordered)) == [0]


@pytest.mark.parametrize("config", [config for config, _ in SAMPLED])
def test_sampled_matmul_24(spilled_bytes, config):
    v = 2 * config.tile_n
    product = lambda *args: hopper.sampled_matmul_24(*args, v, contiguous=256, config=config)  # noqa: E731
    assert spilled_bytes(product, _sparse(F, D), _dense(T, D), _columns(v)) == [0]


@pytest.mark.parametrize("config", [config for config, _ in SAMPLED])
def test_sampled_squared_relu_24(spilled_bytes, config):
    v = 2 * config.tile_n
    product = lambda *args: hopper.sampled_squared_relu_24(*args, v, contiguous=256, config=config)  # noqa: E731
    assert spilled_bytes(product, _sparse(F, D), _dense(T, D), _columns(v)) == [0]


@pytest.mark.parametrize("config", SAMPLED_ROWS)
def test_sampled_rows_24(spilled_bytes, config):
    v = config.tokens
    product = lambda *args: sampled_rows_24(*args, v, config=config)  # noqa: E731
    assert spilled_bytes(product, _sparse(F, D), _dense(T, D), _columns(v)) == [0]


@pytest.mark.parametrize("config", [config for config, _ in SCATTERED])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_scattered_matmul_24(spilled_bytes, out_dtype, config):
    options = dict(v=256, rows=F, contiguous=512, out_dtype=out_dtype, config=config)
    product = lambda *args: hopper.scattered_matmul_24(*args, **options)  # noqa: E731
    (spilled,) = spilled_bytes(product, _sparse(KEPT, T), _dense(T, D), _columns(256))
    # What the largest tile spills lies outside of the loop over k: a job's numbers, and sums of other clusters.
    assert spilled <= (64 if config.tile_m * config.tile_n == 256 * 192 else 0)


@pytest.mark.parametrize("tokens, padding", [(T, 0), (T, 252), (T + 128, 0)])
def test_cross_entropy(spilled_bytes, tokens, padding):
    operands = _dense(tokens, D), _dense(F, D), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    cross_entropy = functools.partial(hopper.cross_entropy, classes=F - padding)
    (spilled,) = spilled_bytes(cross_entropy, *operands)
    assert spilled <= (16 if padding else 0)  # where the padding is masked: once a tile, outside of the loop over k


@pytest.mark.skipif(not TRANSPOSING_LOADS, reason="Mosaic loads no transposed tile yet")
@pytest.mark.parametrize("columns", [256, D, 3 * D, F])
def test_fp8_rows(spilled_bytes, columns):
    product = fp8.Unscaled(_dense(T, columns), _dense(T, 1))
    assert spilled_bytes(hopper.fp8_rows, product.values) == [0]
    assert spilled_bytes(hopper.fp8_squared_relu, product) == [0]
    assert spilled_bytes(hopper.fp8_squared_relu_gradients, product, product) == [0]


@pytest.mark.parametrize("dim", [256, 512, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192])
def test_add_norm(report, dim):
    """As many blocks as the kernels count on have registers on a multiprocessor."""
    x, scale, epsilon = _dense(T, dim), _float32(dim), 1e-5
    calls = [
        (lambda x, scale: add_norm.forward(x, None, scale, epsilon), x, scale),
        (lambda x, update, scale: add_norm.forward(x, update, scale, epsilon), x, x, scale),
        (lambda x, scale, of_normed: add_norm.backward(x, scale, of_normed, None, epsilon), x, scale, x),
        (lambda *args: add_norm.backward(*args, epsilon), x, scale, x, x),
    ]
    for call in calls:
        text = report(*call)
        assert re.findall(r"frame, (\d+) bytes spill stores", text) == ["0"]
        (registers,) = re.findall(r"Used (\d+) registers", text)
        of_block = 128 * -(-int(registers) // 8) * 8
        assert add_norm._blocks(2 * dim) * of_block <= 65_536


def _drawn_gradients(dy, y, key):
    return hopper.squared_relu_gradients(dy, y, key=key)


def test_passes_over_24(spilled_bytes):
    h, weights = _dense(T, KEPT), jax.ShapeDtypeStruct((2 * F, D), jnp.float32)
    assert spilled_bytes(hopper.squared_relu_24, h) == [0]
    assert spilled_bytes(hopper.squared_relu_gradients, h, _sparse(T, KEPT)) == [0]
    assert spilled_bytes(_drawn_gradients, h, _sparse(T, KEPT), KEY) == [0]
    scale = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert spilled_bytes(lambda *args: hopper.soft_threshold_24(*args, dtype=jnp.bfloat16), weights, scale) == [0]


def test_passes_over_a_gated_layer(spilled_bytes):
    h, dy = _dense(T, 2 * KEPT), _dense(T, KEPT)
    assert spilled_bytes(hopper.gated_squared_relu_24, h) == [0]
    gradients = lambda *args: hopper.gated_squared_relu_gradients(*args[:3], key=args[3])  # noqa: E731
    assert spilled_bytes(gradients, dy, h, _sparse(T, KEPT), KEY) == [0]


@pytest.mark.parametrize("axis", [-1, 0])
def test_random_draws(spilled_bytes, axis):
    options = dict(scale=1.0, dtype=jnp.bfloat16)
    sparsify = lambda x, key: hopper.sparsify_24(x, "mvue", axis, key=key, **options)  # noqa: E731
    assert spilled_bytes(sparsify, _dense(T, D), KEY) == [0]


def test_tiles(spilled_bytes):
    w, mask = jax.ShapeDtypeStruct((F, D), jnp.float32), jax.ShapeDtypeStruct((F, D), bool)
    sparsify = lambda w, mask: hopper.sparsify_24_tiles(w, mask, dtype=jnp.bfloat16)  # noqa: E731
    assert spilled_bytes(sparsify, w, mask) == [0]


@pytest.mark.parametrize("v, m", [(64, 16), (128, 8), (128, 16), (128, 32), (256, 8), (256, 16), (256, 32)])
def test_passes_over_venom(spilled_bytes, v, m):
    options = dict(v=v, m=m)
    assert spilled_bytes(lambda h: hopper.squared_relu_venom(h, **options), _dense(T, F)) == [0]
    assert spilled_bytes(lambda h: hopper.sparsify_venom(h, **options, dtype=jnp.bfloat16), _dense(T, F)) == [0]
    condensed = _sparse(T, 4 * F // m)
    columns = jax.ShapeDtypeStruct((T // v, 4 * F // m), jnp.int32)
    y = SparseVenom(condensed.values, condensed.metadata, columns, (T, F), v, m)
    assert spilled_bytes(hopper.squared_relu_gradients, _dense(T, 4 * F // m), y) == [0]
    assert spilled_bytes(_drawn_gradients, _dense(T, 4 * F // m), y, KEY) == [0]
