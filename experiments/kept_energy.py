r"""How much of the hidden layer sets of neurons keep that are chosen before the up product, by how they are chosen.

    python -m experiments.kept_energy --workdir=runs/dense --checkpoints=150,1500 \
        --output=experiments/results/kept_energy_60m.json

Every token gets 4F/m of F neurons from its cluster alone. The sets are chosen on one batch of a dense
run, and the share of the sum of Y^2 that they keep is measured on another; then what is left of it
after 2:4 within the set. All of it in the dense model: what training makes of the choice is for
`experiments.quality` to say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jax import Array

from experiments.result_files import write_results
from sparse_lm import ops
from sparse_lm.config import Config
from sparse_lm.data.opening import open_data
from sparse_lm.model import llama
from sparse_lm.model.ffn import FfnInputs
from sparse_lm.ops import routing, row_order
from sparse_lm.ops.plan import DENSE
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.workdir import load_config

WORKDIR = flags.DEFINE_string("workdir", None, "A dense run.", required=True)
CHECKPOINTS = flags.DEFINE_list("checkpoints", ["latest"], "Its steps to look at.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)
WINDOWS = flags.DEFINE_integer("windows", 64, "Windows of a batch.")
M = flags.DEFINE_integer("m", 16, "4 of every m neurons are kept.")

CLUSTERS = (4, 16, 64, 256)
RUNS = (64, 128)
ITERATIONS = 10  # of k-means


@functools.partial(jax.jit, static_argnums=0)
def ffn_inputs(config: Config, params: llama.Params, tokens: Array) -> Array:
    """[L, T, D]: what each layer's FFN reads."""
    model = llama.merge(llama.graphdef(config.model), params)
    structure, stacked = nnx.split(model.layers)

    def step(x, weights):
        layer = nnx.merge(structure, weights)
        normed = llama.rms_norm(x, layer.attention_norm[...], config.model.norm_epsilon)
        seen = llama.rms_norm(x + layer.attention(normed), layer.ffn_norm[...], config.model.norm_epsilon)
        return layer(x, FfnInputs(), plan=DENSE, implementation=None)[0], seen.reshape(-1, seen.shape[-1])

    return jax.lax.scan(step, model.embed(tokens), stacked)[1]


def sums(x: Array, up: Array, centres: Array) -> routing.ClusterSums:
    """Sums over each cluster's tokens, of x [T, D] and of its activations by W1 [F, D]."""
    y = jnp.square(jax.nn.relu(x @ up.T.astype(x.dtype)))
    return routing.cluster_sums(x, y, centres, "cosine")


def centres_of_tokens(x: Array, up: Array, clusters: int) -> Array:
    """[E, D] by k-means over tokens."""
    start = sums(x, up, jnp.zeros((clusters, x.shape[1]))).candidates
    return jax.lax.fori_loop(0, ITERATIONS, lambda _, centres: sums(x, up, centres).centroids(centres), start)


def orders(up: Array, energy: Array, runs: int) -> Iterator[tuple[str, Array]]:
    """Orders of the neurons in which neighbours are alike, by what "alike" is measured on."""
    amplitude = jnp.sqrt(energy.T)  # [F, E]
    for name, features, distance in (
        ("weights", up, "cosine"),
        ("energy by cluster, cosine", amplitude, "cosine"),
        ("energy by cluster, l2", amplitude, "l2"),
    ):
        _, run = routing.cluster_neurons(features, runs, key=jax.random.key(1), balanced=True, distance=distance)
        yield name, jnp.argsort(run, stable=True)


