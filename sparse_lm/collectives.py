"""Collectives of one shard of a model, each with the backward pass that goes with it.

A model on a mesh runs under `shard_map`: every device calls the same functions on its own shards, and
what crosses devices is written out here. Sequences are split over the batch axes, the rows of stored
matrices over `fsdp` (and `tensor`), attention heads and FFN neurons over `tensor`, a mixture's experts over `expert`.
Without axes every function returns its argument, so that a single device compiles what it would without this module.

Gradients are sums over the shards: a shard's loss is its part of the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

GATHERED = "gathered"  # what rematerialisation policies call a matrix that was put together of its shards


@dataclasses.dataclass(frozen=True)
class Axes:
    """Names of the mesh axes that hold more than one device."""

    batch: tuple[str, ...] = ()  # split sequences, major first; `fsdp` and `expert` are among them
    fsdp: str | None = None  # splits the rows of stored matrices, which are gathered where they are read
    tensor: str | None = None  # splits attention heads and FFN neurons
    expert: str | None = None  # splits a mixture's experts, which compute the tokens of all devices along it

    def __post_init__(self) -> None:
        if not isinstance(self.batch, tuple):
            raise ValueError(f"batch = {self.batch!r} must be a tuple of names, such as ('data',)")

    @property
    def of_experts(self) -> Axes:
        """Returns the axes between which experts are the same, each with tokens of its own: no longer `expert`."""
        return dataclasses.replace(self, batch=tuple(name for name in self.batch if name != self.expert))

    @property
    def all(self) -> tuple[str, ...]:
        return self.batch + ((self.tensor,) if self.tensor else ())


ONE_DEVICE = Axes()


def size(names: tuple[str, ...] | str | None) -> int:
    """Counts the devices along mesh axes, inside a `shard_map`; 1 along none."""
    return lax.axis_size(names) if names else 1


def index(names: tuple[str, ...] | str | None) -> Array | int:
    """Returns this device's place along mesh axes; 0 along none."""
    return lax.axis_index(names) if names else 0


def _with_gradient(of_x: Callable[..., Array]) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Makes `of_x(cotangent, axes, ...)` the gradient of a function of x, the mesh's axes and what else is static."""

    def decorate(function: Callable[..., Array]) -> Callable[..., Array]:
        static = range(1, function.__code__.co_argcount)
        differentiable = jax.custom_vjp(function, nondiff_argnums=tuple(static))
        differentiable.defvjp(
            lambda x, *options: (function(x, *options), None),
            lambda *arguments: (of_x(arguments[-1], *arguments[:-2]),),
        )
        return differentiable

    return decorate


def read(w: Array, axes: Axes, dtype: DTypeLike | None = None) -> Array:
    """Returns a whole parameter of its shard, [rows / fsdp, ...] -> [rows, ...]: other devices' rows are gathered.

    Values and gradients travel in `dtype`, that of w by default. The gradient is summed over all that read it, each
    shard's part where it is stored.
    """
    return _read(w, axes, jnp.dtype(dtype or w.dtype)) if axes.batch else w


@_with_gradient(lambda g, axes, dtype: sum_gradient(g.astype(dtype), axes).astype(g.dtype))
def _read(w: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    if not axes.fsdp:
        return w
    return checkpoint_name(gather(w.astype(dtype), axes.fsdp).astype(w.dtype), GATHERED)


@_with_gradient(lambda g, axes: total(g, axes.batch))
def read_replicated(w: Array, axes: Axes) -> Array:
    """Returns a parameter that every device stores whole. Its gradient is summed over the batch axes."""
    return w


def gather(x: Array, names: tuple[str, ...] | str | None, axis: int = 0) -> Array:
    """Puts together the shards along mesh axes, one after the other along `axis`."""
    return lax.all_gather(x, names, axis=axis, tiled=True) if names else x


def scatter_sum(x: Array, names: tuple[str, ...] | str | None) -> Array:
    """Sums [rows, ...] over mesh axes, of which each device keeps its shard of the rows."""
    return lax.psum_scatter(x, names, scatter_dimension=0, tiled=True) if names else x


def sum_gradient(gradient: Array, axes: Axes) -> Array:
    """Turns [rows, ...], one of each shard of the batch, into the sum's [rows / fsdp, ...] that is stored here."""
    gradient = scatter_sum(gradient, axes.fsdp)
    return total(gradient, tuple(name for name in axes.batch if name != axes.fsdp))


@_with_gradient(lambda g, axes: total(g, axes.tensor))
def enter_tensor(x: Array, axes: Axes) -> Array:
    """Hands what all devices along `tensor` have to each one's heads or neurons: gradients add up."""
    return x


@_with_gradient(lambda g, axes: g)
def leave_tensor(x: Array, axes: Axes) -> Array:
    """Sums what each device along `tensor` computed with its own heads or neurons."""
    return total(x, axes.tensor)


@_with_gradient(lambda g, axes: gather(g, axes.tensor))
def split_over_tensor(x: Array, axes: Axes) -> Array:
    """Takes this device's share of rows that all devices along `tensor` have: [T, ...] -> [T / tensor, ...]."""
    if not axes.tensor:
        return x
    rows = x.shape[0] // size(axes.tensor)
    return lax.dynamic_slice_in_dim(x, index(axes.tensor) * rows, rows)


def total(tree: Any, names: tuple[str, ...] | str | None) -> Any:
    """Sums over mesh axes; every device along them has it. `leave_tensor` is what automatic differentiation takes."""
    return lax.psum(tree, names) if names else tree


def mean(tree: Any, names: tuple[str, ...]) -> Any:
    """Takes the mean over mesh axes; every device along them has it."""
    return lax.pmean(tree, names) if names else tree
