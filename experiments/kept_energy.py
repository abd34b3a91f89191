"""How much of the hidden layer sets of neurons keep that are chosen before the up product, by how they are chosen.

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

from experiments.kernel_timing import write_results
from sparse_lm import ops
from sparse_lm.config import Config
from sparse_lm.data.opening import open_data
from sparse_lm.model import llama
from sparse_lm.model.ffn import FfnInputs
from sparse_lm.ops import routing
from sparse_lm.ops.plan import DENSE
from sparse_lm.training.restored import restore_for_dense
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


def kept(x: Array, up: Array, centres: Array, columns: Array) -> dict[str, float]:
    """Shares of the sum of Y^2 that the sets keep, without and with 2:4 along the set, and of padded slots."""
    clusters = routing.assign_tokens(x, centres, "cosine")
    energy = jnp.square(jnp.square(jax.nn.relu(x @ up.T.astype(x.dtype)))).astype(jnp.float32)
    of_set = jnp.take_along_axis(energy, columns[clusters], axis=1)
    pairs = jnp.sort(of_set.reshape(*of_set.shape[:-1], -1, 4), axis=-1)[..., 2:]
    load = routing.expert_load(clusters, centres.shape[0])
    return dict(
        set=float(jnp.sum(of_set) / jnp.sum(energy)),
        set_24=float(jnp.sum(pairs) / jnp.sum(energy)),
        largest_load=float(jnp.max(load)),
        empty_clusters=int(jnp.sum(load == 0)),
    )


def magnitude_kept(x: Array, up: Array, v: int, m: int) -> float:
    """The same share for V:2:M by magnitude, tokens by the nearest of 16 centres of neurons."""
    centres, _ = routing.cluster_neurons(up, 16, key=jax.random.key(0), balanced=False)
    order = jax.random.permutation(jax.random.key(2), x.shape[0])
    rows = routing.sort_rows(routing.assign_tokens(x, centres, "cosine"), 16, order)
    h = routing.permute(x, rows) @ up.T.astype(x.dtype)
    _, stats = ops.squared_relu_venom(h, v, m, implementation="reference")
    return float(stats.kept_energy / stats.energy)


def look(x: Array, other: Array, up: Array, m: int) -> Iterator[dict]:
    """Rows of one layer: sets chosen on the tokens x [T, D] and measured on `other`."""
    yield dict(centres="-", clusters=0, sets=f"magnitude 128:2:{m}", set_24=magnitude_kept(other, up, 128, m))
    for clusters in CLUSTERS:
        neurons_key = jax.random.key(0)
        for name, centres in (
            ("neurons", routing.cluster_neurons(up, clusters, key=neurons_key, balanced=False)[0]),
            ("tokens", centres_of_tokens(x, up, clusters)),
        ):
            energy = sums(x, up, centres).energy
            for choice, columns in sets(up, energy, m):
                yield dict(centres=name, clusters=clusters, sets=choice, **kept(other, up, centres, columns))


def main(_) -> None:
    config = load_config(WORKDIR.value)
    heldout = open_data(config).heldout
    tables = []
    for checkpoint in CHECKPOINTS.value:
        params, step = restore_for_dense(
            WORKDIR.value, config, checkpoint if checkpoint == "latest" else int(checkpoint)
        )
        tokens = heldout.read(np.arange(2 * WINDOWS.value))[:, :-1]
        chosen_on, measured_on = (ffn_inputs(config, params, part) for part in np.split(tokens, 2))
        layers = [
            list(look(*layer, M.value))
            for layer in zip(chosen_on, measured_on, params["layers"]["ffn"]["up"], strict=True)
        ]
        for rows in zip(*layers, strict=True):
            numbers = {key for key, value in rows[0].items() if isinstance(value, float)}
            row = rows[0] | {key: [round(row[key], 4) for row in rows] for key in numbers}
            tables.append(dict(step=step, **row))
            mean = {key: sum(row[key]) / len(rows) for key in numbers}
            shares = " ".join(f"{key} {mean[key]:.3f}" for key in sorted(numbers))
            print(f"step {step} {row['centres']:8} {row['clusters']:4} {row['sets']:45} {shares}", flush=True)
    write_results(OUTPUT.value, dict(m=M.value, rows=tables))


if __name__ == "__main__":
    app.run(main)
