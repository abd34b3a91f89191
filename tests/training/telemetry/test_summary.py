import os
import shutil
import subprocess

import jax
import pytest

from sparse_lm.training.telemetry.metrics import MetricsWriter
from sparse_lm.training.telemetry.summary import COMPILE_EVENTS, RunSummary, git_commit, read_summary
from tests import small
from tests.clock import Clock
from tests.runs import lines

CONFIG = small.config("sste")  # 12 steps of 128 tokens, sparse on 4..8, evaluated every 6


def go(workdir, start, end, seconds=1.0, state=None, error=None):
    """One process as the training loop goes about it: 10 s of setup, steps of `seconds`, saves every 3 that take 2 s,
    evaluations every 6 that take 5 s; 4 s more, and it dies of `error` behind step `end`, or ends."""
    clock = Clock()
    with RunSummary(workdir, CONFIG, clock) as summary, MetricsWriter(workdir, start) as writer:
        clock.now += 10
        summary.begin(start)
        for step in range(start, end):
            clock.now += seconds
            summary.step_done(CONFIG.phase(step))
            line = {"loss": 8.0 - step / 4, "skipped": 0, "wall_time": summary.wall_time()}
            if (step + 1) % 6 == 0:
                clock.now += 5
                summary.spent_on("evaluation")
                line |= {"eval_loss": 9.0 - step / 4, "eval_perplexity": 2.0, "eval_bits_per_byte": 1.0}
            summary.logged(writer.write(step, line))
            if (step + 1) % 3 == 0:
                summary.write()
                clock.now += 2
                summary.spent_on("checkpoint")
        clock.now += 4  # it waits for a last save
        if error:
            raise error
        summary.state = state


def walls(workdir):
    return [line["wall_time"] for line in lines(workdir)]


def test_a_stopped_run_and_its_resumption_add_up(tmp_path):
    go(tmp_path, 0, 6, state="stopped by SIGTERM")
    assert read_summary(tmp_path)["state"] == "stopped by SIGTERM"
    go(tmp_path, 6, 12, seconds=3.0, state="finished")
    summary = read_summary(tmp_path)
    assert (summary["state"], summary["step"], summary["steps"], summary["tokens"]) == ("finished", 12, 12, 12 * 128)
    spent = {"setup": 20, "dense": 4 + 4 * 3, "sparse": 2 + 2 * 3, "evaluation": 10, "checkpoint": 8 + 2 * 4}
    assert spent == {kind: seconds for kind, seconds in summary["seconds"].items() if seconds}
    assert summary["wall_time"] == sum(spent.values())
    speeds = {"dense": 8 * 128 / 16, "sparse": 4 * 128 / 8, "overall": pytest.approx(12 * 128 / summary["wall_time"])}
    assert summary["tokens_per_second"] == speeds
    assert summary["loss"] == 8.0 - 11 / 4
    assert summary["evaluation"] == {"step": 11, "loss": 9.0 - 11 / 4, "perplexity": 2.0, "bits_per_byte": 1.0}
    processes = [(p["start_step"], p["step"], p["steps"]) for p in summary["processes"]]
    assert processes == [(0, 6, {"dense": 4, "sparse": 2}), (6, 12, {"dense": 4, "sparse": 2})]
    assert {"device", "versions", "git_commit", "started"} <= summary["processes"][0].keys()
    assert [p["device"]["count"] for p in summary["processes"]] == [1, 1]  # however many this machine has
    assert walls(tmp_path) == sorted(walls(tmp_path)) and len(walls(tmp_path)) == 12


