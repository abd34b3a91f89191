"""Properties that the kernels of every backend must have; most are tested on a GPU."""

import importlib.util

import pytest

from sparse_lm.ops import hopper, triton

BACKENDS = {"hopper": hopper} | ({"triton": triton} if importlib.util.find_spec("triton") else {})
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
