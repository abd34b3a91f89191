"""The figure of made-up results: each point is where its numbers say."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from experiments import plots


def run(name, loss, seconds, curve, sparse_steps=None, **step_ms):
    about = dict(name=name, seed=0, heldout_loss=loss, seconds=seconds, tokens_per_step=100, step_ms=step_ms)
    return about | dict(heldout_curve=curve, sparse_steps=sparse_steps)


RUNS = [
    run("dense", 2.9, 9.0, [[900, 2.9]], dense=10.0),
    run("dense@0.8", 2.6, 8.0, [[800, 2.6]], dense=10.0),
    run("dense@1.0", 2.4, 10.0, [[1000, 2.4]], dense=10.0),
    run("slices_50", 2.5, 7.0, [[400, 3.0], [1000, 2.5]], [2, 8], dense=10.0, sparse=5.0),
]


def test_losses_over_seconds_are_dense_by_length_and_where_others_end():
    plt.switch_backend("agg")
    figure = plots.losses_over_seconds(plots.Results(Path("time.json"), dict(suite="tiny_suite", runs=RUNS)))
    figure.canvas.draw()
    (axes,) = figure.axes
    plt.close(figure)
    points = [list(map(tuple, line.get_xydata())) for line in axes.lines]
    # 2 dense and 2 sparse steps at 400 tokens; 6 sparse and 4 dense ones in all.
    on_the_way = [pytest.approx((0.03, 3.0)), pytest.approx((0.07, 2.5))]
    assert points == [on_the_way, [(7.0, 2.5)], [pytest.approx((0.1, 2.4))], [(8.0, 2.6), (10.0, 2.4)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["slices 50", "dense, by length"]
    assert axes.get_title() == "tiny suite"
