"""2:4 weights by soft threshold, as several recipes use them (S-STE, 2409.09099).

S(w) = sign(w) max(|w| - t, 0), with t the second smallest magnitude of each group of four, is continuous in w, so
patterns do not flip abruptly. The forward uses beta S(W). Beta brings S(W) closest to W when the sparse phase starts,
and then stays: a moving one makes patterns flip. Gradients pass straight through to W.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from sparse_lm import ops
from sparse_lm.ops import select
from sparse_lm.recipes.base import Recipe
from sparse_lm.recipes.weight_forms import WeightForms, soft_threshold_forms


class Scales(NamedTuple):
    """Beta of each weight."""

    scale_up: Array  # f32[]
    scale_down: Array  # f32[]


def soft_threshold(w: Array, axis: int = -1) -> Array:
    """Computes S(w) of a matrix [F, D], dense, in float32; groups of four run along `axis`, -1 for D or 0 for F."""
    members = select.soft_threshold(select.split_groups(w.astype(jnp.float32), axis))
    return jnp.stack(members, axis=1 if axis == 0 else 2).reshape(w.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftThreshold24(Recipe):
    """Base of the recipes whose weights are 2:4 by soft threshold, with scales in their state."""

    State: ClassVar[type] = Scales
    sparse_weights = True
    axis_down: ClassVar[int] = -1
    """Along which axis of W2 [F, D] groups of four run: -1 for D, 0 for F. Those of W1 run along D."""

    def init_state(self, w1: Array, w2: Array) -> Any:
        return Scales(jnp.full((), jnp.nan, jnp.float32), jnp.full((), jnp.nan, jnp.float32))

    def enter(self, w1: Array, w2: Array, x: Array | None = None) -> tuple[Any, Array | None]:
        self.check(w1, w2, x)
        return self.fit_scales(w1, w2), None

    def fit_scales(self, w1: Array, w2: Array) -> Scales:
        """Fits beta of each weight as it now is; 1 for a weight that is 2:4 already."""
        return Scales(ops.soft_threshold_scale(w1), ops.soft_threshold_scale(w2, self.axis_down))

    def refit(self, w1: Array, w2: Array, state: Any) -> Any:
        self.check_entered(w1, w2, state)
        return state._replace(**self.fit_scales(w1, w2)._asdict())

    def leave(self, w1: Array, w2: Array, state: Any, x: Array | None = None) -> tuple[Array, Array]:
        self.check_entered(w1, w2, state, x)
        left = state.scale_up * soft_threshold(w1), state.scale_down * soft_threshold(w2, self.axis_down)
        return left[0].astype(w1.dtype), left[1].astype(w2.dtype)

    def kept_weights(self, w1: Array, w2: Array) -> dict[str, Array]:
        return {"up": soft_threshold(w1) != 0, "down": soft_threshold(w2, self.axis_down) != 0}

    def prepare(self, w1: Array, w2: Array, state: Any, dtype: DTypeLike) -> tuple[WeightForms, WeightForms]:
        up = soft_threshold_forms(w1, state.scale_up, dtype, self.implementation)
        return up, soft_threshold_forms(w2, state.scale_down, dtype, self.implementation, axis=self.axis_down)
