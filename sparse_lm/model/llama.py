"""A Llama (2302.13971): pre-norm transformer layers with RMSNorm, rotary attention and an FFN.

Axes: B sequences, S positions, D model width, V vocabulary, L layers, F neurons, T = B S tokens.

The parameters of all layers are stacked on a leading axis L, and a scan runs one layer after the other, so that one
layer is compiled. Parameters are float32; a layer casts them to the dtype of the computation where it reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from sparse_lm import collectives, ops
from sparse_lm.collectives import ONE_DEVICE, Axes, read, read_replicated
from sparse_lm.config import ModelConfig
from sparse_lm.model import initializers
from sparse_lm.model.attention import Attention, KVCache, document_mask
from sparse_lm.model.ffn import Ffn, FfnInputs
from sparse_lm.model.loss import unembed
from sparse_lm.model.mixture import BIAS, Mixture
from sparse_lm.model.remat import remat
from sparse_lm.recipes import DENSE, Recipe
from sparse_lm.recipes.weight_forms import WeightForms

Params = dict[str, Any]
"""Parameters as nested dicts of f32 arrays:

    embed/embedding [V, D]    norm [D]    unembed [V, D] (absent if tied to the embedding)
    layers/attention_norm [L, D]    layers/attention/{q, k, v, o} [L, outputs, inputs]
    layers/ffn_norm [L, D]          layers/ffn/{up, down} [L, F, D]; with a gate, up is [L, 2 F, D]

With `ModelConfig.qk_norm`, layers/attention has {q_norm, k_norm} [L, H]. Of a mixture, up and down are [L, E Fe, D],
and layers/ffn has router [L, E, D], router_bias [L, E] and perhaps {shared_up, shared_down} [L, Fs, D].
"""

_OF_FEW_TOKENS = dict(implementation="reference")  # texts are decoded under vmap: a kernel would take one at a time


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = nnx.Param(jnp.ones(config.dim))
        self.attention = Attention(config, rngs)
        self.ffn_norm = nnx.Param(jnp.ones(config.dim))
        self.ffn = (Mixture if config.experts else Ffn)(config, rngs)

    def __call__(
        self, x: Array, ffn_inputs: FfnInputs, mask: Array | None = None, *, recipe: Recipe, axes: Axes = ONE_DEVICE
    ) -> tuple[Array, dict[str, Array]]:
        """Computes [B, S, D] -> [B, S, D] and the FFN's statistics; `mask` is that of `Attention`."""
        x, normed = _add_norm(x, None, self.attention_norm, self.config, axes)
        return self._add_ffn(x, self.attention(normed, mask, axes), ffn_inputs, recipe, axes)

    def extend(
        self, x: Array, cache: KVCache, start: Array, ffn_inputs: FfnInputs, recipe: Recipe
    ) -> tuple[Array, KVCache]:
        """Computes the next positions of cached sequences; see `Attention.extend`."""
        x, normed = _add_norm(x, None, self.attention_norm, self.config, **_OF_FEW_TOKENS)
        attended, cache = self.attention.extend(normed, cache, start)
        return self._add_ffn(x, attended, ffn_inputs, recipe, **_OF_FEW_TOKENS)[0], cache

    def _add_ffn(self, x, attended, ffn_inputs, recipe, axes=ONE_DEVICE, **options):
        x, normed = _add_norm(x, attended, self.ffn_norm, self.config, axes, **options)
        out, stats = self.ffn(normed.reshape(-1, x.shape[-1]), ffn_inputs, recipe=recipe, axes=axes)  # of [T, D]
        return x + out.reshape(x.shape), stats


class Embedding(nnx.Module):
    """A table of one vector a token: `embedding` f32[V, D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(initializers.matrix(rngs.params(), config.vocab_size, config.dim))

    @functools.partial(jax.named_call, name="embed")
    def __call__(self, tokens: Array, axes: Axes = ONE_DEVICE) -> Array:
        """Computes int32[...] -> [..., D] in the computation's dtype."""
        # Cast after the lookup, not before: the gradient is then scattered in float32, which a GPU adds atomically in
        # hardware. In bfloat16 each addition is a compare-and-swap loop, and tokens that occur often queue up.
        return read(self.embedding[...], axes, self.config.dtype)[tokens].astype(self.config.dtype)


