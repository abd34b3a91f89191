"""Reports of runs that are made up, so that every number drawn is known."""

import base64
import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.style
import numpy as np
import pytest

from sparse_lm.report import report
from sparse_lm.reporting.figure import draw, style
from sparse_lm.reporting.panels import block_means
from sparse_lm.reporting.run import read_runs
from sparse_lm.reporting.units import COUNT, TIME, short
from sparse_lm.training.workdir import WorkdirError

LAYERS = 3


def lines(steps=40, windows=((10, 20), (28, 30)), loss=lambda step: 8.0 - step / 20, layers=LAYERS):
    """Of metrics.jsonl: steps of 1000 tokens and 3 s behind 7 s of setup, all logged, every fourth evaluated."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        sparse = any(a <= step < b for a, b in windows)
        line = {
            "step": step,
            "phase": "sparse" if sparse else "dense",
            "tokens": 1000 * (step + 1),
            "tokens_per_second": None if step == 0 else 3000.0 if sparse else 2500.0,
            "wall_time": 7.0 + 3 * (step + 1),
            "loss": loss(step),
            "skipped": 0,
        }
        if layers:
            line["activation_sparsity"] = rng.uniform(0.5, 1, layers).tolist()
        if step % 4 == 3:
            line["eval_loss"] = None if line["loss"] is None else line["loss"] + 0.5
        yield line


def summary(steps=40, state="finished"):
    evaluation = {"step": steps - 1, "loss": 6.54321, "perplexity": None, "bits_per_byte": None}
    return {
        "state": state, "step": steps, "steps": 40, "tokens": 1000 * steps, "loss": 6.05, "skipped": 0,
        "evaluation": evaluation, "best_evaluation": evaluation, "wall_time": 127.0,
        "seconds": {"setup": 7.0, "sparse": 36.0, "dense": 84.0},
        "tokens_per_second": {"dense": 2500.0, "overall": 315.0},
        "processes": [{"device": {"kind": "abacus <5>", "platform": "cpu", "count": 2}}],
    }  # fmt: skip


def make_run(workdir, written, summed=None, tail=""):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written) + tail)
    if summed:
        (workdir / "summary.json").write_text(json.dumps(summed))
    return str(workdir)


def drawn(*workdirs):
    """The figure's axes by title."""
    with matplotlib.style.context(style()):
        figure = draw(read_runs(workdirs))
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def shaded(axes):
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]


def bars_of_phases(axes):
    """[first, last] of each bar above the curves, a list a run that has any."""
    return [[segment[:, 0].tolist() for segment in bars.get_segments()] for bars in axes.collections]


def test_one_run_is_drawn_as_it_was_logged(tmp_path):
    axes = drawn(make_run(tmp_path / "a_run", lines(), summary()))
    by_tokens, by_time = axes["Loss by tokens"], axes["Loss by wall time"]
    losses = 8.0 - np.arange(40) / 20
    for ax, x in ((by_tokens, np.arange(1, 41)), (by_time, (7 + 3 * np.arange(1, 41)) / 60)):
        training, held_out = ax.lines[:2]
        np.testing.assert_allclose(training.get_xydata(), np.stack([x, losses], 1))
        np.testing.assert_allclose(held_out.get_xydata(), np.stack([x, losses + 0.5], 1)[3::4])
    assert by_tokens.get_xlabel() == "tokens (thousands)"
    assert by_time.get_xlabel() == "wall time, all included (minutes)"
    assert by_tokens.get_ylabel() == "loss (nats per token)"
    # To half a step, which is also what lies between two lines:
    np.testing.assert_allclose(shaded(by_tokens), [(10.5, 20.5), (28.5, 30.5)])
    np.testing.assert_allclose(shaded(by_time), (7 + 3 * np.array([(10.5, 20.5), (28.5, 30.5)])) / 60)

    (speed,) = axes["Throughput of training steps"].lines
    assert np.isnan(speed.get_ydata()[0]) and speed.get_ydata()[15] == 3.0
    assert axes["Throughput of training steps"].get_ylabel() == "tokens per second (thousands)"
    kinds = {bar.get_label(): bar.patches[0].get_width() * 60 for bar in axes["Where the time went"].containers}
    assert kinds == {"dense": pytest.approx(84), "sparse": pytest.approx(36), "setup": pytest.approx(7)}
    (mesh,) = axes["Zeros among activations: a_run"].collections
    zeros = np.array([line["activation_sparsity"] for line in lines()])
    np.testing.assert_allclose(mesh.get_array(), zeros.T)


def test_several_runs_that_disagree_in_their_phases(tmp_path):
    """One was cut short in its sparse phase and in its last line, one has nothing sparse, no layers, and no times."""
    dense = [{name: v for name, v in line.items() if name != "wall_time"} for line in lines(windows=(), layers=0)]
    axes = drawn(
        make_run(tmp_path / "whole", lines(), summary()),
        make_run(tmp_path / "cut", lines(15), summary(15, "running"), tail='{"step": 15, "lo'),
        make_run(tmp_path / "dense", dense),
    )
    by_tokens = axes["Loss by tokens"]
    assert not shaded(by_tokens)
    assert bars_of_phases(by_tokens) == [[[10.5, 20.5], [28.5, 30.5]], [[10.5, 15.0]], []]
    assert [len(line.get_xdata()) for line in by_tokens.lines[::3]] == [40, 15, 40]
    assert axes["Loss by wall time"].get_title(loc="right") == "not recorded: dense"
    assert [text.get_text() for text in axes["Where the time went"].texts] == ["not recorded"]
    maps = [title for title in axes if title.startswith("Zeros")]
    assert maps == ["Zeros among activations: whole", "Zeros among activations: cut"]


