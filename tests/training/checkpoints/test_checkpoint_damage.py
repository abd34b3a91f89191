"""Checkpoints that a disk damaged: refused by name, and the one before is used."""

import json
import shutil

import jax
import numpy as np
import pytest
import tensorstore

from sparse_lm.errors import WorkdirError
from sparse_lm.training.checkpoints import saved_checkpoint
from sparse_lm.training.checkpoints.checkpoint import Checkpoints, restore_params
from sparse_lm.training.checkpoints.saved_checkpoint import DamagedCheckpoint
from tests.training.checkpoints.test_checkpoint import assert_same_bits, make_state, steps_on_disk


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("saved")
    with Checkpoints(workdir, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), 3.0 - step)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.long
def test_whatever_happens_to_a_file_the_state_is_one_that_was_saved(saved, tmp_path):
    """Files of the newest checkpoint, damaged in turn. The libraries do without some of them."""
    rng = np.random.default_rng(0)
    files = sorted(path for path in (saved / "checkpoints" / "2").rglob("*") if path.is_file() and path.stat().st_size)
    used = [file for file in files if file.name in ("manifest.json", "manifest.ocdbt", "_METADATA")]
    refused = 0
    for index, file in enumerate([*used, *rng.choice(files, 10, replace=False)]):
        workdir = shutil.copytree(saved, tmp_path / str(index))
        content, damaged = bytearray(file.read_bytes()), workdir / file.relative_to(saved)
        place = rng.integers(len(content))
        if index % 3 == 0:
            content[place] ^= 1 << rng.integers(8)
            damaged.write_bytes(content)
        elif index % 3 == 1:
            damaged.write_bytes(content[:place])
        else:
            damaged.unlink()
        with Checkpoints(workdir, keep=2) as checkpoints:
            state = checkpoints.restore_latest(jax.eval_shape(make_state))
        step = int(state["step"])
        assert_same_bits(state, make_state(step))
        assert steps_on_disk(workdir) == list(range(1, step + 1))
        assert (workdir / "checkpoints" / "2.damaged").exists() == (step == 1)
        refused += step == 1
    assert refused >= 5


def spoil_a_chunk(workdir, step, part, array):
    """Makes one chunk of an array nothing that can be read, whatever files the libraries keep it in."""
    store = {"driver": "ocdbt", "base": f"file://{workdir / 'checkpoints' / str(step) / part}/"}
    chunks = tensorstore.KvStore.open(store).result()
    first = min(key for key in chunks.list().result() if key.startswith(f"{array}/".encode()) and b".z" not in key)
    chunks.write(first, b"not an array").result()


def change_a_value(workdir, step, path, index):
    """Through the libraries, so that all of their own checksums fit it."""
    store = workdir / "checkpoints" / str(step) / path[0]
    kvstore = {"driver": "ocdbt", "base": f"file://{store}/", "path": f"{'.'.join(path[1:])}/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
    array[index].write(array[index].read().result() + 1).result()


@pytest.mark.parametrize(
    "path, index", [(("params", "layers", "ffn", "up"), (1, 3, 2)), (("state", "opt_state", "0", "1", "count"), ())]
)
def test_one_changed_value_is_noticed(path, index, workdir, caplog):
    change_a_value(workdir, 2, path, index)
    with Checkpoints(workdir, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore_latest(make_state()), make_state(1))
        refusal, choice, renamed = (r.getMessage() for r in caplog.records if r.name.startswith("sparse"))
        assert refusal.endswith(f": checkpoint 2 is damaged: {'/'.join(path)} is not what was saved")
        assert choice == "using checkpoint 1 instead of 2"
        assert renamed.endswith("2.damaged")

        checkpoints.save(2, make_state(2))  # the run comes to this step again
    with Checkpoints(workdir, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore_latest(make_state()), make_state(2))


def test_readers_refuse_it_too_and_change_nothing(workdir, caplog):
    """A run may be evaluated while it saves: unfinished saves are left alone."""
    shutil.copytree(workdir / "checkpoints" / "2", workdir / "checkpoints" / "3.orbax-checkpoint-tmp")
    change_a_value(workdir, 2, ("params", "layers", "ffn", "up"), (1, 3, 2))
    before = sorted(workdir.rglob("*"))
    params, _, step = restore_params(workdir)
    assert step == 1
    assert_same_bits(params, make_state(1)["params"])
    assert "checkpoint 2 is damaged: params/layers/ffn/up is not" in caplog.text
    for wanted in (2, "best"):  # by name there is no other
        with pytest.raises(DamagedCheckpoint, match="checkpoint 2 is damaged"):
            restore_params(workdir, wanted)
    assert sorted(workdir.rglob("*")) == before


def test_the_best_is_refused_by_name_while_a_manifest_is_damaged(workdir):
    """The damaged one was the better: the other must not be taken in silence."""
    manifest = workdir / "checkpoints" / "2" / "manifest" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["metrics"]["eval_loss"] = 9.0
    manifest.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="checkpoint 2 is damaged"):
        restore_params(workdir, "best")
    assert restore_params(workdir, 1)[2] == 1


def test_nothing_is_renamed_while_no_checkpoint_is_whole(workdir):
    for step in (1, 2):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "params" / "d")
    before = sorted(workdir.rglob("*"))
    message = "all of its checkpoints are damaged: 1, 2$"
    with Checkpoints(workdir, keep=2) as checkpoints, pytest.raises(WorkdirError, match=message):
        checkpoints.restore_latest(make_state())
    with pytest.raises(WorkdirError, match=message):
        restore_params(workdir)
    assert sorted(workdir.rglob("*")) == before


def test_copied_by_half_or_to_another_name(workdir):
    saved = workdir / "checkpoints"
    for name in ("4", "5.orbax-checkpoint-tmp"):  # of a save that a kill has ended
        (saved / name).mkdir()
    shutil.copytree(saved / "2", saved / "3")
    shutil.rmtree(saved / "2" / "state")
    for step, reason in ((4, "FileNotFoundError"), (3, "it is checkpoint 2, and its directory was renamed")):
        with pytest.raises(DamagedCheckpoint, match=f"checkpoint {step} is damaged: {reason}"):
            restore_params(workdir, step)
    with Checkpoints(workdir, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore_latest(make_state()), make_state(1))
        checkpoints.save(2, make_state(2))
    assert {path.name for path in saved.iterdir()} == {"1", "2", "2.damaged", "3.damaged", "4.damaged"}


def test_a_checkpoint_of_another_format_is_refused(workdir, monkeypatch):
    monkeypatch.setattr(saved_checkpoint, "FORMAT", 3)
    message = r"checkpoint \d has format 2; this version reads format 3"
    for use in (lambda: Checkpoints(workdir, keep=2), lambda: restore_params(workdir)):
        with pytest.raises(WorkdirError, match=message) as caught:
            use()
        assert not isinstance(caught.value, DamagedCheckpoint)
