"""Groups of (token, choice) pairs: how a mixture's tokens are dispatched to its experts, and combined again.

Each of T tokens chooses k experts. Pair t k + j is the j-th choice of token t. Pairs are sorted by expert into Tp
slots, in blocks of v slots that belong to one expert; the last slots of an expert's last block may be padding. No
pair is dropped, whatever the loads.

Along a mesh axis that splits the experts, T counts the tokens of all devices. Each of them gathers the tokens, and has
slots for all pairs, since all might choose its experts; it fills those of the pairs that do. What the devices compute
is summed over them, and each keeps the sums of its own tokens, To of them.

Every function gathers, gradients included: a token's k slots are known by position, so nothing is scattered.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from sparse_lm import collectives
from sparse_lm.ops import row_order
from sparse_lm.ops.checks import check_ids, check_order
from sparse_lm.ops.formats import HiddenStats
from sparse_lm.ops.row_order import RowOrder
from sparse_lm.recipes.routing import dispatch_order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """An order of T k pairs in Tp slots.

    Attributes:
      rows: the order: a row is a pair. One of another device's expert has no slot.
      block_experts: int32[Tp / v], the expert of each block, ascending. Blocks that hold no pair are padding, and
        belong to the last expert.
      v: slots of a block.
      experts: E, of this device.
      choices: k, of each token.
      axis: the mesh axis that splits the experts; None for none.
    """

    rows: RowOrder
    block_experts: Array
    v: int = dataclasses.field(metadata=dict(static=True))
    experts: int = dataclasses.field(metadata=dict(static=True))
    choices: int = dataclasses.field(metadata=dict(static=True))
    axis: str | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def pairs(self) -> int:
        """Counts the pairs, T k."""
        return self.rows.position.shape[0]

    def total(self, seen: HiddenStats) -> HiddenStats:
        """Sums over devices what was seen of their experts' hidden layers."""
        return collectives.total(seen, self.axis)

    @jax.named_call
    def dispatch(self, x: Float[Array, "T D"], gates: Float[Array, "T k"] | None = None) -> Float[Array, "slots D"]:
        """Moves tokens to their slots, each k times, scaled by gates if there are any. Padded slots are zero."""
        of_slots = None if gates is None else row_order.dispatch(gates.reshape(-1), self.rows)
        return row_order.take_rows(x, self.rows.slots // self.choices, of_slots)

    @jax.named_call
    def combine(self, o: Float[Array, "pairs D"], gates: Float[Array, "T k"] | None = None) -> Float[Array, "To D"]:
        """Sums a token's k pairs, scaled by gates if there are any, in float32; over devices in the dtype of o."""
        by_token = self._by_token(o)
        of_device = jnp.sum(by_token if gates is None else gates[..., None] * by_token, axis=1).astype(o.dtype)
        return collectives.scatter_sum(of_device, self.axis)

    def gate_gradients(self, y_dy: Float[Array, " slots"], gates: Float[Array, "T k"]) -> Float[Array, "To k"]:
        """Computes the gradient of the gates of `combine` from the sums of Y dY over each slot's neurons.

        A pair's O = Y W2 and, since dO was dispatched with the gate, dY = gate dO W2^T. So gate O dO = Y dY, and O need
        not be kept. A gate of 0 gets none.
        """
        of_pairs = row_order.combine(y_dy[:, None], self.rows)
        of_device = jnp.where(gates != 0, self._by_token(of_pairs)[..., 0] / gates, 0)
        return collectives.scatter_sum(of_device, self.axis)

    def blocks_with_pairs(self) -> Array:
        """Returns bool[Tp / v]: the blocks that are not all padding."""
        return self.rows.slots[:: self.v] < self.pairs  # a block is filled from its first slot on

    def _by_token(self, o: Array) -> Array:
        if self.axis:
            o = jnp.where((self.rows.position < self.rows.slots.shape[0])[:, None], o, 0)
        return o.reshape(-1, self.choices, o.shape[-1]).astype(jnp.float32)


def fitting_block(most: int, pairs: int, experts: int) -> int:
    """Chooses v, `most` or less: few tokens, as in generation, take blocks that are not mostly padding.

    A smaller one is a power of two, at most what an expert has of an even load.
    """
    return min(most, 1 << max(0, (pairs // experts).bit_length() - 1))


@jax.named_call
def group_by_expert(
    chosen: Int32[Array, "T k"], experts: int, v: int, order: Int32[Array, " T"] | None = None, axis: str | None = None
) -> Groups:
    """Groups pairs by the expert that they chose, in 0 .. E - 1, in blocks of v slots; a token's choices are distinct.

    An expert takes its tokens in the order of a permutation, their own by default. `axis` is the mesh axis that splits
    the E experts of all devices: gather `chosen` along it. That experts are in 0 .. E - 1 is not checked: others
    displace pairs.

    Raises:
      ValueError: `chosen` is not int32 [T, k], `order` not an integer [T], E or v not positive, or E not split evenly.
    """
    check_ids("chosen", chosen)
    check_order(order, len(chosen))
    if v < 1 or experts < 1:
        raise ValueError(f"v = {v} and experts = {experts} must be positive")
    if experts % collectives.size(axis):
        raise ValueError(f"experts = {experts} must be split evenly by the mesh's axis {axis!r}")
    choices = chosen.shape[1]
    if axis:
        experts //= collectives.size(axis)
        here = chosen - collectives.index(axis) * experts
        chosen = jnp.where((here >= 0) & (here < experts), here, experts)
    if order is not None:
        order = (order[:, None] * choices + jnp.arange(choices, dtype=jnp.int32)).reshape(-1)
    rows, block_experts = dispatch_order(chosen.reshape(-1), experts, v, order)
    return Groups(rows, block_experts, v, experts, choices, axis)
