"""Kernels compile for every compute capability that this backend takes, to the instructions they are about.

An A100 and an RTX 50 are compiled for by default, the other GPUs by `-mslow`.
"""

import functools
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from sparse_lm.ops import triton
from sparse_lm.ops.formats import Sparse24, SparseVenom
from sparse_lm.ops.triton.frame import device
from sparse_lm.ops.triton.frame.gluon_call import compile_gluon
from sparse_lm.ops.triton.frame.product import Product, multiply_kernel
from sparse_lm.ops.triton.frame.tiles import WARPS
from sparse_lm.ops.triton.frame.tiling import Tiling, largest_that_occupies
from sparse_lm.ops.triton.passes import sparsify_24
from sparse_lm.ops.triton.passes import squared_relu_gradients as gradients
from sparse_lm.ops.triton.products import CANDIDATES
from tests.ops.operands import random, random_24, random_venom
from tests.ops.triton import needs_gpu_build

T, F, D = 8192, 8192, 2048
BY_DEFAULT = (80, 120)
CAPABILITIES = [pytest.param(c, marks=() if c in BY_DEFAULT else pytest.mark.slow) for c in sorted(device.SHARED_KIB)]
_NOT_DISASSEMBLED = (103, 121)  # nvdisasm of Triton's wheel does not know them, its ptxas does


def _spilled_bytes(compiled, tmp_path, capability):
    """Assembles `kernel.cubin`."""
    (tmp_path / "kernel.ptx").write_text(compiled.ptx)
    suffix = "a" if capability >= 90 else ""
    ptxas, gpu = get_ptxas(capability).path, f"--gpu-name=sm_{capability}{suffix}"
    command = [ptxas, "-v", gpu, "kernel.ptx", "-o", "kernel.cubin"]
    report = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    return int(spilled)


