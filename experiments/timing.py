"""Times of kernels and of training steps, and memory of compiled functions."""

from __future__ import annotations

import collections
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler


def compile_side_by_side(compilations: Iterable[Sequence[Callable[[], Any]]]) -> list[list[Any]]:
    """Calls functions in threads; the first group alone: XLA times candidates for products, which the others share."""
    submitted: list[list[futures.Future]] = []
    with futures.ThreadPoolExecutor() as pool:
        for group in compilations:
            submitted.append([pool.submit(function) for function in group])
            futures.wait(submitted[0])
    return [[future.result() for future in group] for group in submitted]


def median_ms(
    function: Callable, *args: Any, iterations: int = 15, compiler_options: dict[str, Any] | None = None
) -> float:
    """Returns the median time of all kernels that one call of the compiled function launches (CUPTI), in ms."""
    compiled = jax.jit(function, compiler_options=compiler_options)
    jax.block_until_ready(compiled(*args))
    _, times = profiler.measure(compiled, iterations=iterations)(*args)
    return statistics.median(times)


def time_by_kernel(compiled: jax.stages.Compiled, *operands: Any) -> tuple[float, dict[str, float]]:
    """Returns median milliseconds of all kernels, and by kernel name, without numbers and what takes under 1 us."""
    _, runs = profiler.measure(compiled, iterations=15, aggregate=False)(*operands)
    total = statistics.median(sum(ms for _, ms in run) for run in runs)
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    for i, run in enumerate(runs):
        for name, ms in run:
            by_name[re.sub(r"_\d+|\d+$", "", name)][i] += ms
    medians = {name: statistics.median(times) for name, times in by_name.items()}
    largest_first = sorted(medians.items(), key=lambda item: -item[1])
    return total, {name: round(ms, 4) for name, ms in largest_first if ms >= 1e-3}


def time_steps(
    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batches: Sequence[Any],
    *,
    warmup: int,
    timed: int,
) -> tuple[Any, list[float]]:
    """Returns the state after `warmup + timed + 2` steps, and the seconds of the timed ones.

    Steps are dispatched one ahead, as in training. A step's time is that between the arrivals of its results and of
    those of the step before, both after the next step was dispatched. The last step has none behind it and is not
    timed: where a dispatch waits for the devices, most of it would be over before its predecessor's arrival is seen.

    Raises:
      RuntimeError: if the last loss is not finite.
    """
    arrivals, pending = [], None
    for number in range(warmup + timed + 2):
        state, metrics = step(state, batches[number % len(batches)])
        if pending is not None:
            jax.block_until_ready(pending)
            arrivals.append(time.perf_counter())
        pending = metrics
    loss = float(pending["loss"])
    if not np.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    return state, np.diff(arrivals)[warmup:].tolist()


def peak_gib(compiled: jax.stages.Compiled) -> float:
    """Returns what one device holds at its peak: arguments, results (once where memory is donated), temporaries."""
    use = compiled.memory_analysis()
    held = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes
    return held / 2**30