def sets(up: Array, energy: Array, m: int) -> Iterator[tuple[str, Array]]:
    """Ways of choosing [E, 4F/m] neurons by their energy [E, F] in each cluster."""
    neurons = energy.shape[1]
    yield "any", jnp.sort(jax.lax.top_k(energy, 4 * neurons // m)[1], axis=-1)
    yield f"4 of each {m}", routing.neuron_sets(energy, m)
    if 4 * len(energy) == m:
        owner = routing.assign_neurons(energy)
        yield "slices by energy", jnp.argsort(owner, stable=True).reshape(len(energy), -1)
    for run in RUNS:
        for name, order in orders(up, energy, neurons // run):
            yield f"runs of {run} by {name}", order[routing.run_sets(energy[:, order], m, run)]


def kept(x: Array, up: Array, centres: Array, columns: Array) -> dict[str, Array]:
    """Shares of the sum of Y^2 that the sets keep, without and with 2:4 along the set, and of the largest cluster."""
    clusters = routing.assign_tokens(x, centres, "cosine")
    energy = jnp.square(jnp.square(jax.nn.relu(x @ up.T.astype(x.dtype)))).astype(jnp.float32)
    of_set = jnp.take_along_axis(energy, columns[clusters], axis=1)
    pairs = jnp.sort(of_set.reshape(len(of_set), -1, 4), axis=-1)[..., 2:]
    return dict(
        set=jnp.sum(of_set) / jnp.sum(energy),
        set_24=jnp.sum(pairs) / jnp.sum(energy),
        largest_load=jnp.max(routing.expert_load(clusters, len(centres))),
    )


@functools.partial(jax.jit, static_argnums=2)
def magnitude_kept(x: Array, up: Array, m: int) -> Array:
    """[L]: the same share for 128:2:m by magnitude, tokens by the nearest of 16 centres of neurons."""

    def of_layer(layer):
        x, up = layer
        centres, _ = routing.cluster_neurons(up, 16, key=jax.random.key(0), balanced=False)
        order = jax.random.permutation(jax.random.key(2), len(x))
        rows = routing.sort_rows(routing.assign_tokens(x, centres, "cosine"), 16, order)
        h = row_order.dispatch(x, rows) @ up.T.astype(x.dtype)
        _, stats = ops.squared_relu_venom(h, 128, m, implementation="reference")
        return stats.kept_energy / stats.energy

    return jax.lax.map(of_layer, (x, up))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def look(x: Array, other: Array, up: Array, centres: str, clusters: int, m: int) -> dict[str, dict[str, Array]]:
    """By way of choosing sets, shares [L] on the tokens `other` [L, T, D] of sets chosen on x."""

    def of_layer(layer):
        x, other, up = layer
        if centres == "tokens":
            places = centres_of_tokens(x, up, clusters)
        else:
            places, _ = routing.cluster_neurons(up, clusters, key=jax.random.key(0), balanced=False)
        energy = sums(x, up, places).energy
        return {name: kept(other, up, places, columns) for name, columns in sets(up, energy, m)}

    return jax.lax.map(of_layer, (x, other, up))


def rows(x: Array, other: Array, up: Array, m: int) -> Iterator[dict]:
    """One row a way of choosing; shares by layer."""
    yield dict(centres="", clusters=16, sets=f"magnitude 128:2:{m}", set_24=magnitude_kept(other, up, m))
    for clusters in CLUSTERS:
        for centres in ("neurons", "tokens"):
            for name, shares in look(x, other, up, centres, clusters, m).items():
                yield dict(centres=centres, clusters=clusters, sets=name, **shares)


def main(_) -> None:
    config = load_config(WORKDIR.value)
    heldout = open_data(config).heldout
    table = []
    for checkpoint in CHECKPOINTS.value:
        params, step = restore_for_dense(
            WORKDIR.value, config, checkpoint if checkpoint == "latest" else int(checkpoint)
        )
        tokens = heldout.read(np.arange(2 * WINDOWS.value))[:, :-1]
        chosen_on, measured_on = (ffn_inputs(config, params, part) for part in np.split(tokens, 2))
        for row in rows(chosen_on, measured_on, params["layers"]["ffn"]["up"], M.value):
            shares = {
                name: np.round(value, 4).tolist() for name, value in row.items() if not isinstance(value, str | int)
            }
            table.append(dict(step=step, **row | shares))
            means = " ".join(f"{name} {np.mean(value):.3f}" for name, value in shares.items())
            print(f"step {step} {row['centres']:8} {row['clusters']:4} {row['sets']:45} {means}", flush=True)
    write_results(OUTPUT.value, dict(m=M.value, rows=table))


if __name__ == "__main__":
    app.run(main)
