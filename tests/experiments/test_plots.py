"""Figures of results that may not be committed yet, drawn from made-up ones: each point is where its numbers say."""

import json

import matplotlib.pyplot as plt
import pytest

from experiments import plots
from experiments.plot_losses import final_gaps
from experiments.plot_results import read_results
from experiments.quality.suites import SUITES

SLICES = "slices 2:16, neuron centres"
LOSSES = {"dense": (3.0, 3.2), SLICES: (3.3, 3.5), "act24": (3.1, 3.1)}
STEPS = {"dense": 600.0, "venom_slices": 400.0, "venom_sets": 500.0}


@pytest.fixture
def results(tmp_path):
    """A directory with a suite of runs of two seeds, a benchmark of steps and one of kernels in training."""
    base, overrides = SUITES["recipes"]
    runs = [
        dict(name=name, seed=seed, overrides=overrides[name], heldout_loss=loss, heldout_curve=[[0, 9.0], [1e6, loss]])
        for name, losses in LOSSES.items()
        for seed, loss in enumerate(losses)
    ]
    choices = {
        "dense": dict(recipe="dense"),
        "venom_slices": dict(recipe="venom", selection="slices", m=16, clusters=4),
        "venom_sets": dict(recipe="venom", selection="cluster_sets", m=16, clusters=64, neuron_run=128),
    }
    recipes = {
        name: dict(
            step_ms=ms,
            sparsity=choices[name],
            ms_by_part={"FFN products": {"total": ms / 2, "a_kernel": ms / 3}, "norms": {"total": ms / 4}},
        )
        for name, ms in STEPS.items()
    }
    model = dict(dim=2048, ffn_dim=8192, layers=25, vocab_size=128256)
    torch = dict(dim=2048, layers=25, vocab_size=128256, batch_size=8, step_ms=610.0)
    losses = {"kernels": [2.0, 1.5], "reference": [2.0, 1.4]}
    tables = {
        "quality_recipes": dict(base=base, runs=runs),
        "step_llama1b_8x4096_h200": dict(batch_size=8, seq_len=4096, model=model, recipes=recipes),
        "step_torch_h200": [torch],
        "kernel_agreement_h200": dict(
            sparsity=dict(start_step=4, end_step=5),
            losses=losses | dict(reference_again=losses["reference"], reference_in_halves=losses["kernels"]),
        ),
    }
    for name, table in tables.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    plt.switch_backend("agg")
    yield tmp_path
    plt.close("all")


def drawn(figures):
    figures = dict(figures)
    for figure in figures.values():
        figure.canvas.draw()
    return figures


def test_every_result_has_its_figures(results):
    assert set(drawn(plots.figures(directory=results))) == {
        "quality_recipes_loss_curves",
        "quality_recipes_final_losses",
        "step_llama1b_8x4096_h200_whole_steps",
        "kernel_agreement_h200_kernel_agreement",
    }


def test_only_figures_of_the_given_names_are_drawn(results):
    assert [name for name, _ in plots.figures("step_*", "quality_*_final_losses", directory=results)] == [
        "step_llama1b_8x4096_h200_whole_steps",
        "quality_recipes_final_losses",
    ]
    (name,) = dict(plots.frontiers("*_over_time", directory=results))
    assert name == "quality_recipes_step_llama1b_8x4096_h200_losses_over_time"


def test_what_is_absent_is_said(results):
    absent = " ".join(plots.absent(results))
    assert "matmul_*.json" in absent and "experiments.kernels.products" in absent
    assert "quality" not in absent and "step" not in absent


def test_frontier_joins_runs_and_steps_by_what_they_choose(results):
    (axes,) = drawn(plots.frontiers(directory=results))["quality_recipes_step_llama1b_8x4096_h200_frontier"].axes
    points = {bars.get_label(): tuple(bars.lines[0].get_xydata()[0]) for bars in axes.containers}
    half_of_the_steps = 1 / (0.5 + 0.5 / 1.5)
    assert points == {
        "dense: +0.000": (1.0, pytest.approx(0.0)),
        f"{SLICES}: +0.300": (pytest.approx(half_of_the_steps), pytest.approx(0.3)),
    }  # act24: not timed


def test_dense_layers_take_a_dense_steps_time(results):
    path = results / "quality_recipes.json"
    suite = json.loads(path.read_text())
    for run in suite["runs"]:
        run["overrides"] |= {"sparsity.dense_layers": 2} if run["name"] == SLICES else {}  # of 8
    path.write_text(json.dumps(suite))
    (figure,) = drawn(plots.frontiers("*_frontier", directory=results)).values()
    (axes,) = figure.axes
    (speedup,) = [bars.lines[0].get_xdata()[0] for bars in axes.containers if bars.get_label().startswith(SLICES)]
    assert speedup == pytest.approx(1 / (0.5 + 0.5 * (0.25 + 0.75 / 1.5)))


