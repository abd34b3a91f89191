"""Several processes train as one does, and a run may go on with another number of them."""

import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys

import numpy as np
import pytest

from sparse_lm import config as config_lib
from sparse_lm.training import loop
from sparse_lm.training.mesh import processes
from sparse_lm.training.mesh.processes import LaunchError
from tests import small
from tests.command_lines import ROOT

DEVICES = 8  # of all processes together
CONFIG = """
from tests import small

def get_config():
    return small.config_dict("dense", **{changes})
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, corpus):
    changes = {
        "data.path": str(corpus), "mesh.data": 4, "mesh.fsdp": 2, "batch_size": 8, "steps": 8, "checkpoint_every": 4,
        "eval_every": 4,
    }  # fmt: skip
    file = tmp_path_factory.mktemp("processes") / "config.py"
    file.write_text(CONFIG.format(changes=changes))
    return file


def train(config_file, workdir, count, *overrides):
    """Runs the training command in `count` processes, and returns the standard output of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES // count}"
    command = [sys.executable, "-m", "sparse_lm.train", f"--config={config_file}", f"--workdir={workdir}", *overrides]

    def start(index):
        of_several = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": f"{count}", "JAX_PROCESS_ID": f"{index}"}
        environment = {**os.environ, "XLA_FLAGS": flags, **(of_several if count > 1 else {})}
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    started = [start(index) for index in range(count)]
    ended = [(*process.communicate(timeout=240), process.returncode) for process in started]
    assert all(code == 0 for *_, code in ended), "\n".join(error[-3000:] for _, error, _ in ended)
    return [output for output, _, _ in ended]


def flip_a_bit(file):
    """In one shard, which one process reads."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def losses(workdir):
    lines = [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines] + [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.long
def test_number_of_processes_may_change(config_file, tmp_path):
    """Two processes go on from the last checkpoint of one that is not damaged, as it went on itself."""
    loop.train(config_lib.parse(runpy.run_path(str(config_file))["get_config"]()), str(tmp_path))
    one = losses(tmp_path)
    flip_a_bit(max((tmp_path / "checkpoints" / "8").rglob("d/*"), key=lambda file: file.stat().st_size))
    assert "going on from step 4" in train(config_file, tmp_path, 2)[0]
    two = losses(tmp_path)
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert two[4:] != one[4:]  # sums over processes have another order: these steps were taken anew


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "in 0..JAX_NUM"),
        ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES"),
    ],
)
def test_half_a_launch_is_refused(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=words):
        processes.join()


def test_data_that_differs_between_processes_is_refused(monkeypatch):
    of_each = []

    def gather(row):
        of_each.append(row)
        return np.stack(of_each)

    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    data = {"corpus_sha256": "a", "tokenizer_sha256": "b", "vocab_size": 300}
    processes.check_data(data)
    processes.check_data(data)
    for other in ({"corpus_sha256": "c"}, {"tokenizer_sha256": "c"}):
        with pytest.raises(
            LaunchError, match=r"^processes \[2\] have other text, or another tokenizer, than process 0"
        ):
            processes.check_data(data | other)
        of_each.pop()


def test_gpus_that_jax_does_not_see_are_missed_on_a_mesh(monkeypatch, tmp_path, caplog):
    (tmp_path / "version").touch()
    monkeypatch.setattr(processes, "_NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(processes.jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    processes.check(small.config())
    assert "requirements-gpu.txt" in caplog.text
    with pytest.raises(LaunchError, match=r"requirements-gpu\.txt"):
        processes.check(small.config(**{"mesh.data": 4}))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    processes.check(small.config(**{"mesh.data": 4}))
