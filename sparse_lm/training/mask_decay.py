"""FST's masked decay: shrink the weights that the transposable mask prunes (2404.01847, section 4.2)."""

from __future__ import annotations

import optax
from jax import Array

from sparse_lm.ops.ffn_weights import FfnVariables


def masked_decay() -> optax.GradientTransformationExtraArgs:
    """Adds `mask_decay * W * (1 - mask)` to the gradients of the FFN matrices.

    Its place is after clipping and before Adam: on gradients, not on weights, so that Adam's
    normalisation applies to it. `update` takes the keyword arguments

      variables: `FfnVariables` with masks [L, F, D];
      mask_decay: f32[], the factor; 0 in dense phases.
    """

    def update(updates, state, params, *, variables: FfnVariables, mask_decay: Array, **_):
        ffn, masks = params["layers"]["ffn"], {"up": variables.mask_up, "down": variables.mask_down}
        decayed = {
            name: updates["layers"]["ffn"][name] + mask_decay * ffn[name] * ~mask for name, mask in masks.items()
        }
        layers = dict(updates["layers"], ffn=dict(updates["layers"]["ffn"], **decayed))
        return dict(updates, layers=layers), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
