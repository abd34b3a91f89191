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


def unfit_scales() -> Scales:
    """Returns the scales before the sparse phase: what is computed with them is NaN."""
    return Scales(jnp.full((), jnp.nan, jnp.float32), jnp.full((), jnp.nan, jnp.float32))


def soft_threshold(w: Array, axis: int = -1) -> Array:
    """Computes S(w) of a matrix [F, D], dense, in float32; groups of four run along `axis`, -1 for D or 0 for F."""
    members = select.soft_threshold(select.split_groups(w.astype(jnp.float32), axis))
    return jnp.stack(members, axis=1 if axis == 0 else 2).reshape(w.shape)


def fit_scales(w1: Array, w2: Array, axis_down: int = -1) -> Scales:
    """Fits beta of each weight [F, D] as it now is; 1 for a weight that is 2:4 already.

    Args:
      w1: groups of four run along D.
      w2: groups of four run along `axis_down`.
      axis_down: -1 for D, 0 for F.
    """
    return Scales(ops.soft_threshold_scale(w1), ops.soft_threshold_scale(w2, axis_down))


def thresholded(w1: Array, w2: Array, scales: Any, axis_down: int = -1) -> tuple[Array, Array]:
    """Returns beta S(W) of both weights, dense; arguments as in `fit_scales`."""
    return scales.scale_up * soft_threshold(w1), scales.scale_down * soft_threshold(w2, axis_down)


def kept(w1: Array, w2: Array, axis_down: int = -1) -> dict[str, Array]:
    """Returns bool[F, D] of both weights: the entries that S keeps; arguments as in `fit_scales`."""
    return {"up": soft_threshold(w1) != 0, "down": soft_threshold(w2, axis_down) != 0}


def check_scales(scales: Any) -> None:
    """Raises ValueError if a scale f32[L] is not a positive number."""
    for name in ("scale_up", "scale_down"):
        scale = getattr(scales, name)
        if not (jnp.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"{name} is not a positive number in every layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftThreshold24(Recipe):
    """Base of the recipes whose weights are 2:4 by soft threshold, with scales in their state."""

    State: ClassVar[type] = Scales
    sparse_weights = True
    axis_down: ClassVar[int] = -1
    """Along which axis of W2 [F, D] groups of four run."""

    def refit(self, w1: Array, w2: Array, state: Any) -> Any:
        return state._replace(**fit_scales(w1, w2, self.axis_down)._asdict())

    def leave(self, w1: Array, w2: Array, state: Any) -> tuple[Array, Array]:
        return thresholded(w1, w2, state, self.axis_down)

    def kept_weights(self, w1: Array, w2: Array) -> dict[str, Array]:
        return kept(w1, w2, self.axis_down)

    def check_state(self, state: Any) -> None:
        check_scales(state)

    def prepare(self, w1: Array, w2: Array, state: Any, dtype: DTypeLike) -> tuple[WeightForms, WeightForms]:
        up = soft_threshold_forms(w1, state.scale_up, dtype, self.implementation)
        return up, soft_threshold_forms(w2, state.scale_down, dtype, self.implementation)
