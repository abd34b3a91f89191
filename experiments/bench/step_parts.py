"""Says where the time of a compiled function goes on the device, by part of the model.

Kernels are timed by JAX's profiler. Each belongs to an HLO instruction, whose metadata names the scopes
(`jax.named_scope`, `jax.named_call`) that it was traced in; the innermost one listed here is its part.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

_SCOPES = {
    "FFN products": "up down grad_hidden grad_input grad_up grad_down grad_up_from_dh grad_down_from_do",
    "FFN hidden layer": "activate grad_activation busiest_neurons",
    "FFN routing": "assign_tokens dispatch_order route group_by_expert",
    "FFN dispatch": "dispatch combine",
    "FFN, other": "feed_forward",
    "FFN weights": "soft_threshold_forms masked_forms gather_layer",
    "weights to bfloat16": "in_compute_dtype",
    "attention scores": "causal_attention",
    "rotary positions": "rotate",
    "attention projections": "attention",
    "norms": "rms_norm add_norm",
    "loss": "loss",
    "embedding": "embed",
    "optimizer": "optimizer",
}
PARTS = {scope: part for part, scopes in _SCOPES.items() for scope in scopes.split()}
# How names of kernels begin that are of "FFN, other" by scope.
HIDDEN_LAYER = ("squared_relu", "gated_squared_relu", "hidden_gradients")


class Kernel(NamedTuple):
    """One launch. `instruction` is the name of its HLO instruction, empty if the profiler does not know."""

    name: str
    instruction: str
    ms: float


def trace_steps(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Sequence[Any], count: int
) -> tuple[Any, list[Kernel]]:
    """Returns the state after `count` steps, and the kernels that they launched, with a device's time of a step."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for number in range(count):
                state, metrics = step(state, batches[number % len(batches)])
            jax.block_until_ready(metrics)
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return state, kernels_of(profile, count)


def kernels_of(profile: jax.profiler.ProfileData, steps: int) -> list[Kernel]:
    """Reads the kernels of all devices, each with its share of the mean milliseconds of one step on one device."""
    devices = [plane for plane in profile.planes if plane.name.startswith("/device:GPU")]
    return [
        Kernel(event.name, str(dict(event.stats).get("hlo_op", "")), event.duration_ns / 1e6 / steps / len(devices))
        for plane in devices
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def by_part(kernels: Iterable[Kernel], hlo: str, least: float = 0.02) -> dict[str, dict[str, float]]:
    """Sums milliseconds by part, largest first, and in each by kernel (its name less its number), those
    under `least` left out; `hlo` is the compiled function's text."""
    part_of = _parts(hlo)
    total: collections.Counter[str] = collections.Counter()
    by_kernel: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for kernel in kernels:
        part = part_of.get(_as_kernel(kernel.instruction or kernel.name), "other")
        if part == "FFN, other" and kernel.name.startswith(HIDDEN_LAYER):
            part = "FFN hidden layer"
        total[part] += kernel.ms
        by_kernel[part][re.sub(r"_\d+$", "", kernel.name)] += kernel.ms
    return {
        part: {"total": ms} | {name: ms for name, ms in by_kernel[part].most_common() if ms >= least}
        for part, ms in total.most_common()
    }


def _parts(hlo: str) -> dict[str, str]:
    """Returns the part by instruction, under the name of its kernel."""
    result = {}
    for name, scopes in re.findall(r'^ +(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', hlo, re.M):
        known = [PARTS[scope] for scope in re.findall(r"\w+", scopes) if scope in PARTS]
        result[_as_kernel(name)] = known[-1] if known else "other"
    return result


def _as_kernel(name: str) -> str:
    """Returns an instruction's name as XLA gives it to its kernel."""
    return name.replace(".", "_").replace("-", "_")
