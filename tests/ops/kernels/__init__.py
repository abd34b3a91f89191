"""Properties that the kernels of every backend must have; most are tested on a GPU."""

import importlib
import importlib.util

import pytest

from sparse_lm.ops import hopper, triton

BACKENDS = {"hopper": hopper} | ({"triton": triton} if importlib.util.find_spec("triton") else {})
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def tilings(product, **more):
    """Lists, by backend, the candidates for a product, and more that are given."""
    found = {}
    for name in BACKENDS:
        candidates = importlib.import_module(f"sparse_lm.ops.{name}.products.{product}").CANDIDATES
        configs = [candidate[0] if isinstance(candidate, tuple) else candidate for candidate in candidates]
        found[name] = configs + more.get(name, [])
    return found


def each_tiling(product, **more):
    """Parametrizes a test by backend and tiling; arguments as in `tilings`."""
    cases = [(name, config) for name, configs in tilings(product, **more).items() for config in configs]
    return pytest.mark.parametrize(
        "backend, config", [(BACKENDS[name], config) for name, config in cases], ids=[f"{n}-{c}" for n, c in cases]
    )
