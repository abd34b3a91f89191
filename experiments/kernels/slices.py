"""Times the products of slices of neurons against `matmul_24` with the same work in one product.

    python -m experiments.kernels.slices --output=experiments/results/grouped_h100.json

Blocks of tokens list their expert's contiguous neurons. Everything is included, also the tables made of the lists.
"""

from __future__ import annotations

import dataclasses
import functools

from absl import app, flags

from experiments.kernels.shapes import SLICES, Sliced
from experiments.kernels.timing import median_ms, random_24, random_matrix, slice_ids
from experiments.result_files import write_results
from sparse_lm.ops import hopper
from sparse_lm.ops.formats import SparseVenom

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def ungrouped_ms(shape: Sliced) -> dict[str, float]:
    """Times the operations of the three products in one: all tokens have the same neurons, or all neurons as few."""
    share = shape.tokens // shape.experts
    x = random_matrix(shape.tokens, shape.dim, seed=1)
    sampled = functools.partial(hopper.matmul_24, out_transposed=True)
    y, w2 = random_24(shape.tokens, shape.kept, seed=2), random_matrix(shape.kept, shape.dim, seed=3)
    return dict(
        sampled=median_ms(sampled, random_24(shape.kept, shape.dim, seed=0), x.T),
        venom=median_ms(hopper.matmul_24, y, w2),
        scattered=median_ms(hopper.matmul_24, random_24(shape.neurons, share, seed=4), x[:share]),
    )


def sliced_ms(shape: Sliced) -> dict[str, float]:
    """Times the three products of slices."""
    ids, listing = slice_ids(shape, seed=0), dict(v=shape.v, contiguous=shape.kept)
    x, w1 = random_matrix(shape.tokens, shape.dim, seed=1), random_24(shape.neurons, shape.dim, seed=0)
    y, y_t = random_24(shape.tokens, shape.kept, seed=2), random_24(shape.kept, shape.tokens, seed=5)
    w2, size, m = random_matrix(shape.neurons, shape.dim, seed=3), (shape.tokens, shape.neurons), 4 * shape.experts
    hidden = SparseVenom(y.values, y.metadata, ids, size, shape.v, m, shape.kept)
    scattered = functools.partial(hopper.scattered_matmul_24, rows=shape.neurons, **listing)
    return dict(
        sampled=median_ms(functools.partial(hopper.sampled_matmul_24, **listing), w1, x, ids),
        venom=median_ms(hopper.matmul_venom, hidden, w2),
        scattered=median_ms(scattered, y_t, x, ids),
    )


def squared_relu_ms(shape: Sliced) -> dict[str, float]:
    """Times the sampled product alone, with the activation's pass after it, and with the activation as its epilogue."""
    ids, listing = slice_ids(shape, seed=0), dict(v=shape.v, contiguous=shape.kept)
    x, w1 = random_matrix(shape.tokens, shape.dim, seed=1), random_24(shape.neurons, shape.dim, seed=0)
    product = functools.partial(hopper.sampled_matmul_24, **listing)
    return dict(
        product_ms=median_ms(product, w1, x, ids),
        two_kernels_ms=median_ms(lambda *args: hopper.squared_relu_24(product(*args)), w1, x, ids),
        fused_ms=median_ms(functools.partial(hopper.sampled_squared_relu_24, **listing), w1, x, ids),
    )


def main(_) -> None:
    products, epilogues = [], []
    for shape in SLICES:
        ungrouped = ungrouped_ms(shape)
        for product, ms in sliced_ms(shape).items():
            rate = ungrouped[product] / ms
            print(f"{product:10} {shape}: {ms:.4f} ms, {rate:.2f} of matmul_24's rate", flush=True)
            row = dict(product=product, **dataclasses.asdict(shape), ms=ms, ungrouped_ms=ungrouped[product], rate=rate)
            products.append(row)
        epilogues.append({**dataclasses.asdict(shape), **squared_relu_ms(shape)})
        print(f"squared ReLU {epilogues[-1]}", flush=True)
    write_results(OUTPUT.value, dict(grouped=products, squared_relu=epilogues))


if __name__ == "__main__":
    app.run(main)
