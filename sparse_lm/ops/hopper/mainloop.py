"""The consumers' loop over the contracted dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax import Array, lax

from sparse_lm.ops.hopper import wgmma_sp
from sparse_lm.ops.hopper.ring import Ring


def accumulate(
    ring: Ring,
    first_step: Array,
    steps: int | Array,
    operands: Callable[[Array], tuple[Any, Any, Any]],
    *,
    odd: bool | None = None,
    blocks: int,
    n: int,
    b_transposed: bool,
    load_words: Callable[[Any], tuple[Array, ...]] = wgmma_sp.load_words,
) -> tuple[Array, ...]:
    """One tile's product over stages `first_step` to `first_step + steps - 1` of the ring, and their release.

    Args:
      ring: of the operands' stages.
      first_step: number of the first.
      steps: how many; at least one.
      operands: from a slot of the ring, this warpgroup's (values, metadata, b) in shared memory.
      odd: whether `steps` is odd, which a kernel must know when it is traced; by default that of a constant.
      blocks: of 64 rows.
      n: columns.
      b_transposed: whether b is stored with the contracted dimension last.
      load_words: from the metadata in shared memory, this lane's words of a step.

    Returns:
      `blocks` arrays [64, n] float32, in the layout WGMMA.
    """

    last = first_step + steps - 1

    def step(number, carry):
        slot = ring.wait_full(number)
        values, metadata, b = operands(slot)
        carry = wgmma_sp.step(carry, values, load_words(metadata), b, b_transposed=b_transposed)

        @pl.when(number > first_step)
        def _release_the_step_before():
            ring.release(number - 1)

        return carry

    def two_steps(state):
        number, carry = state
        return number + 2, step(number + 1, step(number, carry))

    _, carry = lax.while_loop(lambda state: state[0] < last, two_steps, (first_step, wgmma_sp.start(blocks, n)))
    if steps % 2 if odd is None else odd:
        carry = step(last, carry)
    accumulators = wgmma_sp.finish(carry)
    ring.release(last)
    return accumulators
