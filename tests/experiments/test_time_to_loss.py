"""Time to a given loss: who runs what, what a run took, ratios of times and figures, of made-up runs and tiny ones."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from experiments import plots
from experiments.quality import one_run, overview, time_ratio
from experiments.quality.suites import SUITES
from experiments.quality.time_to_loss import Host, Item, Results, assign, check_data, with_lengths
from sparse_lm.data.opening import open_data
from sparse_lm.errors import DataError, UserError, WorkdirError
from sparse_lm.training.optimizer import learning_rate
from tests.command_lines import assert_refused, run_modules

TINY = SUITES["tiny"]
RUNS = ["dense", "slices_50", "slices_80"]


def test_every_run_of_every_seed_has_a_gpu_and_sides_of_a_pair_are_swapped_from_seed_to_seed():
    for gpus in (1, 2, 3, 4):
        queues = assign(RUNS, [0, 1], gpus)
        assert len(queues) == gpus
        assert sorted(item for queue in queues for item in queue) == sorted(Item(n, s) for n in RUNS for s in (0, 1))
    first, second, third, fourth = assign(RUNS, [0, 1, 2, 3], gpus=4)
    assert [item.seed for item in first if item.name == "dense"] == [0]
    assert [item.seed for item in second if item.name == "dense"] == [2]
    assert {item.seed for item in first + second} == {0, 2} and {item.seed for item in third + fourth} == {1, 3}
    for queue in (first, second, third, fourth):
        assert {item.name for item in queue} == set(RUNS)
        dense, others = ({item.seed for item in queue if (item.name == "dense") == side} for side in (True, False))
        assert not dense & others


def test_data_that_runs_would_learn_by_heart_and_runs_of_other_text_or_another_suite_are_refused(corpus, tmp_path):
    data, config = str(corpus), TINY.config("dense", 0, str(corpus))
    opened = open_data(config)
    windows, here = len(opened.train), {"corpus_sha256": opened.info["corpus_sha256"][:12]}
    most = 4 * windows // config.batch_size
    suite = dataclasses.replace(TINY, base=TINY.base | {"steps": most}, lengths=(1.0, 2.0))
    twice = {"steps": 2 * most, "optimizer.decay_steps": most}
    suite = dataclasses.replace(suite, runs={"dense": TINY.runs["dense"], "longer": TINY.runs["dense"] | twice})
    check_data(suite, data, "", ["dense"], [here])
    for longer in ("longer", "dense@2.0"):
        with pytest.raises(DataError, match=rf"{windows:,} training windows, which .* steps of 4 would read 8 times"):
            check_data(suite, data, "", ["dense", longer], [])
    for name in ("slices_05", "dense@0.7", "slices_50@0.8"):
        with pytest.raises(UserError, match=f"^{name} must be among dense, .*, _fp8 and _rate_0.001 may stand$"):
            check_data(TINY, data, "", ["dense", name], [])
    with pytest.raises(DataError, match=r"is not the text of the runs in --output, which has sha256 0123456789ab$"):
        check_data(TINY, data, "", ["dense"], [here, {"corpus_sha256": "0123456789ab"}])
    with pytest.raises(DataError, match=r"--output, which has sha256 unknown$"):
        check_data(TINY, data, "", ["dense"], [here, {"name": "of a file that does not say its text"}])
    without_text = here | {"second_heldout_loss": 2.0}
    check_data(TINY, data, "", ["dense"], [without_text])
    check_data(TINY, data, data, ["dense"], [here, without_text | {"second_corpus_sha256": here["corpus_sha256"]}])
    for row, sha256 in ((without_text, "unknown"), (without_text | {"second_corpus_sha256": "01234567"}, "01234567")):
        with pytest.raises(DataError, match=f"^--second_data=.* which has sha256 {sha256}$"):
            check_data(TINY, data, data, ["dense"], [row])
    tiny = dict(suite="tiny", base=TINY.base, lengths=TINY.lengths, runs=[])
    for found, message in (
        (tiny | dict(suite="llama60m"), "has runs of another suite than tiny's"),
        (tiny | dict(base={}, lengths=[1, 2]), "has runs of another base and lengths than tiny's"),
        (dict(recipes={}), "is no result of a suite"),
        ([], "is no result of a suite"),
    ):
        (tmp_path / "out.json").write_text(json.dumps(found))
        with pytest.raises(DataError, match=rf"out\.json: {message}"):
            Results(tmp_path / "out.json", "tiny")


def test_rows_that_another_command_added_and_what_was_written_by_hand_stay(tmp_path):
    path, row = tmp_path / "out.json", dict(name="dense@1.2", device=dict(kind="stub"), versions=dict(jax="0"))
    first, second = Results(path, "tiny"), Results(path, "tiny")
    first.add(row | dict(seed=0))
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(commit="abc")))
    second.add(row | dict(seed=1))
    found = json.loads(path.read_text())
    assert ([run["seed"] for run in found["runs"]], found["commit"], list(found)[-1]) == ([0, 1], "abc", "runs")


@pytest.mark.parametrize("lengths", [(), (1.0,), (1.0, 0.8), (0.7, 1.0)])
def test_lengths_that_no_branches_can_have_are_refused(lengths):
    with pytest.raises(ValueError, match="must be two or more, ascending, multiples of"):
        dataclasses.replace(TINY, lengths=lengths)


@pytest.mark.parametrize("name", {(suite.steps, suite.lengths): name for name, suite in SUITES.items()}.values())
def test_a_branch_has_the_rates_of_the_longest_dense_run_until_they_fall(name):
    suite = SUITES[name]
    longest = suite.config(suite.longest, 0, "data")
    rates = np.asarray(learning_rate(longest)(np.arange(longest.steps)))
    for length, start in suite.decay_starts().items():
        run = suite.config(f"dense@{length}", 0, "data")
        assert np.ptp(rates[longest.optimizer.warmup_steps : start]) == 0
        assert run.steps == pytest.approx(length * suite.steps, rel=0.05)
        schedule = learning_rate(run)
        np.testing.assert_allclose([schedule(step) for step in (0, start - 1)], rates[[0, start - 1]], rtol=1e-6)
        assert schedule(start + 1) < rates[start - 1]
        assert schedule(run.steps - 1) == pytest.approx(0.1 * rates[start - 1])
        if run != longest:
            assert start % longest.checkpoint_every == start % longest.keep_every == 0


STUB = """
import json, os, pathlib, sys
given = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
workdir = pathlib.Path(given["root"], f"{given['run']}-{given['seed']}")
for step in (32, 40):
    (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
if given["run"].startswith("dense@"):
    assert pathlib.Path(given["root"], f"dense@1.2-{given['seed']}", "checkpoints").exists()
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
if given["run"] == "slices_80":
    sys.exit("no such run")
row = dict(name=given["run"], seed=int(given["seed"]), heldout_loss=1.0, seconds=2.0, compile_seconds=3.0,
           gpu=gpu, device=dict(kind="stub"), versions=dict(jax="0"))
(workdir / "row.json").write_text(json.dumps(row))
"""


@pytest.fixture
def host(tmp_path):
    """A host whose runs are those of a program that only writes a row, or fails by name."""
    (tmp_path / "stub.py").write_text(STUB)
    root, output = tmp_path / "runs", tmp_path / "out.json"
    root.mkdir()
    return lambda: Host([sys.executable, str(tmp_path / "stub.py"), f"--root={root}"], root, Results(output, "tiny"))


def rows(tmp_path):
    return {(row["name"], row["seed"]): row for row in json.loads((tmp_path / "out.json").read_text())["runs"]}


def test_gpus_work_through_their_queues_and_keep_only_needed_checkpoints(host, tmp_path):
    queues = {"4": with_lengths([Item("dense", 0)], TINY), "7": [Item("slices_50", 0), Item("slices_stay", 0)]}
    host().work(queues, minutes=math.inf)
    assert {name: row["gpu"] for (name, _), row in rows(tmp_path).items()} == {
        "dense@1.2": "4", "dense@0.8": "4", "dense@1.0": "4", "slices_50": "7", "slices_stay": "7",
    }  # fmt: skip
    assert rows(tmp_path)["slices_50", 0]["overrides"] == TINY.runs["slices_50"]
    assert not list(tmp_path.glob("runs/*/checkpoints"))


def test_what_is_done_is_not_done_again(host, tmp_path):
    queue = with_lengths([Item("dense", 0)], TINY)
    host().work({"0": queue[:2]}, minutes=math.inf)  # to the first branch
    assert (tmp_path / "runs/dense@1.2-0/checkpoints").exists()
    (tmp_path / "runs/dense@0.8-0/row.json").unlink()
    host().work({"1": queue}, minutes=math.inf)
    assert {name: row["gpu"] for (name, _), row in rows(tmp_path).items()} == dict(
        zip(("dense@1.2", "dense@0.8", "dense@1.0"), "001", strict=True)
    )


def test_a_failure_is_named_and_ends_its_queue_alone(host, tmp_path):
    failing = host()
    failing.work({"0": [Item("slices_80", 0), Item("slices_50", 0)], "1": [Item("slices_50", 1)]}, minutes=math.inf)
    assert list(rows(tmp_path)) == [("slices_50", 1)]
    (failure,) = failing.failed
    assert "slices_80-0 (exit status 1" in failure
    assert "no such run" in (tmp_path / "runs/slices_80-0.log").read_text()


@pytest.mark.long
def test_a_branch_goes_on_from_the_longest_dense_run(corpus, other_corpus, tmp_path, monkeypatch):
    data, other = str(corpus), str(other_corpus)
    monkeypatch.setattr(one_run, "phase_start", lambda steps: 10)  # tiny runs log none of their first 1 / 60
    for name, second in (("dense@1.2", ""), ("dense@0.8", other)):
        assert one_run.run_one(TINY, name, 0, data, second, tmp_path)
    longest, branch = (json.loads((tmp_path / f"{name}-0/row.json").read_text()) for name in ("dense@1.2", "dense@0.8"))
    config = TINY.config("dense@0.8", 0, data)
    assert branch["heldout_loss"] < longest["heldout_curve"][0][1]
    assert branch["second_heldout_loss"] not in (branch["heldout_loss"], None)
    assert branch["second_corpus_sha256"] == open_data(TINY.config("dense", 0, other)).info["corpus_sha256"][:12]
    assert branch["steps"] == config.steps and branch["tokens"] == config.steps * 128
    start = TINY.decay_starts()[0.8]
    assert branch["phase_steps"]["dense"] == config.steps - start
    own = branch["step_ms"]["dense"] * (config.steps - start) / 1e3
    assert branch["seconds"] == pytest.approx(longest["seconds"] * start / longest["steps"] + own)
    assert branch["compile_seconds"] == longest["compile_seconds"]
    lines = [json.loads(line) for line in (tmp_path / "dense@1.2-0/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:3]] == [0, 4, 8]
    assert branch["first_dense_ms"] == pytest.approx(500 * (lines[1]["step_time"] + lines[2]["step_time"]))
    assert branch["logged"] == [[0, "dense", lines[0]["loss"], None]]
    check_data(TINY, data, other, ["dense"], [branch])
    # A workdir whose checkpoints are gone is one of an earlier run, none of whose time is this one's.
    shutil.rmtree(tmp_path / "dense@0.8-0/checkpoints")
    assert one_run.run_one(TINY, "dense@0.8", 0, data, "", tmp_path)
    again = json.loads((tmp_path / "dense@0.8-0/row.json").read_text())
    assert (again["phase_steps"], again["heldout_loss"]) == (branch["phase_steps"], branch["heldout_loss"])
    shutil.rmtree(tmp_path / "dense@1.2-0/checkpoints")
    shutil.rmtree(tmp_path / "dense@0.8-0")
    with pytest.raises(WorkdirError, match=rf"dense@1.2-0.* has no checkpoint of step {start}"):
        one_run.run_one(TINY, "dense@0.8", 0, data, "", tmp_path)


def test_first_steps_take_their_share_whatever_processes_there_were():
    """One of them was stopped while it compiled, and the last one compiled again."""
    steps, compiling = ({}, {"dense": 30}, {"dense": 10}), (2.0, 5.0, 4.0)
    processes = [dict(steps=s, seconds=dict(compile=c)) for s, c in zip(steps, compiling, strict=True)]
    before = one_run.first_steps_of(dict(seconds=dict(dense=20.0, compile=11.0), processes=processes), 10)
    assert before == dict(seconds=5.0, compile_seconds=5.0)


def test_seconds_of_steps_taken_twice_are_refused(tmp_path):
    config = TINY.config("dense", 0, "data")
    processes = [dict(start_step=0, steps={"dense": steps}, seconds=dict(compile=1.0)) for steps in (7, config.steps)]
    summary = dict(state="finished", seconds=dict(dense=1.0), processes=processes)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    last = dict(step=config.steps - 1, eval_loss=2.0, phase="dense")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    with pytest.raises(WorkdirError, match=rf"took {config.steps + 7} steps, where {config.steps} were due"):
        one_run.read_run(tmp_path, config, None)


@pytest.mark.parametrize("state, step, loss", [("failed: TooManyBadSteps", 0, 2.0), ("finished", TINY.steps - 1, None)])
def test_a_run_without_a_finite_last_loss_has_no_row(state, step, loss, tmp_path):
    """The first one's checkpoint has all steps, so that the next process finds nothing left to train."""
    (tmp_path / "summary.json").write_text(json.dumps({"state": state, "processes": []}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    with pytest.raises(WorkdirError, match=f"no held-out loss of the last step: {state}"):
        one_run.read_run(tmp_path, TINY.config("dense", 0, "data"), None)


@pytest.mark.parametrize("name", SUITES)
def test_every_run_of_a_suite_is_allowed(name):
    suite = SUITES[name]
    ends = "", "_rate_0.0007", "_m_32_first_dense_rate_0.0007"
    runs = [run + end for run in suite.runs for end in ends[: 3 if "slices" in run else 2]]
    configs = {run: suite.config(run, 0, "data") for run in runs}
    for run, config in configs.items():
        before_decay = config.sparsity.end_step <= config.steps - config.optimizer.decay_steps
        assert before_decay != (config.sparsity.stays or any(end in run for end in ("_90", "_95")))
        assert config.checkpoint_every == configs["dense"].checkpoint_every
        model, dense = config.model, configs["dense"].model
        if run.startswith("mixture"):
            share = 4 if run.startswith("mixture_quarter") else 1
            assert model.experts_per_token * model.expert_dim * share == dense.ffn_dim
        assert (config.optimizer.learning_rate == 7e-4) == run.endswith(ends[1])
        if run.endswith(ends[2]):
            assert (config.sparsity.recipe.m, config.sparsity.dense_layers) == (32, 1)


def dense_loss(seconds, seed=0):
    """A loss that is a straight line in the logarithm of time."""
    return 3.0 - 0.2 * math.log(seconds) + 0.01 * seed


def made_up(ratios):
    """Rows of seeds whose run of 80 s ends with dense's loss at 80 s over the seed's ratio."""
    runs = []
    for seed, ratio in enumerate(ratios):
        runs.append(dict(name="dense", seed=seed, seconds=96.0, compile_seconds=10.0, heldout_loss=9.0))
        for seconds in (80.0, 100.0, 120.0):
            runs.append(dict(name=f"dense@{seconds / 100}", seed=seed, seconds=seconds, compile_seconds=10.0))
            runs[-1]["heldout_loss"] = dense_loss(seconds, seed)
        run = dict(name="slices_50", seed=seed, seconds=80.0, compile_seconds=50.0)
        runs.append(run | dict(heldout_loss=dense_loss(80.0 / ratio, seed)))
    return runs


def test_ratios_mean_and_interval_are_those_that_the_runs_were_made_of():
    wanted = [0.80, 0.84, 0.90, 0.82]
    runs = made_up(wanted)
    assert time_ratio.report(runs, "heldout_loss")["slices_50"]["at_one_pace"] is None
    for run in runs:
        run |= dict(model={"layers": 2}, first_dense_ms=110.0 if run["name"] == "slices_50" else 100.0)
    row = time_ratio.report(runs, "heldout_loss")["slices_50"]
    assert [seed["at_one_pace"] for seed in row["seeds"]] == pytest.approx([r / 1.1 for r in wanted])
    assert row["at_one_pace"]["mean"] == pytest.approx(row["ratio"]["mean"] / 1.1)
    runs[-1]["model"] = {"layers": 1}  # whose dense steps say nothing of the GPU
    assert time_ratio.report(runs, "heldout_loss")["slices_50"]["at_one_pace"] is None
    assert [seed["ratio"] for seed in row["seeds"]] == pytest.approx(wanted)
    assert [s["with_compilation"] for s in row["seeds"]] == pytest.approx([130 / (80 / r + 10) for r in wanted])
    assert not any(seed["extrapolated"] for seed in row["seeds"])
    low, high = stats.t.interval(0.95, 3, np.mean(wanted), stats.sem(wanted))
    assert row["ratio"] == pytest.approx(dict(mean=np.mean(wanted), low=low, high=high))


def test_ratios_are_the_same_in_whatever_order_runs_are_written():
    """Dense's longest run was stopped after its branches began, and compiled a second time."""
    runs = made_up([0.8, 0.9])
    for run in runs:
        run |= dict(model={}, first_dense_ms=100.0 + run["seconds"])
        run["compile_seconds"] += 7.0 * (run["name"] == "dense@1.2")
    assert time_ratio.report(runs[::-1], "heldout_loss") == time_ratio.report(runs, "heldout_loss")


def test_a_seed_without_the_second_text_is_left_out_of_its_ratios():
    runs = [run | dict(second_heldout_loss=run["heldout_loss"]) for run in made_up([0.8, 0.9])]
    for run in runs:
        if run["seed"] == 0 and run["name"].startswith("dense@"):
            run["second_heldout_loss"] = None
    (seed,) = time_ratio.report(runs, "second_heldout_loss")["slices_50"]["seeds"]
    assert seed["seed"] == 1 and seed["ratio"] == pytest.approx(0.9)


@pytest.mark.parametrize("ratio", [0.5, 1.1])
def test_losses_that_dense_was_not_seen_at_are_extrapolated_and_marked(ratio, capsys):
    table = time_ratio.report(made_up([ratio]), "heldout_loss")
    (seed,) = table["slices_50"]["seeds"]
    assert seed["ratio"] == pytest.approx(ratio) and seed["extrapolated"]
    assert table["slices_50"]["ratio"]["low"] is None
    time_ratio._print("heldout", table)
    assert f"{ratio:.3f}*" in capsys.readouterr().out


def test_seeds_of_several_files_of_a_suite_are_put_together():
    by_seed = [[run for run in made_up([0.8, 0.9]) if run["seed"] == seed] for seed in (0, 1)]
    files = [plots.Results(Path(f"{n}.json"), dict(suite="made_up", runs=of_seed)) for n, of_seed in enumerate(by_seed)]
    other = plots.Results(Path("other.json"), dict(suite="other", runs=made_up([0.5])))
    rows = time_ratio.rows_of_suite([files[0], other, files[1]])
    seeds = time_ratio.report(rows, "heldout_loss")["slices_50"]["seeds"]
    assert [seed["ratio"] for seed in seeds] == pytest.approx([0.8, 0.9])
    with pytest.raises(ValueError, match=r"1\.json: another file has runs of seed 1, too"):
        time_ratio.rows_of_suite([*files, files[1]])


def test_both_texts_are_reported_and_drawn_and_mistakes_named_in_one_line(tmp_path):
    runs = [run | dict(second_heldout_loss=2 * run["heldout_loss"]) for run in made_up([0.8, 0.9])]
    common = dict(tokens_per_step=1, step_ms={}, sparse_steps=None)
    runs = [run | common | dict(heldout_curve=[[1, run["heldout_loss"]]]) for run in runs]
    (tmp_path / "time.json").write_text(json.dumps(dict(suite="made_up", runs=runs)))
    options = [f"--figure={tmp_path / 'time.svg'}", "--names=slices_50"]
    rising = [run | dict(heldout_loss=5.0) if number == 2 else run for number, run in enumerate(runs)]
    (tmp_path / "rising.json").write_text(json.dumps(dict(suite="others", runs=rising)))
    one, other = (str(tmp_path / name) for name in ("time.json", "rising.json"))
    both = [f"--figure={tmp_path / 'both.svg'}", options[1]]
    (tmp_path / "empty.json").write_text(json.dumps(dict(suite="made_up", runs=[])))
    names = "--names=slices_50,slices_80"  # R of both would overlap
    twins = [run | dict(name="slices_80") for run in runs if run["name"] == "slices_50"]
    (tmp_path / "twins.json").write_text(json.dumps(dict(suite="made_up", runs=runs + twins)))
    command_lines = [
        ("experiments.quality.time_ratio", [one, *options]),
        ("experiments.quality.time_ratio", [one, other, *both]),
        ("experiments.quality.time_ratio", [str(tmp_path / "twins.json"), f"--figure={tmp_path / 'twins.svg'}", names]),
        ("experiments.quality.time_ratio", [one, options[0], "--names=slices_50,slices_05"]),
        ("experiments.quality.time_ratio", [one, str(tmp_path / "empty.json"), options[0]]),
        *(("experiments.quality.time_ratio", [one, str(tmp_path / name)]) for name in ("none.json", "time.svg")),
        ("experiments.quality.time_to_loss", ["--suite=tiny", "--data=nowhere", "--workdir=runs", "--output=out.json"]),
    ]
    imports = "import experiments.quality.time_ratio, experiments.quality.time_to_loss"
    done, result, twins, misspelt, empty, *others, without_data = run_modules(command_lines, tmp_path, imports)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0.850 [0.215, 1.485]") == 2
    figure = (tmp_path / "time.svg").read_text()
    assert "slices 50" in figure and "0.85 of the time" in figure
    assert_refused(result, "rising.json is drawn without R: seed 0: dense's heldout_loss does not fall with time")
    assert (tmp_path / "both.svg").read_text().count("0.85 of the time") == figure.count("0.85 of the time")
    assert twins.returncode == 0 and "of the time" not in (tmp_path / "twins.svg").read_text()
    assert_refused(misspelt, "--names: ['slices_05'] must be among dense, dense@0.8, dense@1.0, dense@1.2, slices_50")
    assert_refused(empty, "empty.json: has no runs yet")
    for refused, name in zip(others, ("none.json", "time.svg"), strict=True):
        assert_refused(refused, f"{name}: is no result of experiments.quality.time_to_loss: ")
    assert_refused(without_data, "nowhere does not exist")


def test_the_overview_has_a_run_of_all_seeds_where_it_ends_and_where_it_would_end_level():
    """Dense's whole run takes 100 s; a run of another suite, or of a rate of dense, is not drawn."""
    by_seed = [[run for run in made_up([0.8, 0.9, 1.0]) if run["seed"] == seed] for seed in range(3)]
    suites = ["llama1b", "llama1b", "llama1b", "made_up"]
    rated = [run | dict(name="dense_rate_0.1") if run["name"] == "slices_50" else run for run in by_seed[0]]
    rated = [run | dict(seed=3) for run in rated]
    files = zip(suites, [*by_seed[:2], by_seed[2] + rated, by_seed[0]], strict=True)
    (point,) = overview.points([plots.Results(Path(suite), dict(suite=suite, runs=runs)) for suite, runs in files])
    assert point.label == "llama1b, 25 layers: slices 50% (3)" and not point.rival
    assert point.ratio == pytest.approx(time_ratio.summarise([0.8, 0.9, 1.0]))
    seconds = {run["name"]: run["seconds"] for run in by_seed[0]}
    assert seconds["dense@1.0"] == 100 and point.level == pytest.approx(0.01 * seconds["slices_50"])
    (axes,) = overview.draw([point]).axes
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    assert [point.level] in drawn and [point.ratio.mean] in drawn and [point.ratio.low, point.ratio.high] in drawn


def plotted(name, loss, seconds, curve, sparse_steps=None, **step_ms):
    about = dict(name=name, seed=0, heldout_loss=loss, seconds=seconds, tokens_per_step=100, step_ms=step_ms)
    return about | dict(heldout_curve=curve, sparse_steps=sparse_steps)


PLOTTED = [
    plotted("dense", 2.9, 9.0, [[900, 2.9]], dense=10.0),
    plotted("dense@0.8", 2.6, 8.0, [[800, 2.6]], dense=10.0),
    plotted("dense@1.0", 2.4, 10.0, [[1000, 2.4]], dense=10.0),
    plotted("slices_50", 2.5, 7.0, [[400, 3.0], [1000, 2.5]], [2, 8], dense=10.0, sparse=5.0),
]


def test_losses_over_seconds_are_dense_by_length_and_where_others_end():
    plt.switch_backend("agg")
    figure = plots.losses_over_seconds(plots.Results(Path("time.json"), dict(suite="tiny_suite", runs=PLOTTED)))
    figure.canvas.draw()
    (axes,) = figure.axes
    plt.close(figure)
    points = [list(map(tuple, line.get_xydata())) for line in axes.lines]
    # 2 dense and 2 sparse steps at 400 tokens; 6 sparse and 4 dense ones in all.
    on_the_way = [pytest.approx((0.03, 3.0)), pytest.approx((0.07, 2.5))]
    assert points == [on_the_way, [(7.0, 2.5)], [pytest.approx((0.1, 2.4))], [(8.0, 2.6), (10.0, 2.4)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["slices 50", "dense, by length"]
    assert axes.get_title() == "tiny suite"
