r"""Says what the compiler makes of a step on many GPUs that are not there: memory of a device, and collectives.

    JAX_PLATFORMS=cpu python -m experiments.bench.compile_report --config=configs/llama7b.py --hosts=8 \
        --config.mesh.data=8 --config.mesh.fsdp=8 --config.batch_size=128 --config.model.unroll_layers=False \
        --target=h100_sxm.txtpb --output=experiments/results/compile_only_llama7b_64_gpus.json

Compiled for a mock topology of hosts of 8 GPUs; nothing runs, and nothing here is a measurement of speed. Needs a CUDA
build of JAX, and no GPU. --target is XLA's description of the GPU (xla/backends/gpu/target_config/specs/ in its
sources).

Bytes are those of a collective's results on one device, in a step: an all-gather's are what it puts together,
a reduce-scatter's the part that stays. What stands in the loop over layers counts once for each layer.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies
from ml_collections import config_flags

from experiments.bench.hlo_collectives import Collective, collectives
from experiments.result_files import write_results
from experiments.timing import peak_gib
from sparse_lm.config import parse, to_dict
from sparse_lm.model import attention
from sparse_lm.ops import backends
from sparse_lm.training.step import make_trainer


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Counts them in a step, and the GB of their results on one device."""
    table: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0, "gb": 0.0})
    for collective in found:
        table[collective.kind]["count"] += collective.times
        table[collective.kind]["gb"] += collective.times * collective.bytes / 1e9
    return dict(table)


def report(phase: str, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Reports memory and collectives of the compiled step of a phase."""
    config = parse(flags.FLAGS.config)
    trainer = make_trainer(config, devices)
    windows = jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), jnp.int32, sharding=trainer.layout.batch)
    lowered = trainer.steps[phase].trace(trainer.abstract_state(), windows).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile()
    use = compiled.memory_analysis()
    gib = dict(
        state_and_batch=use.argument_size_in_bytes / 2**30,
        temporaries=use.temp_size_in_bytes / 2**30,
        peak=peak_gib(compiled),
    )
    return dict(gib_of_a_device=gib, collectives=by_kind(collectives(compiled.as_text())))


def main(_: Sequence[str]) -> None:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # a plugin without a GPU
    target = Path(flags.FLAGS.target).read_text()
    topology = topologies.get_topology_desc(
        topology_name="", platform="cuda", topology=f"1x{flags.FLAGS.hosts}x8", target_config=target
    )
    flash = mock.patch.object(attention, "attention_implementation", lambda dtype, head_width: "cudnn")
    hopper = mock.patch.object(backends, "unavailable", lambda name: "needs Triton" if name == "triton" else None)
    with flash, hopper:
        phases = {phase: report(phase, topology.devices) for phase in ("dense", "sparse")}
    config = parse(flags.FLAGS.config)
    write_results(
        device=f"{topology.devices[0].device_kind}, mock topology: compiled only, nothing ran",
        gpus=len(topology.devices),
        mesh=dataclasses.asdict(config.mesh),
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        model=dataclasses.asdict(config.model),
        sparsity=to_dict(config)["sparsity"],
        phases=phases,
    )
    print(json.dumps(phases, indent=1))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/llama7b.py", "The run, its mesh included.")
    flags.DEFINE_integer("hosts", 8, "Hosts of 8 GPUs.")
    flags.DEFINE_string("target", None, "XLA's description of the GPU.", required=True)
    app.run(main)
