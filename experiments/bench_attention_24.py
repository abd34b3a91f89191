"""2:4 weights in the attention projections: their forward and backward products, and what a step would save.

    python -m experiments.bench_attention_24 --output=experiments/results/attention_24_h200.json

Kernel times of one projection, the weight's compression or its cast to bfloat16 included; all four of a layer are
alike. What a step saves is the measured ratio applied to the share that the projections have of the committed
steps with sparse FFNs, which have 32,768 tokens. Nothing here says what a model loses by it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax.numpy as jnp
from absl import app, flags
from jax import Array

from experiments.attention_projections import dense_products, predicted_ms, products_24, saved_share
from experiments.kernel_timing import median_ms, random_matrix
from experiments.result_files import write_results
from sparse_lm import ops
from sparse_lm.ops.formats import Sparse24

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
STEPS = {2048: "step_llama1b_8x4096_h200.json", 4096: "step_llama7b_4_layers_8x4096_h200.json"}  # by model width
TOKENS = (16_384, 32_768)


def compress(w: Array, scale: Array) -> tuple[Sparse24, Array]:
    """w times its scale as 2:4 along its inputs, and as a dense matrix with the same entries; both bfloat16."""
    return ops.soft_threshold_24(w, scale[None], dtype=jnp.bfloat16)


def bench(tokens: int, w: Array, scale: Array) -> dict[str, float]:
    """Milliseconds of one projection, all three products and the forward alone."""
    x, dy = random_matrix(tokens, w.shape[1], seed=0), random_matrix(tokens, w.shape[0], seed=1)
    sparse, masked = compress(w, scale)
    forward = lambda w, x: ops.matmul_24(w, x, b_transposed=True, out_transposed=True)  # noqa: E731
    return dict(
        dense_ms=median_ms(dense_products, x, dy, w),
        sparse_ms=median_ms(products_24, x, dy, w, scale),
        dense_forward_ms=median_ms(lambda x, w: x @ w.T, x, masked),
        sparse_forward_ms=median_ms(forward, sparse, x),
    )


def main(_) -> None:
    table = []
    for dim, file in STEPS.items():
        step = json.loads((Path(__file__).parent / "results" / file).read_text())["recipes"]["venom_slices"]
        w = random_matrix(dim, dim, seed=2, dtype=jnp.float32) / math.sqrt(dim)
        scale = ops.soft_threshold_scale(w)
        compress_ms = median_ms(compress, w, scale)
        for tokens in TOKENS:
            row = dict(dim=dim, tokens=tokens, **bench(tokens, w, scale), compress_ms=compress_ms)
            predicted = predicted_ms(tokens, dim)
            row["predicted_ms"] = predicted
            row["speedup"] = row["dense_ms"] / row["sparse_ms"]
            row["speedup_forward"] = row["dense_forward_ms"] / row["sparse_forward_ms"]
            row["saved_of_step"] = saved_share(row["sparse_ms"] / row["dense_ms"], step)
            row["predicted_saved_of_step"] = saved_share(predicted["sparse"] / predicted["dense"], step)
            table.append(row)
            print(
                f"D={dim} T={tokens}: dense {row['dense_ms']:.3f} ms ({predicted['dense']:.3f} predicted), 2:4 forward "
                f"{row['sparse_ms']:.3f} ms ({predicted['sparse']:.3f}), x{row['speedup']:.2f}; of these "
                f"compression {compress_ms:.3f} ms; forward alone x{row['speedup_forward']:.2f}; saved of a step "
                f"{row['saved_of_step']:.1%} ({row['predicted_saved_of_step']:.1%})",
                flush=True,
            )
            write_results(OUTPUT.value, dict(steps=STEPS, projections=table))


if __name__ == "__main__":
    app.run(main)
