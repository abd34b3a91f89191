"""Tests run on a CPU unless a GPU is there; those marked `gpu` are skipped without one."""

import os

# Most of the suite's time is XLA compiling small functions that run once.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)  # fmt: skip

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
