"""Skipped as a whole where Triton cannot be imported."""

import pytest
from jaxlib import gpu_triton

pytest.importorskip("triton", reason="needs Triton")
needs_gpu_build = pytest.mark.skipif(not hasattr(gpu_triton, "TritonKernel"), reason="needs a GPU build of JAX")
