"""The consumers' loop over the contracted dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax import Array, lax

from sparse_lm.ops.hopper.frame import wgmma_sp
from sparse_lm.ops.hopper.frame.ring import Ring
from sparse_lm.ops.hopper.frame.wgmma_sp import Words


def accumulate(
    ring: Ring,
    first_step: Array,
    steps: int | Array,
    operands: Callable[[Array], tuple[Any, Any, Any]],
    sizes: tuple[int, ...],
    *,
    odd: bool | None = None,
    b_transposed: bool,
    load_words: Callable[[Any, Any], tuple[Words, Any]] = wgmma_sp.load_words,
) -> tuple[Array, ...]:
    """Computes one tile's product over stages `first_step` to `first_step + steps - 1` of the ring, and releases them.

    Args:
      ring: of the operands' stages.
      first_step: number of the first.
      steps: how many; at least one.
      operands: from a slot of the ring, this warpgroup's (values, metadata, b) in shared memory.
      sizes: of the accumulators, arguments of `wgmma_sp.start`.
      odd: whether `steps` is odd, which a kernel must know when it is traced; by default that of a constant.
      b_transposed: whether b is stored with the contracted dimension last.
      load_words: called with a stage's metadata in shared memory and what was read ahead for it, returns this lane's
        words of the step and what it has read ahead. Of every two steps from `first_step` on, the first is called
        with None, and the second with what the first has read ahead: none of that outlives the second.

    Returns:
      Arrays [64, n] float32 in the layout WGMMA, one for each block of rows.
    """
    last = first_step + steps - 1

    def step(number, carry, read_ahead=None):
        slot = ring.wait_full(number)
        values, metadata, b = operands(slot)
        own_words, read_ahead = load_words(metadata, read_ahead)
        carry = wgmma_sp.step(carry, values, own_words, b, b_transposed=b_transposed)

        @pl.when(number > first_step)
        def _release_the_step_before():
            ring.release(number - 1)

        return carry, read_ahead

    def two_steps(state):
        number, carry = state
        carry, read_ahead = step(number, carry)
        carry, _ = step(number + 1, carry, read_ahead)
        return number + 2, carry

    _, carry = lax.while_loop(lambda state: state[0] < last, two_steps, (first_step, wgmma_sp.start(*sizes)))
    if steps % 2 if odd is None else odd:
        carry, _ = step(last, carry)
    accumulators = wgmma_sp.finish(carry)
    ring.release(last)
    return accumulators
