"""Figures of made-up results: each point is where its numbers say."""

import json

import matplotlib.pyplot as plt
import pytest

from experiments import plots

STEPS = {"dense": 600.0, "slices": 400.0, "venom": 500.0}


def run(name, seed, loss, seconds=1.0, curve=None, sparse_steps=None, **step_ms):
    about = dict(name=name, seed=seed, heldout_loss=loss, seconds=seconds, tokens_per_step=100, step_ms=step_ms)
    return about | dict(heldout_curve=curve or [[0, 9.0], [1e6, loss]], sparse_steps=sparse_steps)


@pytest.fixture
def results(tmp_path):
    """A directory with results of every kind."""
    parts = {"FFN products": 0.5, "norms": 0.25}
    recipes = {
        name: dict(step_ms=ms, ms_by_part={part: {"total": share * ms} for part, share in parts.items()})
        for name, ms in STEPS.items()
    }
    model = dict(dim=2048, ffn_dim=8192, layers=25, vocab_size=128256)
    shape = dict(dim=2048, neurons=8192, tokens=16384)
    product = dict(m=8, n=16, k=32)
    tables = {
        "matmul_h200": dict(matmul_24=[product | dict(speedup=1.5, speedup_transposed=1.4)]),
        "ffn_h200": dict(
            ffn=[
                dict(recipe="dense", **shape),
                dict(recipe="slices", forward_speedup=3.0, both_speedup=3.5, **shape),
                dict(recipe="venom", forward_speedup=1.8, both_speedup=2.0, **shape),
            ]
        ),
        "step_llama1b_h200": dict(batch_size=8, seq_len=4096, model=model, recipes=recipes),
        "quality_long_h200": dict(
            runs=[run("dense", 0, 3.0), run("dense", 1, 3.2), run("slices", 0, 3.3), run("slices", 1, 3.5)]
        ),
        "time_tiny_h200": dict(
            suite="tiny_suite",
            runs=[
                run("dense", 0, 2.9, 9.0, [[900, 2.9]], dense=10.0),
                run("dense@0.8", 0, 2.6, 8.0, [[800, 2.6]], dense=10.0),
                run("dense@1.0", 0, 2.4, 10.0, [[1000, 2.4]], dense=10.0),
                run("slices_50", 0, 2.5, 7.0, [[400, 3.0], [1000, 2.5]], [2, 8], dense=10.0, sparse=5.0),
            ],
        ),
    }
    for name, table in tables.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    plt.switch_backend("agg")
    yield tmp_path
    plt.close("all")


def drawn(results, *patterns):
    figures = dict(plots.figures(*patterns, directory=results))
    for figure in figures.values():
        figure.canvas.draw()
    return figures


def test_every_kind_of_result_has_its_figure(results):
    assert set(drawn(results)) == {
        "matmul_h200_products_24",
        "ffn_h200_feed_forwards",
        "step_llama1b_h200_whole_steps",
        "quality_long_h200_loss_curves",
        "time_tiny_h200_losses_over_seconds",
    }


def test_steps_show_time_speedup_and_parts(results):
    (axes,) = drawn(results, "step_*")["step_llama1b_h200_whole_steps"].axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["600 ms, 1.00 times", "400 ms, 1.50 times", "500 ms, 1.20 times"]
    totals, products, norms = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert totals == list(STEPS.values())
    assert products == [ms / 2 for ms in totals] and norms == [ms / 4 for ms in totals]
    assert axes.get_title() == "D 2048, F 8192, 25 layers, 32768 tokens"


def test_losses_over_seconds_are_dense_by_length_and_where_others_end(results):
    (axes,) = drawn(results, "time_*")["time_tiny_h200_losses_over_seconds"].axes
    points = [list(map(tuple, line.get_xydata())) for line in axes.lines]
    # 2 dense and 2 sparse steps at 400 tokens; 6 sparse and 4 dense ones in all.
    on_the_way = [pytest.approx((0.03, 3.0)), pytest.approx((0.07, 2.5))]
    assert points == [on_the_way, [(7.0, 2.5)], [pytest.approx((0.1, 2.4))], [(8.0, 2.6), (10.0, 2.4)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["slices 50", "dense, by length"]
    assert axes.get_title() == "tiny suite"
