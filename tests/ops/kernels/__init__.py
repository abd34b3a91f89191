"""Properties that the kernels of every backend must have; most are tested on a GPU."""

import importlib
import importlib.util

import pytest
from jaxlib import gpu_triton

from sparse_lm.ops import hopper, triton

BACKENDS = {"hopper": hopper} | ({"triton": triton} if importlib.util.find_spec("triton") else {})
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
_LOWERS = {"hopper": True, "triton": hasattr(gpu_triton, "TritonKernel")}
each_backend_that_lowers = pytest.mark.parametrize(
    "backend", [b for n, b in BACKENDS.items() if _LOWERS[n]], ids=[n for n in BACKENDS if _LOWERS[n]]
)  # Triton's needs a GPU build of JAX


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
