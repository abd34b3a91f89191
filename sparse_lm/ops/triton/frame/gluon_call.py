"""Gluon kernels as functions of JAX arrays.

Gluon, in which layouts are explicit, has its own entry to Triton's compiler. What comes out, PTX, goes to the custom
call that jaxlib has for Triton kernels.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxlib import gpu_triton
from triton._C.libtriton import ir
from triton._utils import canonicalize_ptr_dtype
from triton.backends.compiler import GPUTarget, Language
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from sparse_lm.ops.triton.frame import device

_WARP = 32
_ALIGNMENT = 16  # bytes, of every array that XLA allocates


class Compiled(NamedTuple):
    """A kernel for one compute capability."""

    name: str
    ptx: str
    shared_bytes: int  # of a thread block


def gluon_call(
    kernel: GluonJITFunction,
    *operands: Array | None,
    out: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    warps: int,
    **constants: Any,
) -> Any:
    """Runs a kernel whose parameters are the operands and the results, in this order, and `constants`, by name.

    Where an operand is None, the kernel is compiled for None; a last result that it is not to store is None in
    `constants`. The grid has so many thread blocks, each of so many warps, which must fill all results.

    Returns:
      An array, or a list of arrays, like `out`.

    Raises:
      ValueError: a thread block needs more shared memory than this GPU has.
    """
    arrays = (*operands, *jax.tree.leaves(out))
    types = tuple(None if x is None else canonicalize_ptr_dtype(x.dtype, is_const=False) for x in arrays)
    capability = device.compute_capability()
    compiled = compile_gluon(kernel, types, warps, capability, **constants)
    if compiled.shared_bytes > device.shared_bytes(capability):
        raise ValueError(
            f"{compiled.name} with {constants} needs {compiled.shared_bytes} bytes of shared memory; "
            f"compute capability {capability / 10} has {device.shared_bytes(capability)}"
        )
    code = gpu_triton.TritonKernel(compiled.name, warps, 1, compiled.shared_bytes, compiled.ptx, "", capability)
    parameters = [gpu_triton.create_array_parameter(0, _ALIGNMENT) for pointer in types if pointer]
    launch = gpu_triton.TritonKernelCall(code, blocks, 1, 1, parameters)
    call = jax.ffi.ffi_call(
        "triton_kernel_call",
        out,
        custom_call_api_version=2,
        vmap_method="sequential",
        legacy_backend_config=zlib.compress(launch.to_proto(compiled.name, b"")),
    )
    return call(*(x for x in operands if x is not None))


@functools.cache
def compile_gluon(
    kernel: GluonJITFunction, types: tuple[str | None, ...], warps: int, capability: int, **constants: Any
) -> Compiled:
    """Compiles for 8.0 if `capability` is 80, without a GPU. Types are those of pointers, such as "*bf16", or None."""
    target = GPUTarget("cuda", capability, _WARP)
    backend = make_backend(target)
    options = backend.parse_options(dict(num_warps=warps))
    pointers = dict(zip(kernel.arg_names, types, strict=False))
    constexprs = {name: None for name, type in pointers.items() if type is None} | constants
    source = GluonASTSource(
        kernel,
        signature=pointers | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        attrs={(i,): [["tt.divisibility", _ALIGNMENT]] for i, type in enumerate(types) if type},
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages, metadata = {}, {}
    backend.add_stages(stages, options, Language.GLUON)
    code = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    for stage in ("ttgir", "llir", "ptx"):
        code = stages[stage](code, metadata)
    return Compiled(metadata["name"], code, metadata["shared"])


def align_rows(x: Array) -> Array:
    """Pads rows of 16-bit floats with zeros up to whole vectors; copies the matrix only if there is need."""
    missing = -x.shape[1] % (_ALIGNMENT // 2)
    return jnp.pad(x, ((0, 0), (0, missing))) if missing else x
