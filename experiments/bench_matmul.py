"""Sparse products on Hopper against cuBLAS (XLA's dense product of the same shape), in one process.

python -m experiments.bench_matmul --output=experiments/results/matmul_h100.json
"""

from __future__ import annotations

import statistics

import jax.numpy as jnp
from absl import app, flags

from experiments.kernel_shapes import SHAPES_24, SHAPES_VENOM, VENOM_GROUPS, V
from experiments.kernel_timing import median_ms, random_24, random_matrix, random_venom, write_results
from sparse_lm.ops import hopper

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def bench_24() -> list[dict]:
    table = []
    for m, n, k in SHAPES_24:
        w, b, dense = random_24(m, k, seed=0), random_matrix(k, n, seed=1), random_matrix(m, k, seed=2)
        b_transposed = jnp.array(b.T)
        cublas = median_ms(jnp.matmul, dense, b)
        ours = median_ms(hopper.matmul_24, w, b)
        turned = median_ms(lambda w, b: hopper.matmul_24(w, b, b_transposed=True, out_transposed=True), w, b_transposed)
        row = dict(m=m, n=n, k=k, cublas_ms=cublas, matmul_24_ms=ours, matmul_24_transposed_ms=turned)
        row["speedup"], row["speedup_transposed"] = cublas / ours, cublas / turned
        print(f"2:4 {m} x {n} x {k}: cuBLAS {cublas:.4f} ms, ours {ours:.4f} ms, x{row['speedup']:.3f}", flush=True)
        table.append(row)
    print(f"geometric mean x{statistics.geometric_mean(row['speedup'] for row in table):.3f}", flush=True)
    return table


def bench_venom() -> list[dict]:
    table = []
    for t, f, d in SHAPES_VENOM:
        b = random_matrix(f, d, seed=1)
        cublas = median_ms(jnp.matmul, random_matrix(t, f, seed=2), b)
        for m in VENOM_GROUPS:
            ours = median_ms(hopper.matmul_venom, random_venom(t, f, V, m, seed=0), b)
            row = dict(t=t, f=f, d=d, v=V, m=m, cublas_ms=cublas, matmul_venom_ms=ours, speedup=cublas / ours)
            print(
                f"{V}:2:{m} T={t} F={f} D={d}: cuBLAS {cublas:.4f} ms, ours {ours:.4f} ms, x{cublas / ours:.2f}",
                flush=True,
            )
            table.append(row)
    return table


def main(_) -> None:
    write_results(OUTPUT.value, dict(matmul_24=bench_24(), matmul_venom=bench_venom()))


if __name__ == "__main__":
    app.run(main)
