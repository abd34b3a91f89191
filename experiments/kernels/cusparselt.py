"""Times cuSPARSELt's 2:4 product, through PyTorch, which ours is compared with.

Its algorithm search chooses the kernel for each shape and layout. Run it right after `products` on the
same machine; the two write comparable times.

    python -m experiments.kernels.cusparselt --output=experiments/results/cusparselt_h100.json
"""

from __future__ import annotations

import collections
import datetime
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable

import torch
from absl import app, flags

from experiments.kernels.shapes import SHAPES_24
from experiments.kernels.torch_operands import random_24

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def median_ms(function: Callable[[], object], iterations: int = 15) -> float:
    """Times all kernels that one call launches (CUPTI), the median of each, in ms."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(iterations):
            function()
        torch.cuda.synchronize()
    durations = collections.defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            durations[event.name].append(event.device_time)
    return sum(statistics.median(times) * len(times) / iterations for times in durations.values()) / 1e3


def bench(m: int, n: int, k: int) -> dict:
    """Times [M, K] x [K, N] in milliseconds: of cuBLAS, and of cuSPARSELt by layout of B and of the result."""
    dense = random_24(m, k)
    compressed = torch._cslt_compress(dense)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    b_transposed = b.t().contiguous().t()
    expected = dense @ b
    row = dict(m=m, n=n, k=k, cublas_ms=median_ms(lambda: dense @ b))
    for (b_layout, operand), transpose in itertools.product(
        (("row_major", b), ("column_major", b_transposed)), (False, True)
    ):
        algorithm = torch._cslt_sparse_mm_search(compressed, operand, transpose_result=transpose)

        def product(operand=operand, transpose=transpose, algorithm=algorithm):
            return torch._cslt_sparse_mm(compressed, operand, transpose_result=transpose, alg_id=algorithm)

        result = product()
        error = ((result.t() if transpose else result).float() - expected.float()).norm() / expected.float().norm()
        if not error < 1e-2:
            raise AssertionError(f"cuSPARSELt's result differs from cuBLAS' by {error:.3g}")
        layout = f"b_{b_layout}_result_{'column' if transpose else 'row'}_major"
        row[layout] = dict(ms=median_ms(product), algorithm=algorithm)
    layouts = [value for value in row.values() if isinstance(value, dict)]
    row["best_ms"] = min(layout["ms"] for layout in layouts)
    print(f"{m} x {n} x {k}: cuBLAS {row['cublas_ms']:.4f} ms, cuSPARSELt {row['best_ms']:.4f} ms", flush=True)
    return row


def main(_) -> None:
    torch.manual_seed(0)
    results = dict(
        device=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cusparselt=torch.backends.cusparselt.version(),
        matmul_24=[bench(*shape) for shape in SHAPES_24],
    )
    pathlib.Path(OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
