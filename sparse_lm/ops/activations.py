"""Activations of the hidden layer, and their gradients: the squared ReLU, and gates.

A gated FFN has two rows of W1 a neuron, its gate's and then its own, so that W1 is [2 F, D] and H [T, 2 F] has a
neuron's two numbers side by side. However rows are split among devices, a neuron stays whole.

    squared_relu    Y = relu(H)^2 (2109.08668)            saved for the backward pass: Y
    swiglu          Y = silu(G) U (2002.05202)            saved: H
    geglu           Y = gelu(G) U (2002.05202), by tanh   saved: H
    gated_relu2     Y = relu(G)^2 U                       saved: H
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from sparse_lm.ops.formats import HiddenStats

SQUARED_RELU = "squared_relu"
GATES = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gated_relu2": lambda gate: jnp.square(jnp.maximum(gate, 0))}
"""Functions of the gate, by `ModelConfig.activation`; of NaN they and their derivatives are NaN."""
ACTIVATIONS = (SQUARED_RELU, *GATES)


@functools.partial(jax.named_call, name="activate")
def activate(
    h: Float[Array, "T rows"], activation: str, *, squared: bool = False
) -> tuple[Float[Array, "T F"], HiddenStats, Array]:
    """Computes Y; returns with it what is seen of it, all of which is kept, and what the backward pass needs.

    `squared` says that h is relu(H)^2 already. With SiLU and GELU all of Y counts as nonzero: looking takes a pass.
    """
    if activation in GATES:
        y = _gated(activation, *halves(h))
    elif squared:
        y = h
    else:
        y = jnp.square(jax.nn.relu(h))
    if activation in (SQUARED_RELU, "gated_relu2"):
        energy = jnp.sum(jnp.square(y.astype(jnp.float32)))
        seen = HiddenStats(jnp.sum(y != 0, dtype=jnp.float32), energy, energy)
    else:
        seen = HiddenStats(jnp.float32(y.size), jnp.float32(1), jnp.float32(1))
    return y, seen, y if activation == SQUARED_RELU else h


def hidden(saved: Array, activation: str) -> Float[Array, "T F"]:
    """Returns Y, of what `activate` said that the backward pass needs."""
    return saved if activation == SQUARED_RELU else _gated(activation, *halves(saved))


@functools.partial(jax.named_call, name="grad_activation")
def gradient(dy: Float[Array, "T F"], saved: Array, activation: str) -> Float[Array, "T rows"]:
    """Computes dH of dY."""
    if activation == SQUARED_RELU:
        return dy * (2 * jnp.sqrt(saved))
    _, vjp = jax.vjp(functools.partial(_gated, activation), *halves(saved))
    return by_turns(*vjp(dy))


def rows_per_neuron(activation: str) -> int:
    """Returns how many rows of W1 a neuron has."""
    return 2 if activation in GATES else 1


def matrices(activation: str) -> int:
    """Returns how many matrices of [F, D] an FFN has: three with a gate, else two."""
    return 1 + rows_per_neuron(activation)


def _gated(activation: str, gate: Array, up: Array) -> Array:
    return GATES[activation](gate) * up


def halves(h: Float[Array, "T rows"]) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Splits H into the numbers of the gates and the neurons' own."""
    pairs = h.reshape(h.shape[0], -1, 2)
    return pairs[..., 0], pairs[..., 1]


def by_turns(gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T rows"]:
    """Undoes `halves`. Two numbers of 16 bits make a word, as XLA stores those of a stack one at a time, apart."""
    if gate.dtype.itemsize != 2:
        return jnp.stack((gate, up), axis=-1).reshape(gate.shape[0], -1)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in (gate, up))
    return jax.lax.bitcast_convert_type(low | high << 16, gate.dtype).reshape(gate.shape[0], -1)
