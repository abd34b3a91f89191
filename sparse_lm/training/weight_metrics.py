"""How a step moves the pattern of the 2:4 weights, for the steps that are logged."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from sparse_lm.ops.ffn_weights import soft_threshold_mask
from sparse_lm.ops.plan import GemmPlan
from sparse_lm.training.mesh.layout import Layout
from sparse_lm.training.step import Metrics, TrainState


class WeightMetrics:
    """Flips of 2:4 decisions over one step (2404.01847), and the energy that 2:4 keeps, by layer.

    Programs of their own, not a branch of the step, which so does the same every time.

    Args:
      plan: of the sparse phase, with weights by soft threshold.
      dense_layers: the first layers, which it leaves dense.
      layout: of the run, None on one device.
    """

    def __init__(self, plan: GemmPlan, dense_layers: int, layout: Layout | None):
        replicated = layout.replicated if layout else None
        bind = dict(plan=plan, dense_layers=dense_layers, layout=layout)
        self._patterns = jax.jit(functools.partial(_patterns, **bind))
        self._compare = jax.jit(functools.partial(_compare, **bind), out_shardings=replicated)

    def before(self, state: TrainState) -> dict[str, Array]:
        """Of the state that the step takes and donates: uint8[L - dense_layers, F, D / 8] of each 2:4 matrix."""
        return self._patterns(state)

    def after(self, patterns: dict[str, Array], state: TrainState) -> Metrics:
        """Of the state that the step returned.

        Returns:
          "flip_rate" f32[L]: decisions that the step changed, as a share of all weights; "kept_weight_energy"
          f32[L]: share of the sum of squares. Of layers that stay dense 0 and 1.
        """
        return self._compare(patterns, state)


def _patterns(state: TrainState, *, plan: GemmPlan, dense_layers: int, layout: Layout | None) -> dict[str, Array]:
    """Which entries are kept, a bit each."""
    names = {matrix: name for name, matrix in (("W1", "up"), ("W2", "down")) if plan.sparse_weight(name)}

    def pack(ffn):
        one = lambda name: lambda w: jnp.packbits(soft_threshold_mask(name, w, plan), axis=-1)  # noqa: E731
        return {matrix: jax.vmap(one(name))(ffn[matrix][dense_layers:]) for matrix, name in names.items()}

    ffn = state.params["layers"]["ffn"]
    if layout:
        specs = layout.specs(ffn)
        pack = layout.local(pack, (specs,), {matrix: specs[matrix] for matrix in names})
    return pack(ffn)


def _compare(
    old: dict[str, Array], state: TrainState, *, plan: GemmPlan, dense_layers: int, layout: Layout | None
) -> Metrics:
    flips, kept = [], []
    for matrix, new in _patterns(state, plan=plan, dense_layers=dense_layers, layout=layout).items():
        weights = state.params["layers"]["ffn"][matrix][dense_layers:]
        energy = jnp.square(weights)
        flipped = jnp.sum(jax.lax.population_count(new ^ old[matrix]), axis=(1, 2), dtype=jnp.int32)
        flips.append(flipped / energy[0].size)
        mask = jnp.unpackbits(new, axis=-1, count=weights.shape[-1])
        kept.append(jnp.sum(energy * mask, axis=(1, 2)) / jnp.sum(energy, axis=(1, 2)))

    def of_all(values: list[Array], of_dense: int) -> Array:
        return jnp.pad(sum(values) / len(values), (dense_layers, 0), constant_values=of_dense)

    return {"flip_rate": of_all(flips, 0), "kept_weight_energy": of_all(kept, 1)}
