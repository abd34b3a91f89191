"""Weights & Biases: a run that is opened offline, by the package itself."""

import importlib.util

import numpy as np
import pytest

from sparse_lm.training.telemetry.metrics import MetricsWriter
from sparse_lm.training.telemetry.wandb_run import WandbError, check_installed, open_run
from tests import small

CONFIG = small.config("venom")


@pytest.mark.long
def test_a_run_has_the_scalars_and_a_resumed_one_goes_on_with_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, codes, ids = [], [], set()

    def opened():
        run = open_run(tmp_path, CONFIG)
        finish = run.finish
        assert (run.project, run.name, run.config["sparsity"]["recipe"]) == ("sparse_lm", tmp_path.name, "venom")
        ids.add(run.id)
        monkeypatch.setattr(run, "log", lambda scalars, step: logged.append((step, scalars)))
        monkeypatch.setattr(run, "finish", lambda exit_code: codes.append(exit_code) or finish(exit_code))
        return run

    with MetricsWriter(tmp_path, 0, opened()) as writer:
        writer.write(3, {"phase": "dense", "loss": np.float32(1.5), "mfu": None, "zeros": np.asarray([0.25, 0.5])})
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, 6, opened()) as writer:
        writer.write(6, {"phase": "sparse", "loss": float("nan")})
        raise ZeroDivisionError
    assert logged == [(3, {"loss": 1.5, "zeros/0": 0.25, "zeros/1": 0.5}), (6, {})]
    assert codes == [0, 1] and len(ids) == 1
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WandbError, match="--wandb: the package wandb is not installed"):
        check_installed()