class Llama(nnx.Module):
    """Turns tokens into the hidden states of which the unembedding makes logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = nnx.vmap(lambda key: Layer(config, nnx.Rngs(key)))(jax.random.split(rngs.params(), config.layers))
        self.norm = nnx.Param(jnp.ones(config.dim))
        if not config.tie_embeddings:
            self.unembed = nnx.Param(initializers.matrix(rngs.params(), config.vocab_size, config.dim))

    def __call__(
        self,
        tokens: Array,
        *,
        recipe: Recipe = DENSE,
        recipe_state: Any = None,
        key: Array | None = None,
        weights: tuple[WeightForms, WeightForms] | None = None,
        dense_layers: int = 0,
        axes: Axes = ONE_DEVICE,
    ) -> tuple[Array, dict[str, Array]]:
        """Computes the hidden states after the final norm. On a mesh, parameters and tokens are this device's shards.

        With a `document_separator` tokens see their own document only. Positions go on over the whole sequence, as
        attention depends on their differences.

        Args:
          tokens: int32[B, S].
          recipe: computes every FFN.
          recipe_state: the recipe's state of all layers, stacked on a leading axis L; None if it has none.
          key: random key; training needs one.
          weights: the forms, in the computation's dtype, that `prepare_weights` makes of the float32 weights of all
            layers; made here by default.
          dense_layers: how many layers, the first ones, have dense FFNs whatever the recipe.

        Returns:
          hidden: [B, S, D] in the computation's dtype.
          stats: the FFNs' statistics, each with a leading axis L. What only sparse FFNs have is zero in dense layers.
        """
        graphdef, layers = nnx.split(self.layers)
        keys = None if key is None else jax.random.split(key, self.config.layers)
        # One order for all layers: to draw one takes longer than a layer's routing.
        routed = tokens.size * collectives.size(axes.expert)
        order = jax.random.permutation(key, routed) if key is not None and recipe.takes_order else None
        weights = weights or self.prepare_weights(recipe, recipe_state)
        separator = self.config.document_separator
        mask = document_mask(tokens, separator) if separator >= 0 else None  # one for all layers

        def layer(x, inputs, recipe):
            params, state, key, number = inputs
            ffn_inputs = FfnInputs(state, key, order, weights if recipe.sparse_weights else None, number)
            return nnx.merge(graphdef, params)(x, ffn_inputs, mask, recipe=recipe, axes=axes)

        def run(x, inputs, recipe):
            unrolled = self.config.unroll_layers
            one = functools.partial(layer, recipe=recipe)
            one = remat(one, self.config.remat, unrolled=unrolled, gathers=axes.fsdp is not None)
            return lax.scan(one, x, inputs, unroll=unrolled)

        inputs = layers, recipe_state, keys, jnp.arange(self.config.layers)
        x, stats = _run_layers(run, self.embed(tokens, axes), inputs, recipe, dense_layers)
        return _add_norm(x, None, self.norm, self.config, axes)[1], stats

    def prepare_weights(self, recipe: Recipe, recipe_state: Any) -> tuple[WeightForms, WeightForms] | None:
        """Brings the FFN weights of all layers to the forms that a recipe reads; None if its weights are dense."""
        if not recipe.sparse_weights:
            return None
        # Gradients pass straight through every selection, to the weights that each layer is given.
        up, down = lax.stop_gradient((self.layers.ffn.up[...], self.layers.ffn.down[...]))
        return recipe.prepare(up, down, recipe_state, self.config.dtype)

    def extend(
        self,
        tokens: Array,
        cache: KVCache,
        start: Array,
        *,
        recipe: Recipe = DENSE,
        recipe_state: Any = None,
        weights: tuple[WeightForms, WeightForms] | None = None,
        dense_layers: int = 0,
    ) -> tuple[Array, KVCache]:
        """Computes the hidden states [B, S, D] of the next positions of cached sequences; returns the cache, too.

        Tokens int32[B, S] are at positions start .. start + S - 1. The cache of all layers is filled up to `start`, and
        then up to start + S. A sequence is one document, whatever the `document_separator`. Other arguments are those
        of a call.
        """
        graphdef, layers = nnx.split(self.layers)
        weights = weights or self.prepare_weights(recipe, recipe_state)

        def layer(x, inputs, recipe):
            params, cache, state, number = inputs
            ffn_inputs = FfnInputs(state, weights=weights if recipe.sparse_weights else None, layer=number)
            x, cache = nnx.merge(graphdef, params).extend(x, cache, start, ffn_inputs, recipe)
            return x, cache._asdict()

        def run(x, inputs, recipe):
            return lax.scan(functools.partial(layer, recipe=recipe), x, inputs)

        inputs = layers, cache, recipe_state, jnp.arange(self.config.layers)
        x, cache = _run_layers(run, self.embed(tokens), inputs, recipe, dense_layers)
        return _add_norm(x, None, self.norm, self.config, **_OF_FEW_TOKENS)[1], KVCache(**cache)

    def unembedding(self, axes: Axes = ONE_DEVICE) -> Array:
        """Returns f32[V, D]: the embedding itself if tied."""
        table = self.embed.embedding if self.config.tie_embeddings else self.unembed
        return read(table[...], axes, self.config.dtype)

    def logits(self, hidden: Array) -> Array:
        """Computes f32[..., V] of hidden [..., D]."""
        return unembed(hidden, self.unembedding())


def _run_layers(
    run: Callable, x: Array, inputs: Any, recipe: Recipe, dense_layers: int
) -> tuple[Array, dict[str, Array]]:
    """Calls `run(x, inputs, recipe)` for all layers, or for the first, dense ones and then for the others.

    Returns x, and arrays [L, ...] by name, which are zero in dense layers that have none of the name.
    """
    if not dense_layers or not recipe.products:
        return run(x, inputs, recipe)
    # Unrolled, the two parts cost nothing. A loop reads its weights in one piece, here a copy of them.
    x, first = run(x, jax.tree.map(lambda a: a[:dense_layers], inputs), DENSE)
    x, others = run(x, jax.tree.map(lambda a: a[dense_layers:], inputs), recipe)
    for name, array in others.items():
        none = jnp.zeros((dense_layers, *array.shape[1:]), array.dtype)
        others[name] = jnp.concatenate([first.get(name, none), array])
    return x, others


def _add_norm(
    x: Array, update: Array | None, scale: nnx.Param, config: ModelConfig, axes: Axes = ONE_DEVICE, **options: Any
) -> tuple[Array, Array]:
    """Computes x + update, or x if there is none, and its norm; `options` are the op's."""
    return ops.add_norm(x, update, read_replicated(scale[...], axes), config.norm_epsilon, **options)


def init(config: ModelConfig, key: Array) -> tuple[nnx.GraphDef, Params]:
    """Makes a model's structure and its initial parameters; see `initializers` for their distribution."""
    graphdef, state = nnx.split(Llama(config, nnx.Rngs(key)))
    return graphdef, nnx.to_pure_dict(state)


def graphdef(config: ModelConfig) -> nnx.GraphDef:
    """Makes a model's structure alone; no parameters are computed."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))[0]


def merge(graphdef: nnx.GraphDef, params: Params) -> Llama:
    """Returns the model with these parameters."""
    return nnx.merge(graphdef, params)


def is_matrix(path: Sequence[jax.tree_util.DictKey]) -> bool:
    """Returns whether the parameter at `path` is a matrix, and no norm's scale or router's bias.

    Its name tells, its rank does not: the layers' scales are stacked, [L, D] like a matrix.
    """
    return not path[-1].key.endswith("norm") and path[-1].key != BIAS