def _matmul_24(config, capability):
    product = Product("matmul_24", F, T, D, F, D // 64, T, config, out_transposed=capability != 80)
    types = "*bf16", "*i32", None, "*bf16", *[None] * 3, "*fp32" if capability == 90 else "*bf16"
    return multiply_kernel, types, dict(product=product)


def _matmul_venom(config, _):
    product = Product("matmul_venom", T, D, F, T, F // 4 // 64, D, config, lists="b", v=256)
    return multiply_kernel, ("*fp16", "*i32", "*i32", "*fp16", *[None] * 3, "*fp16"), dict(product=product)


def _sampled_matmul_24(config, _):
    options = dict(b_transposed=True, out_transposed=True, lists="a", v=128)
    product = Product("sampled_matmul_24", F // 4, T, D, F, D // 64, D, config, **options)
    return multiply_kernel, ("*bf16", "*i32", "*i32", "*bf16", *[None] * 3, "*bf16"), dict(product=product)


def _scattered_matmul_24(config, _):
    """Makes the call of four slices, with blocks of 256 tokens."""
    options = dict(lists="out", v=256, contiguous=F // 4, places=T // 256 + 1)
    product = Product("scattered_matmul_24", F, D, T, F // 4, T // 64, D, config, **options)
    return multiply_kernel, ("*bf16", "*i32", None, "*bf16", *["*i32"] * 3, "*fp32"), dict(product=product)


DENSE = CANDIDATES["matmul_24"]


def _cases():
    """The largest tiling that fits for each GPU, and every other one for an A100."""
    for product in (_matmul_24, _matmul_venom, _sampled_matmul_24, _scattered_matmul_24):
        candidates = CANDIDATES[product.__name__.removeprefix("_")]
        for tiling in candidates[1:]:
            yield pytest.param(product, 80, tiling, marks=pytest.mark.slow)
        for gpu in CAPABILITIES:
            (capability,) = gpu.values
            fitting = (t for t in candidates if t.shared_bytes <= device.shared_bytes(capability))
            yield pytest.param(product, capability, next(fitting), marks=gpu.marks)


@pytest.mark.parametrize("product, capability, config", list(_cases()))
def test_products(product, capability, config, tmp_path):
    """Within the shared memory of a thread block, to native sparse instructions, and without spilling registers."""
    kernel, types, constants = product(config, capability)
    compiled = compile_gluon(kernel, types, config.warps, capability, **constants)
    assert compiled.shared_bytes <= device.shared_bytes(capability)
    assert "mma.sp::ordered_metadata.sync.aligned.m16n8k32" in compiled.ptx
    assert "cp.async.cg.shared.global" in compiled.ptx and "ldmatrix" in compiled.ptx
    assert _spilled_bytes(compiled, tmp_path, capability) == 0
    if capability not in _NOT_DISASSEMBLED:
        command = [knobs.nvidia.nvdisasm.path, "kernel.cubin"]
        code = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        products = re.findall(r"\b\w*MMA\.[\w.]+", code)
        assert products and all(name.startswith("HMMA.SP.16832.F32") for name in products)


def _sparsify(x, scale, key, method, *, transposed=False, **shape):
    constants = dict(METHOD=method, TRANSPOSED=transposed) | shape
    dense = () if key else ("*bf16",)
    return sparsify_24.sparsify_24_kernel, (x, scale, key, "*bf16", "*i32", *dense), constants


def _gradients(dtype):
    constants = dict(ROWS=T, COLUMNS=F)
    types = dtype, dtype, "*i32", "*i32", dtype, *(dtype, "*i32") * 2, "*fp32"
    return gradients.squared_relu_gradients_kernel, types, constants


OF_ACTIVATIONS = dict(ROWS=T, COLUMNS=F, dense=None, SCALED_TILES=None)
PASSES = {
    "sparsify_24 mvue of float32": _sparsify("*fp32", None, "*i32", "mvue", **OF_ACTIVATIONS),
    "sparsify_24 mvue along columns": _sparsify("*bf16", None, "*i32", "mvue", transposed=True, **OF_ACTIVATIONS),
    "soft_threshold_24": _sparsify("*fp32", "*fp32", None, "soft_threshold", ROWS=F, COLUMNS=D, SCALED_TILES=F // 64),
    "soft_threshold_24 along columns": _sparsify(
        "*fp32", "*fp32", None, "soft_threshold", transposed=True, ROWS=F, COLUMNS=D, SCALED_TILES=None
    ),
    "squared_relu_24": (
        sparsify_24.squared_relu_24_kernel,
        ("*bf16", "*bf16", "*i32", "*fp32"),
        dict(ROWS=T, COLUMNS=F),
    ),
    "squared_relu_gradients": _gradients("*fp16"),
}


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", PASSES)
def test_passes_leave_room_for_several_thread_blocks(name, capability, tmp_path):
    """Three others have room in shared memory, and no register is spilled."""
    kernel, types, constants = PASSES[name]
    compiled = compile_gluon(kernel, types, WARPS, capability, **constants)
    assert compiled.shared_bytes <= device.shared_bytes(capability) // 4
    assert _spilled_bytes(compiled, tmp_path, capability) == 0


@needs_gpu_build
def test_lowers_without_a_gpu():
    metadata = jax.ShapeDtypeStruct((5, 7, 128), jnp.int32)
    w = Sparse24(jax.ShapeDtypeStruct((320, 224), jnp.bfloat16), metadata, (300, 392))
    columns = jax.ShapeDtypeStruct((5, 448), jnp.int32)
    a = SparseVenom(w.values, w.metadata, columns, (300, 1568), 64, 16)
    b, of_venom, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((392, 500), (1568, 500), (320, 392)))
    scattered = functools.partial(triton.scattered_matmul_24, v=64, rows=640, contiguous=64)
    for product, operands, shape in (
        (triton.matmul_24, (w, b), (300, 500)),
        (triton.matmul_venom, (a, of_venom), (300, 500)),
        (functools.partial(triton.sampled_matmul_24, v=64), (w, x, columns), (320, 448)),
        (scattered, (w, b, jax.ShapeDtypeStruct((7, 320), jnp.int32)), (640, 500)),
    ):
        lowered = jax.jit(product).trace(*operands).lower(lowering_platforms=("cuda",))
        assert lowered.out_info.shape == shape and "triton_kernel_call" in lowered.as_text()


def test_the_largest_tile_that_occupies_the_gpu(monkeypatch):
    large, medium, small = DENSE[0], DENSE[1], DENSE[-1]
    monkeypatch.setattr(device, "core_count", lambda: 108)
    for capability, largest in ((80, large), (89, medium)):
        monkeypatch.setattr(device, "compute_capability", lambda capability=capability: capability)
        assert largest_that_occupies(DENSE, 8192, 8192) == largest
        assert largest_that_occupies(DENSE, 64, 64) == small
    monkeypatch.setattr(device, "shared_bytes", lambda _: 1000)
    with pytest.raises(NotImplementedError, match=r"needs \d+ bytes of shared memory .*, which has 1000"):
        largest_that_occupies(DENSE, 64, 64)


def test_tilings_that_do_not_fit_are_refused():
    config = Tiling(256, 128, warps_m=4, warps_n=2, stages=7)
    w, b = random_24(64, 64, jnp.bfloat16, seed=0), random((64, 64), jnp.bfloat16, seed=1)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        triton.matmul_24(w, b, config=config)


def test_gradients_of_venom_matrices_are_left_to_the_reference():
    dy, y = random((64, 64), jnp.bfloat16, seed=0), random_venom(64, 128, 64, 8, jnp.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="takes a 2:4 y, no Venom one"):
        triton.squared_relu_gradients(dy, y)
    assert "squared_relu_venom" not in triton.__all__
