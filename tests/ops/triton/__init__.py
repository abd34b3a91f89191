"""Skipped as a whole where the backend cannot be imported."""

import pytest
from jaxlib import gpu_triton

pytest.importorskip("triton", reason="needs Triton")
if not hasattr(gpu_triton, "TritonKernel"):
    pytest.skip("needs a GPU build of JAX", allow_module_level=True)
