"""Kernels lower for Hopper on a machine without a GPU: shapes, tiles and shared memory fit; and spill no registers.

What ptxas says of registers needs the CUDA plugin and ptxas, too.
"""

import functools
import importlib.util
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from sparse_lm.ops import fp8, hopper, reference
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.hopper.frame.compat import TRANSPOSES
from sparse_lm.ops.hopper.passes import add_norm
from sparse_lm.ops.hopper.products import sampled_rows_24
from sparse_lm.ops.row_order import RowOrder
from tests.ops.hopper import sanitize
from tests.ops.hopper.sanitize import named
from tests.ops.kernels import candidates

T, F, D, KEPT = 8192, 8192, 2048, 2048
_tilings = functools.partial(candidates, "hopper")

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin, to compile for a GPU"
)


def _lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


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


def _shapes_of(dtype):
    return lambda *shape: jax.ShapeDtypeStruct(shape, dtype)


_dense, _float32, _ids = map(_shapes_of, (jnp.bfloat16, jnp.float32, jnp.int32))


def _sparse(m, k):
    return Sparse24(_dense(m, k // 2), _ids(m // 64, k // 64, 128), (m, k))


def _venom(v, m=4 * F // KEPT, contiguous=1):
    condensed = _sparse(T, 4 * F // m)
    return SparseVenom(condensed.values, condensed.metadata, _ids(T // v, 4 * F // m), (T, F), v, m, contiguous)


def _in_e4m3(shape):
    return jax.ShapeDtypeStruct(shape.shape, fp8.E4M3) if shape.dtype == jnp.bfloat16 else shape


def _products():
    """Name and tiling, call, operands, and the bytes that may be spilled, outside of the loop over k."""

    def most(config):
        return 64 if config.tile_m * config.tile_n == 256 * 192 else 0

    for config in _tilings("matmul_24"):
        for turned in (False, True):
            call = named(hopper.matmul_24, out_transposed=turned, config=config)
            yield f"matmul_24 {config}", call, (_sparse(F, D), _dense(D, T)), 0
        operands = *jax.tree.map(_in_e4m3, (_sparse(F, D), _dense(T, D))), _float32(F, 1)
        for dtype, scales in itertools.product((jnp.bfloat16, "float32"), ((), (_float32(1, T),))):
            call = named(hopper.matmul_24_fp8, out_dtype=dtype, config=config)
            yield f"matmul_24_fp8 {config}", call, (*operands, *scales), most(config)
    for rows in (None, RowOrder(_ids(T), _ids(T))):
        for config in _tilings("matmul_venom"):  # whose gather leaves too few registers to consumers
            call = named(hopper.matmul_venom, "rows", config=config)
            yield f"matmul_venom {config}", call, (_venom(config.tile_m), _dense(F, D), rows), most(config)
        for config in _tilings("matmul_venom", "CONTIGUOUS"):
            call = named(hopper.matmul_venom, "rows", config=config)
            yield f"matmul_venom contiguous {config}", call, (_venom(256, contiguous=256), _dense(F, D), rows), 0
    for config in _tilings("sampled_matmul_24"):
        v = 2 * config.tile_n
        operands, options = (_sparse(F, D), _dense(T, D), _ids(T // v, KEPT)), dict(v=v, contiguous=256, config=config)
        for squared in (False, True):
            call = named(hopper.sampled_matmul_24, **options, squared_relu=squared)
            yield f"sampled_matmul_24 {config}", call, operands, 0
    for v in sampled_rows_24.CANDIDATES:
        operands = _sparse(F, D), _dense(T, D), _ids(T // v, KEPT)
        yield f"sampled_rows_24 {v}", named(sampled_rows_24.sampled_rows_24, v=v), operands, 0
    for config in _tilings("scattered_matmul_24"):  # a job's numbers, and sums of other clusters
        for dtype in (jnp.bfloat16, jnp.float32):
            options = dict(v=256, rows=F, contiguous=512, out_dtype=dtype, config=config)
            call, operands = named(hopper.scattered_matmul_24, **options), (_sparse(KEPT, T), _dense(T, D))
            yield f"scattered_matmul_24 {config}", call, (*operands, _ids(T // 256, KEPT)), most(config)
    for tokens, padding in ((T, 0), (T, 252), (T + 128, 0)):  # padding is masked once a tile
        call = named(hopper.cross_entropy, classes=F - padding)
        yield f"cross_entropy {tokens}", call, (_dense(tokens, D), _dense(F, D), _ids(tokens)), 16 if padding else 0


def _passes():
    key, bf16 = jax.eval_shape(lambda: jax.random.key(0)), dict(dtype=jnp.bfloat16)
    for columns in (256, D, 3 * D, F, 18_432) if TRANSPOSES else ():  # else Mosaic loads no transposed tile
        product = fp8.Unscaled(_dense(T, columns), _dense(T, 1))
        yield "fp8_rows", hopper.fp8_rows, (product.values,), 0
        yield "fp8_squared_relu", hopper.fp8_squared_relu, (product,), 0
        yield "fp8_squared_relu_gradients", hopper.fp8_squared_relu_gradients, (product, product), 0
    h, y, gradients = _dense(T, KEPT), _sparse(T, KEPT), hopper.squared_relu_gradients
    yield "squared_relu_24", hopper.squared_relu_24, (h,), 0
    yield "squared_relu_24 of unscaled rows", named(hopper.squared_relu_24, "factor"), (h, _dense(T, 1)), 0
    yield "squared_relu_gradients", gradients, (h, y), 0
    yield "squared_relu_gradients of unscaled rows", named(gradients, "factor"), (h, y, _dense(T, 1)), 0
    yield "squared_relu_gradients drawn", named(gradients, "key"), (h, y, key), 0
    both = _dense(T, 2 * KEPT)
    yield "gated_squared_relu_24", hopper.gated_squared_relu_24, (both,), 0
    yield "gated_squared_relu_gradients", named(hopper.gated_squared_relu_gradients, "key"), (h, both, y, key), 0
    for activation in ("squared_relu", "swiglu", "geglu", "gated_relu2"):
        call = named(hopper.hidden_gradients, "key", activation=activation)
        yield f"hidden_gradients {activation}", call, (h, h if activation == "squared_relu" else both, key), 0
    for axis, layers in ((-1, 2), (0, 1)):
        call = named(hopper.soft_threshold_24, axis=axis, **bf16)
        yield f"soft_threshold_24 {axis}", call, (_float32(layers * F, D), _float32(layers)), 0
    for axis in (-1, 0):
        call = named(hopper.sparsify_24, "key", method="mvue", axis=axis, **bf16)
        yield "sparsify_24 mvue", call, (_dense(T, D), key), 0
    mask = jax.ShapeDtypeStruct((F, D), bool)
    yield "sparsify_24_tiles", named(hopper.sparsify_24_tiles, **bf16), (_float32(F, D), mask), 0
    for v, m in ((64, 16), (128, 8), (128, 16), (128, 32), (256, 8), (256, 16), (256, 32)):
        h, dy, y = _dense(T, F), _dense(T, 4 * F // m), _venom(v, m)
        yield f"squared_relu_venom {v}:2:{m}", named(hopper.squared_relu_venom, v=v, m=m), (h,), 0
        yield f"squared_relu_gradients {v}:2:{m}", gradients, (dy, y), 0
        yield f"squared_relu_gradients {v}:2:{m} drawn", named(gradients, "key"), (dy, y, key), 0


PRODUCTS = list(_products())
CASES = [*PRODUCTS, *_passes()]
PASSES_OF_REFERENCE = "sparsify_24", "soft_threshold_24", "squared_relu", "gated", "hidden"


def test_no_kernel_is_left_out():
    assert {name.split(" ")[0].rstrip(",") for name in sanitize.CALLS} == set(hopper.__all__)


@pytest.mark.parametrize("name", sanitize.CALLS)
def test_every_kernel_lowers_at_ragged_shapes(name, monkeypatch):
    """Passes return the shapes and dtypes that the reference returns."""
    if name.startswith("fp8") and not TRANSPOSES:
        pytest.skip("needs a newer JAX")
    kernel, operands = sanitize.CALLS[name]()
    lowered = _lower(kernel, *operands)
    assert "mosaic_gpu" in lowered.as_text()
    if name.startswith(PASSES_OF_REFERENCE):
        monkeypatch.setattr(sanitize, "hopper", reference)
        expected, _ = sanitize.CALLS[name]()
        assert jax.tree.leaves(lowered.out_info) == jax.tree.leaves(jax.eval_shape(expected, *operands))


@pytest.mark.parametrize("case", {case[0]: case for case in PRODUCTS}.values(), ids=lambda case: case[0])
def test_products_lower_with_every_tiling(case):
    _, call, operands, _ = case
    assert "mosaic_gpu" in _lower(call, *operands).as_text()


@needs_plugin
@pytest.mark.parametrize("call, operands, allowed", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_spilled_bytes(report, call, operands, allowed):
    (spilled,) = re.findall(r"frame, (\d+) bytes spill stores", report(call, *operands))
    assert int(spilled) <= allowed


@needs_plugin
@pytest.mark.parametrize("dim", [256, 512, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192])
def test_registers_of_add_norm(report, dim):
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


def test_a_stack_of_products_is_one_after_the_other():
    """Semaphores, by which clusters signal one another, belong to one product."""
    product, operands = sanitize.CALLS["scattered_matmul_24, contiguous 128"]()
    one = jax.eval_shape(product, *operands)
    stacks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), operands)
    lowered = _lower(jax.vmap(product), *stacks)
    assert lowered.out_info.shape == (3, *one.shape)
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.while" in text
