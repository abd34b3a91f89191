"""Properties that the kernels of every backend must have; most are tested on a GPU."""

import importlib
import importlib.util

import pytest

from sparse_lm.ops import hopper, triton

BACKENDS = {"hopper": hopper} | ({"triton": triton} if importlib.util.find_spec("triton") else {})
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def candidates(backend, product, name="CANDIDATES"):
    """The tilings that a product chooses from: those of its module, or under its name in the module of all products."""
    products = importlib.import_module(f"sparse_lm.ops.{backend}.products")
    if hasattr(products, name):
        return getattr(products, name)[product]
    return getattr(importlib.import_module(f"{products.__name__}.{product}"), name)
