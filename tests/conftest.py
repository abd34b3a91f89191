"""Tests run on one CPU device unless a GPU is there; those marked `gpu` are skipped without one."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
