"""One FFN by recipe against the dense one, in one process: forward, and forward with backward.

    python -m experiments.bench_ffn --output=experiments/results/ffn_h100.json

Kernel times, everything that a layer does included: weights to their sparse forms, routing,
permutation, selection. The random order of the tokens, which all layers of a step share, is given.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import statistics

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental.mosaic.gpu import profiler

from experiments.kernel_timing import median_ms, random_matrix, write_results
from sparse_lm import ops
from sparse_lm.ops import backends, routing
from sparse_lm.ops.ffn import feed_forward
from sparse_lm.ops.ffn_weights import FfnVariables, prepare_weights
from sparse_lm.ops.plan import DENSE, RECIPES, GemmPlan

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
TOKENS = flags.DEFINE_list("tokens", ["8192", "16384", "32768", "65536"], "Tokens, T.")
SHAPES = flags.DEFINE_list("shapes", ["2048x8192", "4096x16384"], "Model width x neurons.")
ONLY = flags.DEFINE_list("plans", [], "Names of plans; all by default (';' stands for a comma).")

_VENOM = functools.partial(dataclasses.replace, RECIPES["venom"])
PLANS: dict[str, GemmPlan] = {
    "act24": RECIPES["act24"],
    "fst": RECIPES["fst"],
    "sste": RECIPES["sste"],
    "magnitude 128:2:8": _VENOM(selection="magnitude", v=128, m=8),
    "magnitude 128:2:16": _VENOM(selection="magnitude", v=128, m=16),
    "magnitude 256:2:16": _VENOM(selection="magnitude", v=256, m=16),
    "sets 2:16, 64 clusters": _VENOM(selection="cluster_sets", v=128, m=16, clusters=64),
    "sets of runs 2:8, 16 clusters": _VENOM(selection="cluster_sets", v=256, m=8, clusters=16, neuron_run=256),
    "sets of runs 2:16, 16 clusters": _VENOM(selection="cluster_sets", v=256, m=16, clusters=16, neuron_run=256),
    "slices 2:8": _VENOM(selection="slices", v=256, m=8, clusters=2),
    "slices 2:16": _VENOM(selection="slices", v=256, m=16, clusters=4),
}


def random_variables(plan: GemmPlan, dim: int, neurons: int) -> FfnVariables:
    """Centres that random tokens share out evenly, and random sets and masks."""
    if plan.weights == "transposable":
        masks = (jax.jit(ops.transposable_mask)(random_matrix(neurons, dim, seed=seed)) for seed in (8, 9))
        return FfnVariables(mask_up=next(masks), mask_down=next(masks))
    if not plan.venom:
        return FfnVariables(scale_up=jnp.float32(1.4), scale_down=jnp.float32(1.4))
    keys = jax.random.split(jax.random.key(1))
    energy = jax.random.uniform(keys[0], (plan.clusters, neurons))
    columns = None
    if plan.selection == "slices":
        columns = routing.slice_sets(neurons, plan.clusters)
    elif plan.selection == "cluster_sets" and plan.neuron_run > 1:
        columns = routing.run_sets(energy, plan.m, plan.neuron_run)
    elif plan.selection == "cluster_sets":
        columns = routing.neuron_sets(energy, plan.m)
    centroids = jax.random.normal(keys[1], (plan.clusters, dim))
    return FfnVariables(jnp.float32(1.4), jnp.float32(1.4), centroids=centroids, columns=columns)


def bench(plan: GemmPlan, tokens: int, dim: int, neurons: int) -> dict:
    """Times of one FFN, and of the kernels of its forward and backward by name."""
    x, do = random_matrix(tokens, dim, seed=2), random_matrix(tokens, dim, seed=3)
    w1, w2 = random_matrix(neurons, dim, 4, jnp.float32), random_matrix(neurons, dim, 5, jnp.float32)
    variables = random_variables(plan, dim, neurons)
    order = jax.random.permutation(jax.random.key(6), tokens)
    operands = x, w1 / dim**0.5, w2 / neurons**0.5, variables, jax.random.key(7), order

    def ffn(w1, w2, variables, key, order):
        """As a function of what has gradients; the sparse forms of the weights are made once, as in a step."""
        weights = None
        if plan.weights != "full":
            of_one_layer = jax.tree.map(lambda a: a[None], (w1, w2, variables))
            weights = prepare_weights(*of_one_layer, plan=plan, dtype=x.dtype)
        return lambda x, w1, w2: feed_forward(x, w1, w2, variables, key, order, weights, plan=plan)[0]

    def forward(x, w1, w2, variables, key, order):
        return ffn(w1, w2, variables, key, order)(x, w1, w2)

    def both(x, w1, w2, variables, key, order, do):
        o, vjp = jax.vjp(ffn(w1, w2, variables, key, order), x, w1, w2)
        return o, *vjp(do)

    with backends.record() as used:
        forward_ms = median_ms(forward, *operands)
        both_ms, by_kernel = time_by_kernel(both, *operands, do)
    reference = sorted(op for op, names in used.items() if "reference" in names)
    return dict(forward_ms=forward_ms, both_ms=both_ms, reference_ops=reference, kernels=by_kernel)


def time_by_kernel(function, *operands) -> tuple[float, dict[str, float]]:
    """Median milliseconds of all kernels, and by kernel name, numbers and what takes under 1 us left out."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*operands))
    _, runs = profiler.measure(compiled, iterations=15, aggregate=False)(*operands)
    total = statistics.median(sum(ms for _, ms in run) for run in runs)
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    for i, run in enumerate(runs):
        for name, ms in run:
            by_name[re.sub(r"_\d+|\d+$", "", name)][i] += ms
    medians = {name: statistics.median(times) for name, times in by_name.items()}
    largest_first = sorted(medians.items(), key=lambda item: -item[1])
    return total, {name: round(ms, 4) for name, ms in largest_first if ms >= 1e-3}


def main(_) -> None:
    table = []
    only = [name.replace(";", ",") for name in ONLY.value] or PLANS
    for shape in SHAPES.value:
        dim, neurons = map(int, shape.split("x"))
        for tokens in map(int, TOKENS.value):
            dense = bench(DENSE, tokens, dim, neurons)
            table.append(dict(plan="dense", tokens=tokens, dim=dim, neurons=neurons, **dense))
            print(
                f"T={tokens} D={dim} F={neurons} dense: {dense['forward_ms']:.3f}, {dense['both_ms']:.3f} ms",
                flush=True,
            )
            for name, plan in PLANS.items():
                if name not in only:
                    continue
                row = bench(plan, tokens, dim, neurons)
                for part in ("forward", "both"):
                    row[f"{part}_speedup"] = dense[f"{part}_ms"] / row[f"{part}_ms"]
                table.append(dict(plan=name, tokens=tokens, dim=dim, neurons=neurons, **row))
                print(
                    f"  {name:<32} forward {row['forward_ms']:.3f} ms x{row['forward_speedup']:.2f}, "
                    f"with backward {row['both_ms']:.3f} ms x{row['both_speedup']:.2f} {row['reference_ops'] or ''}",
                    flush=True,
                )
            write_results(OUTPUT.value, dict(ffn=table))


if __name__ == "__main__":
    app.run(main)
