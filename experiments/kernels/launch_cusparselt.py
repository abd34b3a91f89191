"""Launches cuSPARSELt's 2:4 product through PyTorch, the algorithm that its search chooses, for `counters`.

B and the result are row-major, for which `cusparselt` found the fastest kernels at these shapes.
"""

from __future__ import annotations

import json
import pathlib

import torch
from absl import app, flags

from experiments.kernels.nsight_compute import profiled
from experiments.kernels.shapes import SHAPES_24
from experiments.kernels.torch_operands import random_24

LAUNCHED = flags.DEFINE_string("launched", None, "JSON file to write: what is launched, in order.", required=True)

LAUNCHES = 3  # of each product


def main(_) -> None:
    torch.manual_seed(0)
    versions = dict(torch=torch.__version__, cusparselt=torch.backends.cusparselt.version())
    launched = []
    for m, n, k in SHAPES_24[:2]:
        compressed = torch._cslt_compress(random_24(m, k))
        b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        algorithm = torch._cslt_sparse_mm_search(compressed, b)
        torch.cuda.synchronize()
        with profiled():
            for _ in range(LAUNCHES):
                torch._cslt_sparse_mm(compressed, b, alg_id=algorithm)
            torch.cuda.synchronize()
        label = dict(product="cuSPARSELt", m=m, n=n, k=k, algorithm=algorithm, **versions)
        launched += [label] * LAUNCHES
        print(label, flush=True)
    pathlib.Path(LAUNCHED.value).write_text(json.dumps(launched))


if __name__ == "__main__":
    app.run(main)
