"""Products of neurons that blocks of tokens list in runs, against `matmul_24` with the same work in one product.

python -m experiments.kernels.slices --output=experiments/results/grouped_h100.json
"""

from __future__ import annotations

import dataclasses
import functools

from absl import app, flags

from experiments.kernels.shapes import GROUPED, Grouped
from experiments.kernels.timing import listed_runs, median_ms, random_24, random_matrix
from experiments.result_files import write_results
from sparse_lm.ops import hopper
from sparse_lm.ops.formats import SparseVenom

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


@functools.cache
def ungrouped_ms(tokens: int, dim: int, neurons: int, kept: int) -> dict[str, float]:
    """The three products of the same operations in which all tokens have the same neurons, or all neurons as few."""
    x, share = random_matrix(tokens, dim, seed=1), tokens * kept // neurons
    return dict(
        sampled=median_ms(
            functools.partial(hopper.matmul_24, out_transposed=True),
            random_24(kept, dim, seed=0),
            random_matrix(dim, tokens, seed=6),
        ),
        venom=median_ms(hopper.matmul_24, random_24(tokens, kept, seed=2), random_matrix(kept, dim, seed=3)),
        scattered=median_ms(hopper.matmul_24, random_24(neurons, share, seed=4), x[:share]),
    )


def grouped_ms(shape: Grouped) -> dict[str, float]:
    """Everything included: also the tables that are made of the lists."""
    columns, listing = listed_runs(shape, seed=0), dict(v=shape.v, contiguous=shape.run)
    x, w = random_matrix(shape.tokens, shape.dim, seed=1), random_24(shape.neurons, shape.dim, seed=0)
    y, y_t = random_24(shape.tokens, shape.kept, seed=2), random_24(shape.kept, shape.tokens, seed=5)
    m = 4 * shape.neurons // shape.kept
    hidden = SparseVenom(y.values, y.metadata, columns, (shape.tokens, shape.neurons), shape.v, m, shape.run)
    scattered = functools.partial(hopper.scattered_matmul_24, rows=shape.neurons, **listing)
    return dict(
        sampled=median_ms(functools.partial(hopper.sampled_matmul_24, **listing), w, x, columns),
        venom=median_ms(hopper.matmul_venom, hidden, random_matrix(shape.neurons, shape.dim, seed=3)),
        scattered=median_ms(lambda a, b, columns: scattered(a, b, neuron_ids=columns), y_t, x, columns),
    )


def squared_relu_ms(shape: Grouped) -> dict[str, float]:
    """The sampled product alone, with the activation's pass after it, and with the activation as its epilogue."""
    columns, listing = listed_runs(shape, seed=0), dict(v=shape.v, contiguous=shape.run)
    x, w = random_matrix(shape.tokens, shape.dim, seed=1), random_24(shape.neurons, shape.dim, seed=0)
    product = functools.partial(hopper.sampled_matmul_24, **listing)
    return dict(
        product_ms=median_ms(product, w, x, columns),
        two_kernels_ms=median_ms(lambda *args: hopper.squared_relu_24(product(*args)), w, x, columns),
        fused_ms=median_ms(functools.partial(hopper.sampled_squared_relu_24, **listing), w, x, columns),
    )


def main(_) -> None:
    table = []
    for shape in GROUPED:
        ungrouped = ungrouped_ms(shape.tokens, shape.dim, shape.neurons, shape.kept)
        for product, ms in grouped_ms(shape).items():
            rate = ungrouped[product] / ms
            print(f"{product:10} {shape}: {ms:.4f} ms, {rate:.2f} of matmul_24's rate", flush=True)
            row = dict(product=product, **dataclasses.asdict(shape), ms=ms, ungrouped_ms=ungrouped[product], rate=rate)
            table.append(row)
    epilogues = []
    for shape in GROUPED:
        times = squared_relu_ms(shape)
        print(f"squared ReLU {shape}: {times}", flush=True)
        epilogues.append({**dataclasses.asdict(shape), **times})
    write_results(OUTPUT.value, dict(grouped=table, squared_relu=epilogues))


if __name__ == "__main__":
    app.run(main)
