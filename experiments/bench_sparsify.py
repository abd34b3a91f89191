"""The 2:4 sparsifier on Hopper against copy bandwidth and against the XLA reference.

python -m experiments.bench_sparsify --output=experiments/results/sparsify_h100.json
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from absl import app, flags

from experiments.kernel_timing import median_ms, random_matrix, write_results
from sparse_lm.ops import hopper, reference

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

CASES = [  # rows, columns, dtype: weights of a 1B and a 7B model, activations of 16,384 tokens
    (8192, 2048, jnp.float32),
    (16384, 4096, jnp.float32),
    (16384, 8192, jnp.bfloat16),
]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of an elementwise pass over 268 MB."""
    x = random_matrix(16384, 8192, seed=0)
    return 2 * x.nbytes / median_ms(lambda x: x + 1, x) * 1e3


def main(_) -> None:
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    table = []
    for rows, columns, dtype in CASES:
        x = random_matrix(rows, columns, seed=1, dtype=dtype)
        moved = x.nbytes + x.size + x.size // 8  # the matrix, half of it in bfloat16, 4 bits a group
        for method in ("soft_threshold", "magnitude"):
            for axis in (-1, 0):
                options = dict(method=method, axis=axis, scale=1.5, dtype=jnp.bfloat16, key=None)
                ours = median_ms(functools.partial(hopper.sparsify_24, **options), x)
                xla = median_ms(functools.partial(reference.sparsify_24, **options), x, iterations=5)
                share = moved / ours * 1e3 / bandwidth
                name = jnp.dtype(dtype).name
                row = dict(rows=rows, columns=columns, dtype=name, method=method, axis=axis, bytes=moved)
                table.append({**row, "ms": ours, "xla_ms": xla, "share_of_copy_bandwidth": share})
                case = f"{name}[{rows}, {columns}] {method} axis {axis}"
                print(f"{case}: {ours:.4f} ms, {share:.0%} of copy; XLA {xla:.4f} ms", flush=True)
    write_results(OUTPUT.value, dict(copy_bandwidth=bandwidth, sparsify_24=table))


if __name__ == "__main__":
    app.run(main)
