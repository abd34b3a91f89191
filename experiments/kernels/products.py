"""Times sparse products on Hopper against cuBLAS (XLA's dense product of the same shape), in one process.

python -m experiments.kernels.products --output=experiments/results/matmul_h100.json
"""

from __future__ import annotations

import functools
import itertools
import statistics

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.kernels.shapes import SHAPES_24, SHAPES_FP8, SHAPES_VENOM, VENOM_BLOCKS, VENOM_GROUPS
from experiments.kernels.timing import median_ms, random_24, random_matrix, random_venom
from experiments.result_files import write_results
from sparse_lm.ops import fp8, hopper
from sparse_lm.ops.hopper.products.matmul_24 import CANDIDATES

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
ONLY = flags.DEFINE_list("tables", [], "Names of tables; all by default.")


def bench_24() -> list[dict]:
    """Times 2:4 products against dense ones of the same shape; with the result as it comes, and transposed."""
    table = []
    for m, n, k in SHAPES_24:
        w, b, dense = random_24(m, k, seed=0), random_matrix(k, n, seed=1), random_matrix(m, k, seed=2)
        cublas = median_ms(jnp.matmul, dense, b)
        ours = median_ms(hopper.matmul_24, w, b)
        turned = median_ms(functools.partial(hopper.matmul_24, out_transposed=True), w, b)
        row = dict(m=m, n=n, k=k, cublas_ms=cublas, matmul_24_ms=ours, matmul_24_transposed_ms=turned)
        row["speedup"], row["speedup_transposed"] = cublas / ours, cublas / turned
        print(f"2:4 {m} x {n} x {k}: cuBLAS {cublas:.4f} ms, ours {ours:.4f} ms, x{row['speedup']:.3f}", flush=True)
        table.append(row)
    print(f"geometric mean x{statistics.geometric_mean(row['speedup'] for row in table):.3f}", flush=True)
    return table


def bench_fp8() -> list[dict]:
    """Times products with activations [T, F] (O = Y W2) and with weights (H = X W1^T), dense and 2:4, bf16 and FP8.

    FP8's operands are given in e4m3; "to_e4m3" is what it takes to bring the 2:4, and the dense, operand of the first
    kind to it.
    """
    table = []
    for t, d, f in SHAPES_FP8:
        for m, n, k in ((t, d, f), (f, t, d)):
            w, dense, b_t = random_24(m, k, seed=0), random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
            w8, dense8, b8_t = (jax.tree.map(_to_e4m3, operand) for operand in (w, dense, b_t))
            row = dict(m=m, n=n, k=k, dense_bf16_ms=median_ms(_times, dense, b_t))
            row["dense_fp8_ms"] = median_ms(_times, dense8, b8_t, compiler_options=fp8.COMPILER_OPTIONS)
            row["sparse_bf16_ms"] = median_ms(hopper.matmul_24, w, b_t.T)
            scale = jnp.ones((m, 1), jnp.float32)
            row |= {
                f"sparse_fp8_{config.tile_m}x{config.tile_n}_ms": median_ms(
                    functools.partial(hopper.matmul_24_fp8, config=config), w8, b8_t, scale
                )
                for config, _ in CANDIDATES
            }
            row["to_e4m3_24_ms"], row["to_e4m3_ms"] = median_ms(fp8.by_rows, w.values), median_ms(fp8.by_rows, dense)
            print(
                " ".join(f"{key} {value:.4f}" if key[-2:] == "ms" else f"{key} {value}" for key, value in row.items())
            )
            table.append(row)
    return table


def _to_e4m3(x: Array) -> Array:
    return x.astype(fp8.E4M3) if x.dtype == jnp.bfloat16 else x


def _times(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w.T, preferred_element_type=jnp.bfloat16)


def bench_venom() -> list[dict]:
    """Times products over listed rows of the dense operand, and of listed rows of the 2:4 one; rows in any order.

    Sampled products are compared with the faster of cuBLAS' products of the two layouts.
    """
    table = []
    for t, f, d in SHAPES_VENOM:
        b, x, w = random_matrix(f, d, seed=1), random_matrix(t, d, seed=3), random_24(f, d, seed=4)
        cublas = median_ms(jnp.matmul, random_matrix(t, f, seed=2), b)
        cublas_sampled = median_ms(lambda x, w: x @ w.T, x, b)
        for v, m in itertools.product(VENOM_BLOCKS, VENOM_GROUPS):
            a = random_venom(t, f, v, m, seed=0)
            venom = median_ms(hopper.matmul_venom, a, b)
            sampled = median_ms(functools.partial(hopper.sampled_matmul_24, v=v), w, x, a.columns)
            row = dict(t=t, f=f, d=d, v=v, m=m, cublas_ms=cublas, matmul_venom_ms=venom, speedup=cublas / venom)
            row |= dict(cublas_sampled_ms=cublas_sampled, sampled_matmul_24_ms=sampled)
            row["speedup_sampled"] = min(cublas, cublas_sampled) / sampled
            print(
                f"{v}:2:{m} T={t} F={f} D={d}: Venom {venom:.4f} ms, x{row['speedup']:.2f}, "
                f"sampled {sampled:.4f} ms, x{row['speedup_sampled']:.2f}",
                flush=True,
            )
            table.append(row)
    return table


TABLES = dict(matmul_24=bench_24, matmul_24_fp8=bench_fp8, matmul_venom=bench_venom)


def main(_) -> None:
    if unknown := set(ONLY.value) - TABLES.keys():
        raise app.UsageError(f"--tables: {sorted(unknown)} must be among {list(TABLES)}")
    write_results(OUTPUT.value, {name: TABLES[name]() for name in ONLY.value or TABLES})


if __name__ == "__main__":
    app.run(main)
