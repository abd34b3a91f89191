"""One FFN by recipe against the dense one, in one process: forward, and forward with backward.

    python -m experiments.bench.ffn --output=experiments/results/ffn_h100.json

Kernel times, everything that a layer does included: weights to their sparse forms, routing,
permutation, selection. The random order of the tokens, which all layers of a step share, is given.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import Array
from jax.experimental.mosaic.gpu import profiler

from experiments.kernels.timing import random_matrix
from experiments.result_files import write_results
from sparse_lm import ops
from sparse_lm.ops import backends, routing
from sparse_lm.ops.ffn import feed_forward
from sparse_lm.ops.ffn_weights import FfnVariables, prepare_weights
from sparse_lm.ops.plan import DENSE, DH_MVUE, RECIPES, Y_MVUE, GemmPlan

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
    "sets of runs 2:16, 64 clusters": _VENOM(selection="cluster_sets", v=128, m=16, clusters=64, neuron_run=128),
    "sets of runs 2:8, 16 clusters": _VENOM(selection="cluster_sets", v=256, m=8, clusters=16, neuron_run=256),
    "sets of runs 2:16, 16 clusters": _VENOM(selection="cluster_sets", v=256, m=16, clusters=16, neuron_run=256),
    "slices 2:8": _VENOM(selection="slices", v=256, m=8, clusters=2),
    "slices 2:16": _VENOM(selection="slices", v=256, m=16, clusters=4),
    "slices 2:16, mvue": _VENOM(selection="slices", v=256, m=16, clusters=4, grad_up=DH_MVUE, grad_down=Y_MVUE),
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


class Operands(NamedTuple):
    """Of one FFN, whatever its plan."""

    x: Array
    w1: Array
    w2: Array
    key: Array
    order: Array
    do: Array  # gradient of the output


def random_operands(tokens: int, dim: int, neurons: int) -> Operands:
    """Normal inputs and gradients in bfloat16; float32 weights of the size that training starts with."""
    w1, w2 = random_matrix(neurons, dim, 4, jnp.float32), random_matrix(neurons, dim, 5, jnp.float32)
    return Operands(
        x=random_matrix(tokens, dim, seed=2),
        w1=w1 / dim**0.5,
        w2=w2 / neurons**0.5,
        key=jax.random.key(7),
        order=jax.random.permutation(jax.random.key(6), tokens),
        do=random_matrix(tokens, dim, seed=3),
    )


def forward(plan: GemmPlan, operands: Operands, variables: FfnVariables) -> Array:
    """The output [T, D]."""
    return _ffn(plan, operands, variables)(operands.x, operands.w1, operands.w2)


def both(plan: GemmPlan, operands: Operands, variables: FfnVariables) -> tuple[Array, ...]:
    """The output, and the gradients of x and of the weights."""
    o, vjp = jax.vjp(_ffn(plan, operands, variables), operands.x, operands.w1, operands.w2)
    return o, *vjp(operands.do)


def _ffn(plan: GemmPlan, operands: Operands, variables: FfnVariables) -> Callable[[Array, Array, Array], Array]:
    """As a function of what has gradients; the sparse forms of the weights are made once, as in a step."""
    weights = None
    if plan.weights != "full":
        of_one_layer = jax.tree.map(lambda a: a[None], (operands.w1, operands.w2, variables))
        weights = prepare_weights(*of_one_layer, plan=plan, dtype=operands.x.dtype)
    key, order = operands.key, operands.order
    return lambda x, w1, w2: feed_forward(x, w1, w2, variables, key, order, weights, plan=plan)[0]


class Ffn(NamedTuple):
    """A plan's FFN, lowered."""

    variables: FfnVariables
    forward: jax.stages.Lowered
    both: jax.stages.Lowered
    reference_ops: list[str]  # that no kernel runs


def lower(plan: GemmPlan, operands: Operands) -> Ffn:
    """A plan's FFN for operands of these shapes, traced and not yet compiled."""
    neurons, dim = operands.w1.shape
    variables = random_variables(plan, dim, neurons)
    with backends.record() as used:
        lowered = [jax.jit(functools.partial(part, plan)).lower(operands, variables) for part in (forward, both)]
    return Ffn(variables, *lowered, sorted(op for op, names in used.items() if "reference" in names))


def bench(plans: Mapping[str, GemmPlan], tokens: int, dim: int, neurons: int) -> dict[str, dict[str, Any]]:
    """Times of one FFN by plan, and of the kernels of its forward and backward by name.

    All compile side by side, but for the first: XLA times candidates for products, which the others share with it.
    """
    operands = random_operands(tokens, dim, neurons)
    ffns, compiling = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, plan in plans.items():
            ffn = ffns[name] = lower(plan, operands)
            compiling[name] = [pool.submit(part.compile) for part in (ffn.forward, ffn.both)]
            if len(ffns) == 1:
                concurrent.futures.wait(compiling[name])
    rows = {}
    for name, ffn in ffns.items():
        steps = [future.result() for future in compiling[name]]
        (forward_ms, _), (both_ms, kernels) = (time_by_kernel(step, operands, ffn.variables) for step in steps)
        rows[name] = dict(forward_ms=forward_ms, both_ms=both_ms, reference_ops=ffn.reference_ops, kernels=kernels)
    return rows


def time_by_kernel(compiled: jax.stages.Compiled, *operands: Any) -> tuple[float, dict[str, float]]:
    """Median milliseconds of all kernels, and by kernel name, numbers and what takes under 1 us left out."""
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
    only = [name.replace(";", ",") for name in ONLY.value] or list(PLANS)
    if unknown := set(only) - {"dense", *PLANS}:
        raise app.UsageError(f"--plans: {sorted(unknown)} must be among {list(PLANS)}")
    plans = {"dense": DENSE} | {name: plan for name, plan in PLANS.items() if name in only}
    for shape in SHAPES.value:
        dim, neurons = map(int, shape.split("x"))
        for tokens in map(int, TOKENS.value):
            print(f"T={tokens} D={dim} F={neurons}", flush=True)
            rows = bench(plans, tokens, dim, neurons)
            for name, row in rows.items():
                for part in ("forward", "both") if name != "dense" else ():
                    row[f"{part}_speedup"] = rows["dense"][f"{part}_ms"] / row[f"{part}_ms"]
                table.append(dict(plan=name, tokens=tokens, dim=dim, neurons=neurons, **row))
                print(
                    f"  {name:<32} forward {row['forward_ms']:.3f} ms x{row.get('forward_speedup', 1):.2f}, "
                    f"with backward {row['both_ms']:.3f} ms x{row.get('both_speedup', 1):.2f} "
                    f"{row['reference_ops'] or ''}",
                    flush=True,
                )
            write_results(OUTPUT.value, dict(ffn=table))


if __name__ == "__main__":
    app.run(main)
