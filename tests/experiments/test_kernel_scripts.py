"""Kernel benchmarks call kernels as these want to be called: every call is traced, at sizes for CPUs."""

import jax
import numpy as np
import pytest

from experiments.kernels import operands, passes, products
from sparse_lm.ops import hopper
from sparse_lm.ops.hopper.frame.compat import TRANSPOSES

SMALL = dict(
    SHAPES_24=[(512, 512, 256)],
    SHAPES_FP8=[(512, 256, 512)],
    SHAPES_VENOM=[(512, 1024, 256)],
    VENOM_GROUPS=(8, 16),
    VENOM_BLOCKS=(128,),
    SLICES=[operands.Sliced(1024, 256, 1024, experts=4, v=256)],
    HIDDEN=[(512, 512)],
    E4M3=[(512, 512)],
    NORMS=[(512, 512)],
    VENOM=[(512, 1024, 128, 16)],
    STACKED_LAYERS=[(2, 512, 256)],
)
RANDOM = ("random_matrix", "random_24", "random_venom", "slice_ids")


def zeros(draw):
    """Operands of zeros in place of random ones."""
    return lambda *args, **options: jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: draw(*args, **options))
    )


@pytest.fixture
def timed(monkeypatch):
    """Gives a list of the functions that scripts time: they are traced for a GPU instead, with small operands."""
    found = []

    def trace(function, *args, iterations=0, compiler_options=None):
        jax.jit(function).trace(*args)
        found.append(function)
        return 1.0

    for module in (passes, products):
        for key in vars(module).keys() & SMALL.keys():
            monkeypatch.setattr(module, key, SMALL[key])
        for key in vars(module).keys() & set(RANDOM):
            monkeypatch.setattr(module, key, zeros(getattr(module, key)))
        monkeypatch.setattr(module, "median_ms", trace)
    return found


@pytest.mark.parametrize("table", ["matmul_24", "matmul_24_fp8", "matmul_venom", "slices"])
def test_products(timed, table):
    rows = list(products.TABLES[table](hopper))
    assert 0 < len(rows) <= len(timed)


def test_a_table_without_kernels_and_a_backend_without_a_gpu_are_refused():
    for table in ("matmul_24_fp8", "masked", "venom", "norms", "e4m3"):
        with pytest.raises(SystemExit, match=f"--tables: {table} must be left out with --backend=triton"):
            operands.backend("triton", ["slices", table])
    with pytest.raises(SystemExit, match="--backend=hopper: needs an NVIDIA GPU"):
        operands.backend("hopper", list(products.TABLES | passes.TABLES))


def test_the_loss_is_traced(timed):
    assert next(products.loss(hopper, tokens=512, dim=256))["bound_ms"] > 0 and len(timed) == 1


@pytest.mark.long
def test_passes(timed):
    cases = [case for name, table in passes.TABLES.items() if name != "e4m3" or TRANSPOSES for case in table()]
    for one in cases:
        assert passes.measure(one, hopper, bandwidth=1e12)["bytes"] > 0
    assert len(timed) == 2 * len(cases) > 30


def test_what_a_kernel_need_not_write_is_not_counted(timed):
    (backward,) = (one for one in passes.norms() if one.op == "norm backward")
    array, scale = 512 * 512 * 2, 512 * 4
    # Three arrays are read and one is written; XLA's program also writes the norm.
    assert backward.moved(hopper) == 4 * array + 2 * scale
    assert backward.moved(passes.reference) == 5 * array + 2 * scale
