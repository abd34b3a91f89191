"""Skipped as a whole where the backend cannot be imported."""

import pytest

pytest.importorskip("jax_triton", reason="needs Triton and a GPU build of JAX", exc_type=ImportError)
