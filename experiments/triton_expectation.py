r"""What the Triton backend's 2:4 product should reach on GPUs it has not run on. An expectation, not a measurement.

    python -m experiments.triton_expectation --measured=experiments/results/triton_h200.json \
        --output=experiments/results/triton_expectation.json

A step of a tile takes the tensor cores and the shared memory a number of cycles each, from data sheets; the longer
is a bound. The share of it that `matmul_24` reached on the measured GPU, at 8192 x 8192 x 8192, is taken over to the
others; the speed-up over a dense product of the same style is the ratio of bounds. Neither the L2 cache nor power is
in it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib

from absl import app, flags

MEASURED = flags.DEFINE_string("measured", None, "JSON file of bench_triton.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

_SIZE = 8192  # M = N = K
_STEP = 64
_SHARED_BYTES_PER_CYCLE = 128


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Streaming multiprocessors, their boost clock in GHz, and 16-bit multiply-adds of one in a cycle, dense."""

    cores: int
    clock: float
    multiply_adds: int


GPUS = {
    "NVIDIA H200": Gpu(132, 1.98, 2048),
    "NVIDIA A100 SXM": Gpu(108, 1.41, 1024),
    "NVIDIA GeForce RTX 4090": Gpu(128, 2.52, 256),  # with float32 sums
}


def cycles(gpu: Gpu, tile: dict[str, int], *, sparse: bool) -> tuple[float, float]:
    """Of a step of a tile: of the tensor cores, of shared memory."""
    a_bytes, b_bytes = (_STEP + 8 if sparse else 2 * _STEP), 2 * _STEP  # of a row with its metadata; of a column
    tensor = tile["tile_m"] * tile["tile_n"] * _STEP / gpu.multiply_adds / (2 if sparse else 1)
    read = tile["warps_n"] * tile["tile_m"] * a_bytes + tile["warps_m"] * tile["tile_n"] * b_bytes
    written = tile["tile_m"] * a_bytes + tile["tile_n"] * b_bytes
    return tensor, (read + written) / _SHARED_BYTES_PER_CYCLE


def bound_tflops(gpu: Gpu, tile: dict[str, int], *, sparse: bool) -> float:
    """Dense-equivalent."""
    flops = 2 * tile["tile_m"] * tile["tile_n"] * _STEP
    return flops / max(cycles(gpu, tile, sparse=sparse)) * gpu.cores * gpu.clock / 1e3


def main(_) -> None:
    measured = json.loads(pathlib.Path(MEASURED.value).read_text())
    (row,) = (row for row in measured["matmul_24"] if row["m"] == row["n"] == row["k"] == _SIZE)
    reached = 2 * _SIZE**3 / row["matmul_24_ms"] / 1e9
    share = reached / bound_tflops(GPUS[measured["device"]], row["tiling"], sparse=True)
    table = []
    for name, gpu in GPUS.items():
        entry = dict(device=name, **dataclasses.asdict(gpu))
        for kernel, tile, sparse in (("dense", row["dense_tiling"], False), ("matmul_24", row["tiling"], True)):
            tensor, shared = cycles(gpu, tile, sparse=sparse)
            bound = bound_tflops(gpu, tile, sparse=sparse)
            entry[kernel] = dict(tensor_cycles=tensor, shared_cycles=shared, bound_tflops=bound)
        entry["expected_tflops"] = share * entry["matmul_24"]["bound_tflops"]
        entry["expected_speedup"] = entry["matmul_24"]["bound_tflops"] / entry["dense"]["bound_tflops"]
        print(entry)
        table.append(entry)
    inputs = dict(measured=MEASURED.value, date=datetime.date.today().isoformat(), size=_SIZE)
    pathlib.Path(OUTPUT.value).write_text(
        json.dumps(dict(kind="expectation", **inputs, share_of_bound=share, gpus=table), indent=1) + "\n"
    )


if __name__ == "__main__":
    app.run(main)
