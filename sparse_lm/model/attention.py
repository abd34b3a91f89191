"""Causal self-attention with rotary positions (2104.09864) and grouped key-value heads (2305.13245).

Axes: B sequences, S positions, C positions of a cache, D model width, N query heads, K key-value
heads, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from sparse_lm.collectives import ONE_DEVICE, Axes, enter_tensor, leave_tensor, read, read_replicated
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers
from sparse_lm.model.linear import linear
from sparse_lm.ops.norm import rms_norm

ATTENTION_OUTPUT = "attention_output"  # what rematerialisation policies call it
ROTATED = "rotated"  # what they call the queries and keys that it takes


class KVCache(NamedTuple):
    """Keys (rotated) and values of earlier positions, [B, C, K, H] each; a model's have a leading axis of layers."""

    keys: Array
    values: Array


class Attention(nnx.Module):
    """Projections `q` [N H, D], `k` and `v` [K H, D], `o` [D, N H], all float32 and without bias.

    They have the layout of `torch.nn.Linear`, and heads rotate as in Hugging Face's Llama, so that
    weights move between the two by plain copies. With `ModelConfig.qk_norm`, scales `q_norm` and `k_norm` [H] besides.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q = nnx.Param(initializers.matrix(rngs.params(), width, config.dim))
        self.k = nnx.Param(initializers.matrix(rngs.params(), kv_width, config.dim))
        self.v = nnx.Param(initializers.matrix(rngs.params(), kv_width, config.dim))
        self.o = nnx.Param(initializers.residual_matrix(rngs.params(), config.dim, width, config.layers))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(config.head_width))
            self.k_norm = nnx.Param(jnp.ones(config.head_width))

    @functools.partial(jax.named_call, name="attention")
    def __call__(self, x: Array, mask: Array | None = None, axes: Axes = ONE_DEVICE) -> Array:
        """Attends in whole sequences: [B, S, D] -> [B, S, D]. On a mesh, each device along `tensor` has some heads.

        `mask`, bool[B, 1, S, S], says which positions may see which of the earlier ones; all by default.
        """
        q, k, v = self._project(enter_tensor(x, axes), jnp.arange(x.shape[1]), axes)
        return leave_tensor(self._output(causal_attention(q, k, v, mask), axes), axes)

    def extend(self, x: Array, cache: KVCache, start: Array) -> tuple[Array, KVCache]:
        """Computes the positions start .. start + S - 1, [B, S, D], of sequences whose earlier positions are cached.

        What the cache holds from `start` on is overwritten or not attended to. Returns it filled up to start + S, too.
        """
        positions = start + jnp.arange(x.shape[1])
        q, k, v = self._project(x, positions)
        cache = KVCache(
            lax.dynamic_update_slice_in_dim(cache.keys, k, start, axis=1),
            lax.dynamic_update_slice_in_dim(cache.values, v, start, axis=1),
        )
        visible = jnp.arange(cache.keys.shape[1]) <= positions[:, None]  # [S, C]
        heads = jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=visible[None, None])
        return self._output(heads), cache

    def _project(self, x: Array, positions: Array, axes: Axes = ONE_DEVICE) -> tuple[Array, Array, Array]:
        """Makes queries [B, S, N, H], keys and values [B, S, K, H], the first two rotated and perhaps normed."""

        def norm(heads: Array, scale: nnx.Param) -> Array:
            # A scale serves the heads of all devices along `tensor`, each of which has some.
            scale_of_all = enter_tensor(read_replicated(scale[...], axes), axes)
            return rms_norm(heads, scale_of_all, self.config.norm_epsilon)

        projected = self._linear(x, (self.q, self.k, self.v), axes)
        q, k, v = (p.reshape(*x.shape[:2], -1, self.config.head_width) for p in projected)
        if self.config.qk_norm:
            q, k = norm(q, self.q_norm), norm(k, self.k_norm)
        q, k = (checkpoint_name(rotate(h, positions, self.config.rope_theta), ROTATED) for h in (q, k))
        return q, k, v

    def _output(self, heads: Array, axes: Axes = ONE_DEVICE) -> Array:
        """Projects [B, S, N, H] -> [B, S, D]."""
        return self._linear(heads.reshape(*heads.shape[:2], -1), (self.o,), axes)[0]

    def _linear(self, x: Array, weights: Sequence[nnx.Param], axes: Axes) -> list[Array]:
        """Projects [B, S, inputs] -> [B, S, outputs] of each weight."""
        return linear(x, [read(w[...].astype(x.dtype), axes) for w in weights], self.config.precision)


@jax.named_call
def causal_attention(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Computes softmax(q k^T / sqrt(H)) v over positions up to one's own: [B, S, N, H] from k and v [B, S, K, H].

    A bool `mask` [B, 1, S, S] takes more positions away.
    """
    if attention_implementation(q.dtype, q.shape[-1]) == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    heads = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")
    return checkpoint_name(heads, ATTENTION_OUTPUT)


def document_mask(tokens: Array, separator: int) -> Array:
    """Makes bool[B, 1, S, S] of tokens int32[B, S]: true where two positions are in the same document.

    A separator opens the document behind it, whose first token is predicted from the separator alone.
    """
    documents = jnp.cumsum(tokens == separator, axis=1)
    return documents[:, None, :, None] == documents[:, None, None, :]


def attention_implementation(dtype: jnp.dtype, head_width: int) -> str:
    """Returns "cudnn" for what its flash attention takes, half precision on Ampere or newer, and "xla" for all else."""
    device = jax.devices()[0]
    if not device.device_kind.startswith("NVIDIA") or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    generation = int(device.compute_capability.split(".")[0])
    widest = 256 if generation >= 9 else 128
    return "cudnn" if generation >= 8 and head_width % 8 == 0 and head_width <= widest else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
@jax.named_call
def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotates heads [B, S, heads, H] by positions int32[S], their two halves as real and imaginary parts, in float32.

    Dimension i of H / 2 turns by theta^(-2 i / H) a position. The result has the dtype of x.
    """
    return _turn(x, positions, theta)


def _turn(x: Array, positions: Array, theta: float) -> Array:
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies  # [S, 1, H / 2]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    # Halves that are computed apart and then joined make two passes; one expression for both makes one.
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)  # real, imaginary
    rotated = parts * cos + parts[..., ::-1, :] * jnp.concatenate([-sin, sin], axis=-2)
    return rotated.reshape(x.shape).astype(x.dtype)


@functools.partial(jax.named_call, name="rotate")
def _rotate_backward(theta, positions, cotangent):
    # A turn the other way. Derived from the rotation, it would take more passes over memory.
    return _turn(cotangent, -positions, theta), None


rotate.defvjp(lambda x, positions, theta: (rotate(x, positions, theta), positions), _rotate_backward)
