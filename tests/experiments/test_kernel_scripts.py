"""Kernel benchmarks call kernels as these want to be called: every call is traced, at sizes for CPUs."""

import jax
import numpy as np
import pytest

from experiments.kernels import shapes
from sparse_lm.ops.hopper.frame.compat import TRANSPOSING_LOADS

SMALL = dict(
    SHAPES_24=[(512, 512, 256)],
    SHAPES_FP8=[(512, 256, 512)],
    SHAPES_VENOM=[(512, 1024, 256)],
    VENOM_GROUPS=(8, 16),
    VENOM_BLOCKS=(128,),
    SLICES=[shapes.Sliced(1024, 256, 1024, experts=4, v=256)],
    MATRICES=[(512, 256, "float32"), (512, 512, "bfloat16")],
    HIDDEN=[(512, 512)],
    E4M3=[(512, 512)],
    VENOM=[(512, 1024, 128, 16)],
    STACKED_LAYERS=[(2, 512, 256)],
    UNTUNED_FFN_SHAPES=[(512, 1024, 256)],
    _LARGEST=1024,
)


RANDOM = ("random_matrix", "random_24", "random_venom", "random_columns", "slice_ids")


@pytest.fixture
def small(script, monkeypatch):
    """Imports a script with small shapes and operands of zeros."""

    def zeros(draw):
        return lambda *args, **options: jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: draw(*args, **options))
        )

    def load(name):
        module = script(name)
        for key in SMALL.keys() & vars(module).keys():
            monkeypatch.setattr(module, key, SMALL[key])
        for key in set(RANDOM) & vars(module).keys():
            monkeypatch.setattr(module, key, zeros(getattr(module, key)))
        return module

    return load


@pytest.fixture
def traced(small, monkeypatch):
    """Imports a script; what it times is traced for a GPU instead, and counted."""
    count = [0]

    def trace(function, *args, iterations=0, compiler_options=None):
        jax.jit(function).trace(*args)
        count[0] += 1
        return 1.0

    def load(name):
        module = small(name)
        monkeypatch.setattr(module, "median_ms", trace)
        return module, count

    return load


def test_products(traced):
    module, count = traced("experiments.kernels.products")
    for bench in module.TABLES.values():
        assert bench()
    assert count[0] == 3 + 2 * 7 + 2 + 2 * 2


def test_slices(traced):
    module, count = traced("experiments.kernels.slices")
    (shape,) = module.SLICES
    assert set(module.ungrouped_ms(shape)) == set(module.sliced_ms(shape)) == {"sampled", "venom", "scattered"}
    assert set(module.squared_relu_ms(shape)) == {"product_ms", "two_kernels_ms", "fused_ms"}
    assert count[0] == 9


@pytest.mark.long
def test_passes(traced):
    module, count = traced("experiments.kernels.passes")
    cases = [*module.sparsifiers(), *module.passes(), *(module.e4m3() if TRANSPOSING_LOADS else [])]
    for one in cases:
        assert module.measure(one, bandwidth=1e12)["bytes"] > 0
    assert count[0] == 2 * len(cases) > 20


def test_launched_products(small):
    module = small("experiments.kernels.launch_products")
    for products in module.KINDS.values():
        for label, function, operands in products():
            assert label["product"]
            jax.jit(function).trace(*operands)


def test_tuning(traced):
    module, count = traced("experiments.kernels.tune")
    (shape,) = module.UNTUNED_FFN_SHAPES
    for case in module.ffn_cases(*shape):
        assert case.heuristic in case.times()
    assert count[0] >= 7