def test_a_run_with_damaged_files_is_drawn_without_what_they_lost(tmp_path):
    workdir = make_run(tmp_path / "damaged", lines(3), summary(3), tail='{"step": 3, "lo{"step": 4, "loss": 7.8}\n')
    (tmp_path / "damaged" / "summary.json").write_text('{"state": "fini')
    axes = drawn(workdir)
    assert len(axes["Loss by tokens"].lines[0].get_xdata()) == 3
    assert [text.get_text() for text in axes["Where the time went"].texts] == ["not recorded"]


def test_losses_that_are_not_finite_are_marked(tmp_path):
    some = make_run(tmp_path / "some", lines(loss=lambda step: None if step in (5, 6, 11) else 4.0))
    never = make_run(tmp_path / "never", lines(loss=lambda step: None))
    for workdir, bad in ((some, [6, 7, 12]), (never, np.arange(1, 41))):
        marks = drawn(workdir)["Loss by tokens"].lines[2]
        np.testing.assert_array_equal(marks.get_xdata(), bad)


def test_first_line_alone_can_be_drawn(tmp_path):
    assert drawn(make_run(tmp_path / "young", lines(1)))["Loss by tokens"].lines[0].get_xydata().tolist() == [[1000, 8]]


class Links(html.parser.HTMLParser):
    """What a page refers to, and the text of its table's cells."""

    def __init__(self):
        super().__init__()
        self.references, self.cells, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        if "td" in self.tags[-2:]:
            self.cells.append(data.strip())


def test_html_is_one_file(tmp_path):
    name = "<b>&$x$"
    workdirs = [make_run(tmp_path / name, lines(), summary()), make_run(tmp_path / "new", lines(3))]
    text = report(workdirs, str(tmp_path / "made" / "report.html")).read_text()
    links = Links()
    links.feed(text)
    assert not {"script", "link", "img", "b"} & set(links.tags)
    assert links.tags.count("svg") == 1
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in links.references)
    for reference in links.references:
        if reference.startswith("data:"):
            assert base64.b64decode(reference.partition(",")[2]).startswith(b"\x89PNG")
    assert set(re.findall(r"https?://[^\"'\s<]*", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|url\((?!#)", text)
    cells = [cell for cell in links.cells if cell]
    assert cells[:11] == [
        name, "40 of 40", "40 k", "6.0500", "6.5432", "6.5432", "2.12 min", "2.5 k", "-", "2 x abacus <5>", "finished",
    ]  # fmt: skip
    assert cells[11:] == ["new", *["-"] * 10]


def test_png_from_the_command_line(tmp_path):
    workdir = make_run(tmp_path / "run", lines(), summary())
    output = tmp_path / "report.png"
    command = [sys.executable, "-m", "sparse_lm.report", f"--workdir={workdir}", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{output}: ")
    image = matplotlib.image.imread(output)
    assert image.shape[1] == 1800
    assert np.all(image[0, 0] == 1)  # white, not transparent


def test_long_runs_are_thinned_by_means():
    values = np.random.default_rng(0).standard_normal(2503)
    values[[5, 6, 7, 100]] = np.nan
    for most in (1, 3, 1000, 2503, 5000):
        blocks = np.array_split(values, min(most, len(values)))
        means = block_means(values, most)
        assert len(means) == len(blocks)
        if most in (1, 2503, 5000):
            np.testing.assert_allclose(means, [np.nanmean(b) if np.isfinite(b).any() else np.nan for b in blocks])
        assert np.nanmin(means) >= np.nanmin(values) and np.nanmax(means) <= np.nanmax(values)
    assert np.isnan(block_means(values, 2503)[[5, 6, 7, 100]]).all()


def test_numbers_as_people_read_them():
    assert [short(seconds, TIME) for seconds in (0.5, 119, 127, 7300)] == ["0.5 s", "119 s", "2.12 min", "2.03 h"]
    assert [short(count, COUNT) for count in (0, 999, 1500, 40_000, 9.83e6, 2.5e12)] == [
        "0", "999", "1,500", "40 k", "9.83 M", "2,500 G",
    ]  # fmt: skip


def test_runs_of_the_same_name_go_by_their_paths(tmp_path):
    workdirs = [make_run(tmp_path / parent / "tiny", lines(2)) for parent in ("a", "b")]
    workdirs.append(make_run(tmp_path / "other", lines(2)))
    assert [run.name for run in read_runs(workdirs)] == [*workdirs[:2], "other"]


def test_what_is_no_run_is_refused_by_name(tmp_path):
    good = make_run(tmp_path / "good", lines(2))
    young = make_run(tmp_path / "young", [])
    for bad, reason in (
        (tmp_path, "holds no run"),
        (tmp_path / "nowhere", "holds no run"),
        (young, "not logged a step"),
    ):
        with pytest.raises(WorkdirError, match=re.escape(f"--workdir={bad}: ") + f".*{reason}"):
            report([good, str(bad)], str(tmp_path / "report.html"))
    with pytest.raises(ValueError, match=r"--output=report\.pdf: must end in \.html or \.png"):
        report([good], "report.pdf")
    assert not (tmp_path / "report.html").exists()
