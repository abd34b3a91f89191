"""Several processes train as one does, and a run may go on with another number of them."""

import contextlib
import os
import socket
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.errors import ConfigError
from sparse_lm.training import loop
from sparse_lm.training.mesh import processes
from sparse_lm.training.mesh.layout import make_mesh, row_share
from sparse_lm.training.mesh.processes import LaunchError
from tests import small
from tests.command_lines import ROOT
from tests.runs import command, flags, lines, small_config
from tests.training.checkpoints.test_checkpoint_damage import spoil_a_chunk

DEVICES = 8  # of all processes together
CHANGES = {"mesh.fsdp": 8, "batch_size": 8, "steps": 8, "checkpoint_every": 4, "eval_every": 4}


def run(arguments, count):
    """Runs a training command in `count` processes, and returns standard output, standard error and code of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES // count}"

    def start(index):
        of_several = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": f"{count}", "JAX_PROCESS_ID": f"{index}"}
        environment = {**os.environ, "XLA_FLAGS": flags, **(of_several if count > 1 else {})}
        return subprocess.Popen(
            arguments, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    started = [start(index) for index in range(count)]
    return [(*process.communicate(timeout=240), process.returncode) for process in started]


def losses(workdir):
    logged = lines(workdir)
    assert [line["step"] for line in logged] == list(range(len(logged)))
    return [line["loss"] for line in logged] + [line["eval_loss"] for line in logged if "eval_loss" in line]


@pytest.mark.long
def test_number_of_processes_may_change(corpus, tmp_path):
    """Two processes go on from the last checkpoint of one that is not damaged, as it went on itself."""
    workdir = tmp_path / "run"
    loop.train(small_config(corpus, "dense", **CHANGES), str(workdir))
    one = losses(workdir)
    spoil_a_chunk(workdir, 8, "params", "layers.ffn.up")  # which one process reads
    ended = run(command(corpus, workdir, *flags(CHANGES), recipe="dense"), 2)
    assert all(code == 0 for *_, code in ended), "\n".join(error[-3000:] for _, error, _ in ended)
    assert "going on from step 4" in ended[0][0]
    two = losses(workdir)
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert two[4:] != one[4:]  # sums over processes have another order: these steps were taken anew


@pytest.mark.long
def test_a_process_that_fails_ends_the_others(corpus, tmp_path):
    """JAX's own goodbye takes longer than `run` waits."""
    Path(tmp_path, "tokenizer.json").mkdir()  # which the leader alone writes
    leader, other = run(command(corpus, tmp_path, *flags(CHANGES), recipe="dense"), 2)
    assert leader[2] == 1 and f"--workdir={tmp_path}: cannot be written: Is a directory" in leader[1]
    assert other[2] != 0


@pytest.mark.long
def test_processes_that_see_different_workdirs_are_refused(corpus, tmp_path):
    """One path may lead each host to a disk of its own; here each process has a path of its own."""
    script = f'exec "$@" --workdir={tmp_path}/$JAX_PROCESS_ID'
    ended = run(["sh", "-c", script, "sh", *command(corpus, tmp_path / "run", *flags(CHANGES), recipe="dense")], 2)
    assert f"processes [1] have another {tmp_path}/0 than process 0: it must be in a file system" in ended[0][1]
    assert all(code != 0 for *_, code in ended)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "in 0..JAX_NUM"),
        ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES"),
    ],
)
def test_half_a_launch_is_refused(monkeypatch, environment, words):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with processes.joined():  # a step of one task is no launch
        pass
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=words), processes.joined():
        pass


def test_several_processes_of_a_mesh_of_one_device_are_refused(monkeypatch):
    """Each would train the whole model by itself, up to a checkpoint that none of them can save."""
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=rf"mesh.*takes 1 devices; the processes of this run have {DEVICES} \("):
        make_mesh(small.config("dense"), None)


@pytest.mark.parametrize(
    "held, share", [((4, 5, 6, 7), (1, 2)), ((0, 1, 4, 5), None), ((0, 1, 2), None), ((1, 2), None)]
)
def test_a_process_reads_one_of_equal_parts_of_a_batch(held, share):
    devices = {row: (slice(row, row + 1),) for row in held}
    sharding = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: devices)
    with contextlib.nullcontext() if share else pytest.raises(ValueError, match="of 8, not one of equal parts"):
        assert row_share(sharding, 8) == share


def test_data_that_differs_between_processes_is_refused(monkeypatch):
    of_each = []

    def gather(row):
        of_each.append(row)
        return np.stack(of_each)

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    data = {"corpus_sha256": "a", "tokenizer_sha256": "b", "vocab_size": 300}
    processes.check_data(data)
    processes.check_data(data)
    for other in ({"corpus_sha256": "c"}, {"tokenizer_sha256": "c"}):
        with pytest.raises(LaunchError, match=r"^processes \[2\] have other text, or another tokenizer, than"):
            processes.check_data(data | other)
        of_each.pop()
