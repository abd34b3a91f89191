"""Times causal attention in bfloat16 by implementation and shape, with its errors and whether it repeats to the bit.

    python -m experiments.bench.attention --output=experiments/results/attention_h200.json

cuDNN comes with JAX (`jax.nn.dot_product_attention`). tokamax is a library of kernels (pip install tokamax): those that
it calls mosaic are made for Hopper. What is not installed or refuses a shape is named and left out.

Times are of single calls by kernel (CUPTI), and of half a second of calls in a row by the clock: these have memory set
to zero, which cuDNN asks for, and the clock rate that a GPU keeps up. Of the products, those above the diagonal are not
counted; forward with backward counts as 3.5 forwards.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array

from experiments.kernels.timing import time_by_kernel
from experiments.result_files import write_results

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
SHAPES = flags.DEFINE_list(
    "shapes",
    ["8x4096x16x16x128", "8x4096x20x4x128", "32x1024x16x16x128", "32x1024x20x4x128", "8x4096x32x8x64"],
    "Sequences x positions x query heads x key-value heads x head width.",
)
ONLY = flags.DEFINE_list("implementations", [], "All by default.")

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


class Shape(NamedTuple):
    """B sequences of S positions, N query heads, K key-value heads, heads of width H."""

    b: int
    s: int
    n: int
    k: int
    h: int

    @property
    def forward_flops(self) -> float:
        """Counts both products, less what is above the diagonal."""
        return 2.0 * self.b * self.n * self.s**2 * self.h


class Implementation(NamedTuple):
    """A causal attention of q [B, S, N, H], k and v [B, S, K, H], and what it asks of the compiler."""

    attention: Callable[[Array, Array, Array], Array]
    compiler_options: dict[str, Any] | None = None


def implementations() -> dict[str, Implementation]:
    """Returns all that can be imported, cuDNN first."""
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    all_of_them = {
        "cudnn": Implementation(cudnn),
        "cudnn, deterministic": Implementation(cudnn, DETERMINISTIC),
    }
    if importlib.util.find_spec("tokamax") is None:
        print("left out: tokamax is not installed", flush=True)
        return all_of_them
    import tokamax

    for name, kernels in {"tokamax": "mosaic", "tokamax triton": "triton"}.items():
        attention = functools.partial(tokamax.dot_product_attention, is_causal=True, implementation=kernels)
        all_of_them[name] = Implementation(attention)
    return all_of_them


def operands(shape: Shape, dtype=jnp.bfloat16) -> tuple[Array, ...]:
    """Draws queries, keys, values and the gradient of the output: standard normal numbers."""
    b, s, n, k, h = shape
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (n, k, k, n)
    return tuple(jax.random.normal(key, (b, s, i, h), dtype) for key, i in zip(keys, heads, strict=True))


def both(attention: Callable[..., Array], q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    """Computes the output, and the gradients of q, k and v."""
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(cotangent)


def exact(operands: tuple[Array, ...]) -> list[np.ndarray]:
    """Computes output and gradients in float32."""
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    with jax.default_matmul_precision("highest"):
        results = jax.jit(functools.partial(both, plain))(*(x.astype(jnp.float32) for x in operands))
    return [np.asarray(x) for x in results]


def error(value: Array, exact: np.ndarray) -> dict[str, float]:
    """Compares norms, and the largest difference with the largest value."""
    difference = np.asarray(value, np.float32) - exact
    return dict(
        norm=float(np.linalg.norm(difference) / np.linalg.norm(exact)),
        largest=float(np.abs(difference).max() / np.abs(exact).max()),
    )


def lower(chosen: Implementation, whole: tuple[Array, ...]) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Lowers the forward, and forward with backward."""
    parts = (chosen.attention, whole[:3]), (functools.partial(both, chosen.attention), whole)
    forward, step = (jax.jit(f, compiler_options=chosen.compiler_options).lower(*args) for f, args in parts)
    return forward, step