def test_after_a_kill_the_last_checkpoint_counts(tmp_path, monkeypatch):
    """Steps behind it leave no trace; those that a resumption repeats count as often as they are known of."""
    with monkeypatch.context() as patch:
        patch.setattr(RunSummary, "__exit__", lambda *_: None)  # a killed process writes nothing at its end
        go(tmp_path, 0, 8)
    killed = read_summary(tmp_path)
    assert (killed["state"], killed["step"], killed["evaluation"]["step"]) == ("running", 6, 5)
    go(tmp_path, 3, 12, state="finished")  # the save of step 6 was not whole yet
    summary = read_summary(tmp_path)
    assert (summary["step"], summary["tokens"]) == (12, 12 * 128)
    assert summary["seconds"]["dense"] + summary["seconds"]["sparse"] == 6 + 9
    assert summary["tokens_per_second"]["dense"] == 128
    assert summary["tokens_per_second"]["overall"] == pytest.approx((6 + 9) * 128 / summary["wall_time"])
    assert walls(tmp_path) == sorted(walls(tmp_path))


def test_an_error_is_named_and_the_best_evaluation_kept(tmp_path):
    with pytest.raises(ZeroDivisionError):
        go(tmp_path, 0, 4, error=ZeroDivisionError())
    summary = read_summary(tmp_path)
    assert (summary["state"], summary["step"], summary["evaluation"]) == ("failed: ZeroDivisionError", 4, None)
    assert summary["seconds"]["other"] == 4
    with RunSummary(tmp_path, CONFIG, Clock()) as summary, MetricsWriter(tmp_path):
        summary.begin(4)
        for step, loss in enumerate([3.0, None, 2.0, 2.5, 2.4, 2.2, 2.3], 4):  # sparse before step 8
            results = {"eval_loss": loss, "eval_perplexity": None, "eval_bits_per_byte": None}
            summary.logged({"step": step, "loss": 3.0, "skipped": 0, **results})
    found = read_summary(tmp_path)
    assert (found["best_evaluation"]["step"], found["evaluation"]["step"]) == (9, 10)


def test_a_process_that_finds_nothing_to_do_changes_nothing(tmp_path):
    go(tmp_path, 0, 12, state="finished")
    before = (tmp_path / "summary.json").read_text()
    with RunSummary(tmp_path, CONFIG):
        pass
    assert (tmp_path / "summary.json").read_text() == before
    assert read_summary(tmp_path / "nowhere") is None


@pytest.mark.parametrize("damage", ["[]", '{"processes": 3}', '{"processes": [{"start_step": 0}]}'])
def test_a_summary_that_cannot_be_added_up_counts_as_none(damage, tmp_path, caplog):
    go(tmp_path, 0, 6)
    (tmp_path / "summary.json").write_text(damage)
    assert read_summary(tmp_path) is None
    assert "summary.json cannot be read and counts as none" in caplog.text
    go(tmp_path, 6, 12, state="finished")
    assert len(read_summary(tmp_path)["processes"]) == 1


def compile_for(seconds):
    """Tells JAX's listeners what it tells them when it has compiled."""
    jax.monitoring.record_event_duration_secs(f"{COMPILE_EVENTS}backend_compile_duration", seconds)


def test_compiling_is_told_apart(tmp_path):
    clock = Clock()
    with RunSummary(tmp_path, CONFIG, clock) as summary:
        compile_for(1.0)
        jax.monitoring.record_event_duration_secs("/jax/other", 2.0)
        compile_for(3.0)
        clock.now += 10.0
        assert summary.spent_on("evaluation") == 6.0
        compile_for(9.0)  # in threads side by side
        clock.now += 5.0
        assert summary.spent_on("checkpoint") == 0.0
    compile_for(1.0)
    clock.now += 1.0
    assert summary.spent_on("other") == 1.0  # closed, it listens no more


def git(directory, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_the_checkouts_own(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init")
    assert git_commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    index = tmp_path / ".git" / "index"
    os.utime(tmp_path / "file", (1, 1))  # which git would note in its index
    before = index.read_bytes()
    assert git_commit(tmp_path) == head
    assert index.read_bytes() == before
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert git_commit(tmp_path / "inside") is None  # the checkout around it is some other project's
