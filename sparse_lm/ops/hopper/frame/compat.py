"""What differs between the JAX releases this package supports (0.10.2 to 0.11.x)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mpmd import _mpmd_map

# Registers of a wgmma accumulator, one float32 each. Public code has no name for this layout yet.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT

# Whether Mosaic stores the transpose of 16-bit registers with `stmatrix`; if not, element by element.
TRANSPOSING_STORES = jax.__version_info__ >= (0, 11)


def kernel_in_place(
    body: Callable[..., None],
    out_types: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    mesh: plgpu.Mesh,
    compiler_params: plgpu.CompilerParams,
) -> Callable[..., list[jax.Array]]:
    """`plgpu.kernel` whose results may take the place of operands.

    In public code, a kernel that updates a reference has one name for what it reads and what it writes. Where XLA
    keeps the two apart (store_sum.py), it would write to what it should only read.

    Args:
      body: the kernel, of references to operands and results.
      out_types: of the results.
      aliases: numbers of operands, and of the results that may take their place.
      mesh: grid, clusters and threads.
      compiler_params: as `plgpu.kernel` takes them.
    """
    return _mpmd_map(
        [(mesh, body)],
        out_types,
        input_output_aliases=aliases,
        compiler_params=compiler_params,
        name=mesh.kernel_name,
    )
