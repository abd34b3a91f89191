"""Weights & Biases, written offline and read back from its own file."""

import importlib.util
import json
import struct
import time

import numpy as np
import pytest

from sparse_lm.training.telemetry.metrics import MetricsWriter
from sparse_lm.training.telemetry.wandb_run import WandbError, WandbRun, check_installed
from tests import small

CONFIG = small.config("venom")


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(path):
    """The records of a .wandb file: after a header of 7 bytes, each is CRC, length, kind (1: whole), protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, data = [], path.read_bytes()[7:]
    while len(data) > 7:
        _, length, kind = struct.unpack("<IHB", data[:7])
        assert kind == 1
        if len(data) < 7 + length:
            break  # still on its way
        found.append(Record.FromString(data[7 : 7 + length]))
        data = data[7 + length :]
    return found


def logged(path):
    """The run that a .wandb file tells of: its record, its steps, and its exit code."""
    deadline = time.monotonic() + 30
    while not any(record.HasField("exit") for record in records(path)):  # written behind the caller's back
        assert time.monotonic() < deadline
        time.sleep(0.02)
    history, run, exit_code = {}, None, None
    for record in records(path):
        if record.HasField("run"):
            run = record.run
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
        if record.HasField("history"):
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            values = {name: value for name, value in items.items() if not name.startswith("_")}
            history[items["_step"]] = values
    return run, history, exit_code


@pytest.mark.long
def test_offline_run_has_the_scalars_and_a_resumed_one_goes_on_with_it(tmp_path, offline):
    with MetricsWriter(tmp_path, 0, WandbRun(tmp_path, CONFIG)) as writer:
        writer.write(3, {"phase": "dense", "loss": np.float32(1.5), "mfu": None, "zeros": np.asarray([0.25, 0.5])})
        writer.write(5, {"phase": "dense", "loss": float("nan"), "zeros": np.asarray([0.5, 0.75])})
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, 6, WandbRun(tmp_path, CONFIG)) as writer:
        writer.write(6, {"phase": "sparse", "loss": np.float32(1.25)})
        raise ZeroDivisionError

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    (first, history, code), (second, more, failed) = map(logged, files)
    assert history == {3: {"loss": 1.5, "zeros/0": 0.25, "zeros/1": 0.5}, 5: {"zeros/0": 0.5, "zeros/1": 0.75}}
    assert more == {6: {"loss": 1.25}}
    assert first.run_id == second.run_id
    assert (code, failed) == (0, 1)
    assert (first.project, first.display_name) == ("sparse_lm", tmp_path.name)
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["sparsity"]["recipe"] == "venom" and config["steps"] == 12


def test_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WandbError, match="--wandb: the package wandb is not installed"):
        check_installed()
    with pytest.raises(WandbError, match="not installed"):
        WandbRun(tmp_path, CONFIG)
    assert not list(tmp_path.iterdir())
