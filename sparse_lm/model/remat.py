"""Chooses what the backward pass of a layer recomputes, by name.

none       everything is saved.
full       only the layer's input is saved.
save_dots  also attention's result, what the backward pass needs of the matrix products' results,
           queries and keys as rotated, the hidden layer of FFNs, compressed where sparse, the residual
           between attention and FFN, and the norms' statistics, from which the norms are recomputed;
           where a kernel computes them, the norms themselves.

Saving less can be faster, since what is saved is written and read once more.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from sparse_lm.collectives import GATHERED
from sparse_lm.model.attention import ATTENTION_OUTPUT, ROTATED
from sparse_lm.model.linear import SCALED
from sparse_lm.ops.norm import SAVED
from sparse_lm.recipes.differentiable import RESIDUALS

_policies = jax.checkpoint_policies


def _is_flash_attention(primitive, *_, **__) -> bool:
    """Recognises cuDNN's forward. Its backward needs the softmax statistics too, so it is saved whole, not by name."""
    return primitive.name.startswith("dot_product_attention_fwd")


_results = _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _is_flash_attention)
_named = _policies.save_only_these_names(ATTENTION_OUTPUT, RESIDUALS, ROTATED, SCALED, SAVED)
POLICIES = {
    "full": _policies.nothing_saveable,
    "save_dots": _policies.save_from_both_policies(_results, _named),
}


def remat(layer: Callable, name: str, *, unrolled: bool = False, gathers: bool = False) -> Callable:
    """Rematerialises `layer`, the body of a scan (`unrolled` or not), under the policy called `name`.

    Matrices that it `gathers` of other devices' shards are gathered again under every policy.
    """
    if name == "none" and not gathers:
        return layer
    policy = _policies.save_anything_except_these_names(GATHERED) if name == "none" else POLICIES[name]
    # Inside a loop the compiler cannot merge the recomputation with the forward: no need to forbid it.
    return jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)
