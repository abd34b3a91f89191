"""Every Hopper kernel's program as text, without locations: whether a change of the code changes what a GPU runs.

    python -m tests.ops.hopper.programs --output=BEFORE    # and after the change --output=AFTER
    diff -r BEFORE AFTER

Needs no GPU. Equal programs need no tests on one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import app, flags
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jaxlib.mlir import ir

from tests.ops.hopper import sanitize

_SERIALISED = re.compile(r'(kernel_hash|module) = "(?:[^"\\]|\\.)*"')  # with the lines that operations come from
_NUMBERED = re.compile(r'(mosaic_gpu.dump_basename) = "[^"]*"')  # by how many kernels there were before


def program(call: sanitize.Call) -> str:
    """Returns what XLA is given for a call on a GPU, and the kernels in it."""
    kernel, operands = call
    lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",))
    return "\n".join([_SERIALISED.sub(r"\1", lowered.as_text()), *_kernels(lowered.compiler_ir().operation)])


def _kernels(operation: ir.Operation) -> Iterator[str]:
    """Yields the kernels of the custom calls inside."""
    for inner in (op.operation for region in operation.regions for block in region.blocks for op in block.operations):
        if inner.name == "stablehlo.custom_call" and "mhlo.backend_config" in inner.attributes:
            context = mlir.make_ir_context()
            context.allow_unregistered_dialects = True
            mosaic_gpu_dialect.register_dialect(context)
            with context:
                serialised = ir.StringAttr(inner.attributes["mhlo.backend_config"]["module"]).value_bytes
                yield _NUMBERED.sub(r"\1", str(ir.Module.parse(serialised)))
        yield from _kernels(inner)


def main(_) -> None:
    output = Path(flags.FLAGS.output)
    output.mkdir(parents=True, exist_ok=True)
    for name, make in sanitize.CALLS.items():
        path = output / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
        try:
            path.write_text(program(make()))
        except NotImplementedError as error:
            print(f"{name}: no program: {error}")
        else:
            print(path, flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "Directory to write, a file for each call of sanitize.py.", required=True)
    app.run(main)