def test_losses_are_compared_with_the_dense_run_of_the_same_seed(results):
    gaps = final_gaps(read_results(results / "quality_recipes.json"))
    assert gaps == {"dense": [0, 0], SLICES: pytest.approx([0.3, 0.3]), "act24": pytest.approx([0.1, -0.1])}


def test_seeds_whose_dense_run_is_not_there_yet_are_left_out(results):
    path = results / "quality_recipes.json"
    suite = json.loads(path.read_text())
    suite["runs"] = [run for run in suite["runs"] if (run["name"], run["seed"]) not in (("dense", 1), ("act24", 0))]
    path.write_text(json.dumps(suite))
    assert final_gaps(read_results(path)) == {"dense": [0], SLICES: [pytest.approx(0.3)]}
    _, gaps = drawn(plots.figures(directory=results))["quality_recipes_loss_curves"].axes
    assert {line.get_label(): line.get_ydata()[-1:].tolist() for line in gaps.lines} == {
        "dense": [0], SLICES: [pytest.approx(0.3)], "act24": [],
    }  # fmt: skip
    assert "quality_recipes_step_llama1b_8x4096_h200_frontier" in drawn(plots.frontiers(directory=results))


def test_losses_over_time_count_sparse_steps_as_long_as_they_take(results):
    path = results / "quality_recipes.json"
    suite = json.loads(path.read_text())
    steps, tokens_per_step = suite["base"]["steps"], suite["base"]["batch_size"] * suite["base"]["seq_len"]
    for run in suite["runs"]:
        checkpoints = (0, suite["base"]["sparsity.start_step"], suite["base"]["sparsity.end_step"], steps)
        run["heldout_curve"] = [[step * tokens_per_step, 9.0 - step / steps] for step in checkpoints]
    path.write_text(json.dumps(suite))
    (figure,) = drawn(plots.frontiers("*_losses_over_time", directory=results)).values()
    (axes,) = figure.axes
    times = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert times == {
        "dense: 8.000": pytest.approx([0, 0.1, 0.6, 1]),
        f"{SLICES}: 8.000": pytest.approx([0, 0.1, 0.1 + 0.5 / 1.5, 0.5 + 0.5 / 1.5]),
    }


def test_suites_that_end_sparse_have_no_frontier(results):
    path = results / "quality_recipes.json"
    suite = json.loads(path.read_text())
    suite["base"]["sparsity.end_step"] = suite["base"]["steps"]
    path.write_text(json.dumps(suite))
    assert not dict(plots.frontiers(directory=results))


def test_loss_curves_are_means_over_seeds_and_distances_from_dense(results):
    figure = drawn(plots.figures("quality_*", directory=results))["quality_recipes_loss_curves"]
    last = [[line.get_ydata()[-1] for line in axes.lines] for axes in figure.axes]
    assert last == [pytest.approx([3.1, 3.4, 3.1]), pytest.approx([0.0, 0.3, 0.0])]


def test_steps_without_a_dense_one_show_their_times(results):
    path = results / "step_llama1b_8x4096_h200.json"
    steps = json.loads(path.read_text())
    del steps["recipes"]["dense"]
    path.write_text(json.dumps(steps))
    (axes,) = drawn(plots.figures("step_*", directory=results))["step_llama1b_8x4096_h200_whole_steps"].axes
    assert [text.get_text() for text in axes.texts] == ["400 ms", "500 ms", "PyTorch, dense"]
    assert not dict(plots.frontiers(directory=results))


def test_steps_show_time_speedup_parts_and_pytorch(results):
    (axes,) = drawn(plots.figures("step_*", directory=results))["step_llama1b_8x4096_h200_whole_steps"].axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["600 ms, 1.00 times", "400 ms, 1.50 times", "500 ms, 1.20 times", "PyTorch, dense"]
    totals, products, norms = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert totals == list(STEPS.values())
    assert products == [ms / 2 for ms in totals] and norms == [ms / 4 for ms in totals]
    (pytorch,) = axes.lines
    assert list(pytorch.get_xdata()) == [610.0, 610.0]
    assert axes.get_title() == "D 2048, F 8192, 25 layers, 32768 tokens"


def test_steps_on_several_gpus_say_so(results):
    path = results / "step_llama1b_8x4096_h200.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(mesh=dict(data=2, fsdp=4, tensor=1))))
    (axes,) = drawn(plots.figures("step_*", directory=results))["step_llama1b_8x4096_h200_whole_steps"].axes
    assert axes.get_title().endswith("32768 tokens on 8 GPUs")
