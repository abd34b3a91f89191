"""Lays out the arrays of a run on a mesh of devices: by name, which axis of an array is split over which.

    mesh axis   splits
    data        the sequences of a batch
    fsdp        the sequences, and the rows of every matrix but routers, and its moments, where they are stored
    expert      the sequences, and the experts of a mixture, which are rows of `up` and `down`
    tensor      attention heads and FFN neurons

The state is laid out with `NamedSharding`, and what is element-wise in it (the optimizer) is left to
the compiler. Model, loss and gradients run under `shard_map`, on local shapes: kernels are calls that
the compiler cannot partition, and the order of their collectives is ours (`sparse_lm.collectives`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_lm.collectives import Axes
from sparse_lm.config import Config
from sparse_lm.errors import ConfigError

_ROWS = P(None, ("tensor", "fsdp"))
_SPECS = {
    **dict.fromkeys(("q", "k", "v", "shared_up", "shared_down"), _ROWS),
    "o": P(None, "fsdp", "tensor"),
    **dict.fromkeys(("up", "down"), P(None, ("expert", "tensor", "fsdp"))),
    **dict.fromkeys(("embedding", "unembed"), P("fsdp")),
}
"""The layout of parameters and their moments, by the last name in an array's path. Others are replicated."""

BATCH = P(("data", "fsdp", "expert"))
"""The layout of arrays whose first axis is sequences."""


class Layout:
    """The layout of a run over several devices.

    Args:
      mesh: with axes data, fsdp, expert and tensor.
      state: the run's `TrainState`, or its shapes.
      neuron_major: names of arrays in the recipe's state that are laid out as weights are.

    Attributes:
      axes: those of the mesh that have more than one device.
      state, batch, replicated: `NamedSharding`s of the state, of a step's windows, and of what every device has.
    """

    def __init__(self, mesh: Mesh, state: Any, neuron_major: Sequence[str]):
        self.mesh = mesh
        self._specs = _SPECS | dict.fromkeys(neuron_major, _ROWS)
        split = {name for name, count in mesh.shape.items() if count > 1}
        self.axes = Axes(
            batch=tuple(name for name in BATCH[0] if name in split),
            **{name: name for name in ("fsdp", "tensor", "expert") if name in split},
        )
        self.state = jax.tree.map(functools.partial(NamedSharding, mesh), self.specs(state))
        self.batch = NamedSharding(mesh, BATCH)
        self.replicated = NamedSharding(mesh, P())

    def specs(self, tree: Any) -> Any:
        """Returns a `PartitionSpec` for each array of a tree, by its name."""

        def spec(path: tuple, _: Any) -> P:
            return self._specs.get(jax.tree_util.keystr(path[-1:], simple=True), P())

        return jax.tree.map_with_path(spec, tree)

    def place_rows(self, windows: np.ndarray) -> jax.Array:
        """Places a batch on the devices, of which each process has its own rows (`row_share`)."""
        return jax.make_array_from_process_local_data(self.batch, windows)

    def place_batch(self, windows: np.ndarray) -> jax.Array:
        """Places a whole batch, which every process has, on the devices."""
        return jax.make_array_from_callback(windows.shape, self.batch, lambda index: windows[index])

    def local(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Turns a function of local shards, and of `axes`, into one of whole arrays."""
        local = functools.partial(function, axes=self.axes)
        # Kernels do not say over which axes their results vary, so that nothing can be checked here.
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def make_mesh(config: Config, devices: Sequence[jax.Device] | None) -> Mesh | None:
    """Makes the mesh of `config.mesh`, of all devices of this run if none are given; None for one device.

    Raises ConfigError if this machine, or all processes together, have another number of devices. One process may have
    more of them than one; of several, each would train the whole model by itself.
    """
    axes, wanted = dataclasses.asdict(config.mesh), config.mesh.devices
    if wanted == 1 and jax.process_count() == 1:
        return None
    devices = jax.devices() if devices is None else devices
    if wanted != len(devices):
        found = f"{len(devices)} ({devices[0].device_kind})"
        hide = ", or hide devices (CUDA_VISIBLE_DEVICES)" if wanted < len(devices) else ""
        remedy = f"choose axes whose product is {len(devices)}{hide}"
        raise ConfigError("mesh", axes, f"takes {wanted} devices; the processes of this run have {found}: {remedy}")
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


def row_share(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """Returns (index, count): this process's devices hold the index-th of `count` equal parts of a batch's rows."""
    held = {
        row
        for index in sharding.addressable_devices_indices_map((rows,)).values()
        for row in range(*index[0].indices(rows))
    }
    first, count = min(held), len(held)
    if max(held) != first + count - 1 or rows % count or first % count:
        raise ValueError(f"process {jax.process_index()} holds rows {sorted(held)} of {rows}, not one of equal parts")
    return first // count, rows // count
