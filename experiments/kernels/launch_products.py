"""Launches the Hopper products, and cuBLAS' of some of their shapes through XLA, for `counters` to profile."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.kernels.nsight_compute import profiled
from experiments.kernels.shapes import SHAPES_24, SHAPES_VENOM, SLICES
from experiments.kernels.timing import random_24, random_matrix, random_venom, slice_ids
from sparse_lm.ops import hopper

LAUNCHED = flags.DEFINE_string("launched", None, "JSON file to write: what is launched, in order.", required=True)

LAUNCHES = 3  # of each product
_V = 128

Product = tuple[dict, Callable, tuple]  # what it is, the function, its operands


def products_24() -> Iterator[Product]:
    for m, n, k in SHAPES_24[:2]:
        shape, b = dict(m=m, n=n, k=k), random_matrix(k, n, seed=1)
        yield dict(product="cuBLAS", **shape), jnp.matmul, (random_matrix(m, k, seed=2), b)
        yield dict(product="matmul_24", **shape), hopper.matmul_24, (random_24(m, k, seed=0), b)


def products_venom() -> Iterator[Product]:
    for t, f, d in SHAPES_VENOM:
        b = random_matrix(f, d, seed=1)
        yield dict(product="cuBLAS", m=t, n=d, k=f), jnp.matmul, (random_matrix(t, f, seed=2), b)
        for m in (8, 16):
            label = dict(product="matmul_venom", t=t, f=f, d=d, v=_V, m=m)
            yield label, hopper.matmul_venom, (random_venom(t, f, _V, m, seed=0), b)


def products_of_slices() -> Iterator[Product]:
    """Yields the products of slices, and `matmul_24` with the operations of the scattered one."""
    for shape in SLICES:
        label = dict(t=shape.tokens, f=shape.neurons, d=shape.dim, v=shape.v, run=shape.kept)
        ids, x = slice_ids(shape, seed=0), random_matrix(shape.tokens, shape.dim, seed=1)
        sampled = functools.partial(hopper.sampled_matmul_24, v=shape.v, contiguous=shape.kept)
        w = random_24(shape.neurons, shape.dim, seed=0)
        yield dict(product="sampled_matmul_24", **label), sampled, (w, x, ids)
        scattered = functools.partial(hopper.scattered_matmul_24, v=shape.v, rows=shape.neurons, contiguous=shape.kept)
        a = random_24(shape.kept, shape.tokens, seed=5)
        yield dict(product="scattered_matmul_24", **label), scattered, (a, x, ids)
        share = shape.tokens // shape.experts
        label = dict(product="matmul_24", m=shape.neurons, n=shape.dim, k=share)
        yield label, hopper.matmul_24, (random_24(shape.neurons, share, seed=4), x[:share])


KINDS = {"24": products_24, "venom": products_venom, "slices": products_of_slices}
KIND = flags.DEFINE_enum("kind", None, list(KINDS), "Which products to launch.", required=True)


def main(_) -> None:
    products = [(label, jax.jit(function), operands) for label, function, operands in KINDS[KIND.value]()]
    for _, product, operands in products:  # what compiles or tunes must not be profiled
        jax.block_until_ready(product(*operands))
    with profiled():
        for _, product, operands in products:
            for _ in range(LAUNCHES):
                jax.block_until_ready(product(*operands))
    launched = [label for label, *_ in products for _ in range(LAUNCHES)]
    pathlib.Path(LAUNCHED.value).write_text(json.dumps(launched))


if __name__ == "__main__":
    app.run(main)
