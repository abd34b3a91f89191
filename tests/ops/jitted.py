"""The public ops, each compiled as a whole: called outside `jit`, every step of an op compiles alone."""

import dataclasses

import jax
import jax.numpy as jnp

from sparse_lm import ops

condense = jax.jit(ops.condense, static_argnames="v")
soft_threshold_scale = jax.jit(ops.soft_threshold_scale, static_argnames="axis")
sparsify_24 = jax.jit(ops.sparsify_24, static_argnames=("method", "axis", "dtype"))
sparsify_24_tiles = jax.jit(ops.sparsify_24_tiles, static_argnames="dtype")
sparsify_venom = jax.jit(ops.sparsify_venom, static_argnames=("v", "m", "dtype"))
transposable_mask = jax.jit(ops.transposable_mask)
venom_columns = jax.jit(ops.venom_columns, static_argnames=("v", "m"))

dense = jax.jit(lambda sparse: sparse.to_dense())
mask = jax.jit(lambda sparse: dataclasses.replace(sparse, values=jnp.ones_like(sparse.values, bool)).to_dense())
