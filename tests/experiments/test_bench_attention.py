"""The attention benchmark at a size for CPUs: what it computes, and what it notes of kernels that refuse a shape."""

import functools

import jax
import numpy as np
import pytest


@pytest.fixture
def bench(script, monkeypatch):
    module = script("experiments.bench.attention")
    monkeypatch.setattr(module, "time_by_kernel", lambda compiled, *args: (2.0, {"kernel": 2.0}))
    return module


def test_an_implementation_is_measured_and_one_that_refuses_is_named(bench):
    def refuse(q, k, v):
        raise NotImplementedError("not this shape")

    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    shape = bench.Shape(b=2, s=64, n=4, k=2, h=32)
    chosen = dict(plain=bench.Implementation(plain), other=bench.Implementation(refuse))
    plain_row, other_row = bench.bench(chosen, shape)
    assert plain_row["same_bits"]
    errors = [of["norm"] for of in plain_row["errors"].values()]
    assert len(errors) == 4 and all(1e-4 < e < 1e-2 for e in errors)  # of bfloat16
    products = 2 * (2 * 2 * 4 * 64**2 * 32)  # q k^T and p v, multiplications and additions
    np.testing.assert_allclose(plain_row["forward_tflops"], products / 2 / 2e-3 / 1e12)
    np.testing.assert_allclose(plain_row["both_tflops"], 3.5 * products / 2 / 2e-3 / 1e12)
    assert other_row["refused"] == "NotImplementedError: not this shape"
    assert "left out: NotImplementedError" in bench.line(other_row) and "TFLOP/s" in bench.line(plain_row)
