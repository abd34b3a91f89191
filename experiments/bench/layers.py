"""One layer by recipe: traced, compiled side by side, and timed against the dense one, forward and with backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array

from experiments.timing import compile_side_by_side, time_by_kernel
from sparse_lm.ops import backends

FunctionOf = Callable[[Any, Any], tuple[Callable[..., Array], tuple[Array, ...]]]
"""(operands, state) -> a layer as a function of what has gradients, and that; weights are prepared once, as in a step.

Operands have the gradient of the output as `do`.
"""


def forward(function_of: FunctionOf, operands: Any, state: Any) -> Array:
    function, differentiated = function_of(operands, state)
    return function(*differentiated)


def both(function_of: FunctionOf, operands: Any, state: Any) -> tuple[Array, ...]:
    """Computes the output, and then the gradients of what has any: as in a model, XLA joins no passes of the two."""
    function, differentiated = function_of(operands, state)
    o, vjp = jax.vjp(function, *differentiated)
    o, do = jax.lax.optimization_barrier((o, operands.do))
    return o, *vjp(do)


class Layer(NamedTuple):
    """A recipe's layer, lowered."""

    operands: Any
    state: Any
    forward: jax.stages.Lowered
    both: jax.stages.Lowered
    reference_ops: list[str]  # that no kernel runs


def lower(function_of: FunctionOf, operands: Any, state: Any, compiler_options: dict[str, Any] | None = None) -> Layer:
    """Traces a layer for operands of these shapes; nothing is compiled yet."""
    with backends.record() as used:
        parts = (functools.partial(part, function_of) for part in (forward, both))
        lowered = [jax.jit(part, compiler_options=compiler_options).lower(operands, state) for part in parts]
    return Layer(operands, state, *lowered, sorted(op for op, names in used.items() if "reference" in names))


def time_layers(layers: Mapping[str, Layer]) -> dict[str, dict[str, Any]]:
    """Times layers, "dense" first, and the kernels of forward and backward by name; says so."""
    compiled = compile_side_by_side((layer.forward.compile, layer.both.compile) for layer in layers.values())
    rows: dict[str, dict[str, Any]] = {}
    for (name, layer), steps in zip(layers.items(), compiled, strict=True):
        (forward_ms, _), (both_ms, kernels) = (time_by_kernel(step, layer.operands, layer.state) for step in steps)
        row = rows[name] = dict(forward_ms=forward_ms, both_ms=both_ms, reference_ops=layer.reference_ops)
        row["kernels"] = kernels
        if name != "dense":
            row |= {f"{part}_speedup": rows["dense"][f"{part}_ms"] / row[f"{part}_ms"] for part in ("forward", "both")}
        print(
            f"  {name:<16} forward {forward_ms:.3f} ms x{row.get('forward_speedup', 1):.2f}, "
            f"with backward {both_ms:.3f} ms x{row.get('both_speedup', 1):.2f} {layer.reference_ops or ''}",
            flush=True,
        )
    return rows