def bench(chosen: Mapping[str, Implementation], shape: Shape) -> list[dict[str, Any]]:
    """Measures implementations at one shape; they compile side by side."""
    whole = operands(shape)
    references = exact(tuple(x[-1:] for x in whole))
    rows, compiling = {name: dict(implementation=name, **shape._asdict()) for name in chosen}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, implementation in chosen.items():
            with _refusals(rows[name]):
                compiling[name] = [pool.submit(part.compile) for part in lower(implementation, whole)]
    for name, parts in compiling.items():
        with _refusals(rows[name]):
            forward, step = (part.result() for part in parts)
            rows[name] |= measure(forward, step, shape, whole, references)
    return list(rows.values())


@contextlib.contextmanager
def _refusals(row: dict[str, Any]) -> Iterator[None]:
    """Notes why a kernel refuses a shape, in whatever way it does, so that the others go on."""
    try:
        yield
    except Exception as e:
        row["refused"] = f"{type(e).__name__}: {e}"[:300]


def measure(
    forward: jax.stages.Compiled, step: jax.stages.Compiled, shape: Shape, whole: tuple[Array, ...], references: list
) -> dict[str, Any]:
    """Times one implementation; its errors are of the last sequence."""
    results, again = step(*whole), step(*whole)
    forward_ms, _ = time_by_kernel(forward, *whole[:3])
    both_ms, kernels = time_by_kernel(step, *whole)
    sustained_ms = time_in_a_row(step, whole, calls=max(1, round(500 / both_ms)))
    return dict(
        forward_ms=forward_ms,
        forward_tflops=shape.forward_flops / forward_ms / 1e9,
        both_ms=both_ms,
        both_tflops=3.5 * shape.forward_flops / both_ms / 1e9,
        sustained_ms=sustained_ms,
        sustained_tflops=3.5 * shape.forward_flops / sustained_ms / 1e9,
        errors={n: error(x[-1:], y) for n, x, y in zip(("o", "dq", "dk", "dv"), results, references, strict=True)},
        same_bits=all(bool(jnp.array_equal(x, y)) for x, y in zip(results, again, strict=True)),
        temporaries_mib=step.memory_analysis().temp_size_in_bytes / 2**20,
        kernels=kernels,
    )


def time_in_a_row(compiled: jax.stages.Compiled, operands: tuple[Array, ...], calls: int) -> float:
    """Returns milliseconds a call by the clock."""
    jax.block_until_ready(compiled(*operands))
    start = time.perf_counter()
    for _ in range(calls):
        results = compiled(*operands)
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - start) / calls


def line(row: dict[str, Any]) -> str:
    """Says a row in one line."""
    name = f"  {row['implementation']:<32}"
    if "refused" in row:
        return f"{name} left out: {row['refused']}"
    return (
        f"{name} forward {row['forward_ms']:.3f} ms {row['forward_tflops']:.0f} TFLOP/s, "
        f"with backward {row['both_ms']:.3f} ms {row['both_tflops']:.0f} TFLOP/s, "
        f"sustained {row['sustained_ms']:.3f} ms {row['sustained_tflops']:.0f} TFLOP/s, "
        f"error {max(of['norm'] for of in row['errors'].values()):.1e}, "
        f"{'the same' if row['same_bits'] else 'other'} bits the second time"
    )


def versions() -> dict[str, str]:
    """Finds the versions of what implements attention beside JAX."""
    found = {}
    for package in ("tokamax", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main(_) -> None:
    everything, table = implementations(), []
    if unknown := set(ONLY.value) - set(everything):
        raise app.UsageError(f"--implementations: {sorted(unknown)} must be among {list(everything)}")
    chosen = {name: everything[name] for name in ONLY.value or everything}
    for text in SHAPES.value:
        shape = Shape(*map(int, text.split("x")))
        print(f"B={shape.b} S={shape.s} N={shape.n} K={shape.k} H={shape.h}", flush=True)
        table += bench(chosen, shape)
        print("\n".join(map(line, table[-len(chosen) :])), flush=True)
        write_results(OUTPUT.value, dict(versions=versions(), attention=table))


if __name__ == "__main__":
    app.run(main)
