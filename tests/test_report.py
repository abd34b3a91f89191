"""Reports of runs that are made up, so that every number drawn is known."""

import base64
import json
import re

import numpy as np
import plotly.io
import pytest

from sparse_lm.errors import OutputError, WorkdirError
from sparse_lm.report import report
from sparse_lm.reporting import page
from sparse_lm.reporting.run import block_means, read_runs

LOSS, LAYERS = page.PANELS["loss"], 3


def lines(steps=40, sparse=(10, 20), loss=lambda step: 8.0 - step / 20, layers=LAYERS):
    """Of metrics.jsonl: steps of 1000 tokens and 3 s behind 7 s of setup, all logged, every fourth evaluated."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        phase = "sparse" if sparse[0] <= step < sparse[1] else "dense"
        line = dict(step=step, phase=phase, tokens=1000 * (step + 1), wall_time=7.0 + 3 * (step + 1), memory=None)
        line |= dict(loss=loss(step), tokens_per_second=None if step == 0 else 3000.0 if phase == "sparse" else 2500.0)
        if layers:
            line["activation_sparsity"] = rng.uniform(0.5, 1, layers).tolist()
        if layers and phase == "sparse":
            line["expert_load"] = [[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]]
        if step % 4 == 3:
            line["eval_loss"] = None if line["loss"] is None else line["loss"] + 0.5
        yield line


def summary(steps=40, state="finished"):
    evaluation = {"step": steps - 1, "loss": 6.54321, "perplexity": None, "bits_per_byte": None}
    seconds = {"setup": 7.0, "sparse": 36.0, "dense": 84.0}
    device = {"kind": "abacus <5>", "platform": "cpu", "count": 2}
    return {
        "state": state, "step": steps, "steps": 40, "tokens": 1000 * steps, "loss": 6.05, "skipped": 0,
        "evaluation": evaluation, "best_evaluation": evaluation, "wall_time": 127.0, "seconds": seconds,
        "tokens_per_second": {"dense": 2500.0, "overall": 315.0},
        "processes": [{"device": device, "git_commit": "0123456789", "seconds": seconds, "steps": {"dense": 40}}],
    }  # fmt: skip


def make_run(workdir, written, summed=None, tail="", config=None):
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps(config or {}))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written) + tail)
    if summed:
        (workdir / "summary.json").write_text(json.dumps(summed))
    return str(workdir)


def curves(*workdirs):
    """The page's traces, as Plotly is given them: {title of the panel: [(run, x, y)]}; and its layout."""
    drawn = json.loads(plotly.io.to_json(page.draw(read_runs(workdirs))))
    layout = drawn["layout"]
    titles = [annotation["text"] for annotation in layout["annotations"]]
    found = {}
    for trace in drawn["data"]:
        panel = titles[int(trace["yaxis"].removeprefix("y") or 1) - 1]
        found.setdefault(panel, []).append((trace["name"], decoded(trace["x"]), decoded(trace["y"])))
    return found, layout


def decoded(values):
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    return np.array(values, float)


def test_page_has_what_was_logged_by_tokens_and_by_time(tmp_path):
    found, layout = curves(make_run(tmp_path / "a_run", lines(), summary()))
    tokens, losses = 1000 * np.arange(1, 41), 8.0 - np.arange(40) / 20
    (name, x, y), (_, evaluated, held_out) = found[LOSS]
    assert name == "a_run"
    np.testing.assert_allclose([x, y], [tokens, losses])
    np.testing.assert_allclose([evaluated, held_out], [tokens[3::4], losses[3::4] + 0.5])
    ((_, _, speed),) = found["tokens per second"]
    assert np.isnan(speed[0]) and speed[15] == 3000
    ((_, _, zeros),) = found["zeros among activations"]
    np.testing.assert_allclose(zeros, [np.mean(line["activation_sparsity"]) for line in lines()])
    ((_, _, load),) = found["load of the busiest expert (1: even)"]
    np.testing.assert_allclose(load[10:20], (1.5 + 1 + 2) / 3)
    assert np.isnan(load[20:]).all()
    assert not {"gradient norm", "peak of device memory (bytes)"} & found.keys()  # which was not logged

    by_tokens, by_time = layout["updatemenus"][0]["buttons"]
    assert (by_tokens["label"], by_time["label"]) == ("tokens", "wall time (minutes)")
    times, (shape,) = decoded(by_time["args"][0]["x"][0]), by_time["args"][1]["shapes"]
    np.testing.assert_allclose(times, (7 + 3 * tokens / 1000) / 60)
    # To half a step, which is also what lies between two lines:
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(10_500, 20_500)]
    np.testing.assert_allclose([shape["x0"], shape["x1"]], (7 + 3 * np.array([10.5, 20.5])) / 60)


def test_layers_that_stay_dense_have_no_part_in_means(tmp_path):
    logged = {"expert_load": [[0.0, 0.0], [0.25, 0.75], [0.5, 0.5]], "flip_rate": [0.0, 0.1, 0.3]}
    written, config = [line | logged for line in lines(2, sparse=(0, 2))], {"sparsity": {"dense_layers": 1}}
    found, _ = curves(make_run(tmp_path / "a_run", written, config=config))
    for name, mean in (("load of the busiest expert (1: even)", (1.5 + 1) / 2), ("flip rate of 2:4 weights", 0.2)):
        ((_, _, numbers),) = found[name]
        np.testing.assert_allclose(numbers, mean)


def test_several_runs_that_disagree_in_their_phases(tmp_path):
    """One was cut short in its sparse phase and in its last line, one has nothing sparse, no layers, and no times."""
    dense = [{key: v for key, v in line.items() if key != "wall_time"} for line in lines(sparse=(0, 0), layers=0)]
    workdirs = (
        make_run(tmp_path / "whole", lines(), summary()),
        make_run(tmp_path / "cut", lines(15), summary(15, "running"), tail='{"step": 15, "lo'),
        make_run(tmp_path / "dense", dense),
    )
    found, layout = curves(*workdirs)
    whole, cut, _ = read_runs(workdirs)
    shaded = [(shape["fillcolor"], shape["x0"], shape["x1"]) for shape in layout["shapes"]]
    assert shaded == [(whole.color, 10_500, 20_500), (cut.color, 10_500, 15_000)]
    assert [len(x) for _, x, _ in found[LOSS][::2]] == [40, 15, 40]
    assert [name for name, *_ in found["load of the busiest expert (1: even)"]] == ["whole", "cut", "dense"]


def test_html_is_one_file_with_tables_of_facts_and_differences(tmp_path):
    name = "<b>&$x$"
    configs = ({"steps": 40, "model": {"dim": dim}, "sparsity": {"m": m}} for dim, m in ((16, 8), (16, None)))
    workdirs = [
        make_run(tmp_path / name, lines(), summary(), config=next(configs)),
        make_run(tmp_path / "new", lines(3), config=next(configs)),
    ]
    text = report(workdirs, str(tmp_path / "made" / "report.html")).read_text()
    text = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.S)
    assert not re.search(r"<(link|img|b)\b|<[^>]* (src|href)=", text)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", text)]
    cells = {row[0]: row[1:] for row in rows if row}
    assert cells.items() >= {
        "state": ["finished", "no checkpoint yet"], "step": ["40", "3"], "tokens": ["40,000", "3,000"],
        "evaluation.loss": ["6.5432", "-"], "evaluation.perplexity": ["-", "-"], "wall_time": ["127", "-"],
        "seconds.sparse": ["36", "-"], "tokens_per_second.dense": ["2,500", "-"],
        "device": ["2 x abacus &lt;5&gt;", "-"], "commit": ["0123456789", "-"],
    }.items()  # fmt: skip
    assert {key: row for key, row in cells.items() if key.startswith("config.")} == {"config.sparsity.m": ["8", "-"]}
    alone = report(workdirs[:1], str(tmp_path / "alone.html")).read_text()
    unlike_default = re.findall(r"<tr><td>config\.([\w.]+)</td><td>(.*?)</td></tr>", alone)
    assert unlike_default == [("model.dim", "16"), ("sparsity.m", "8"), ("steps", "40")]


def test_a_run_whose_losses_are_not_finite_and_whose_summary_is_damaged_is_reported(tmp_path):
    bad = make_run(tmp_path / "bad", lines(1, loss=lambda step: None), summary())
    (tmp_path / "bad" / "summary.json").write_text('{"state": "fini')
    (curve,) = curves(bad)[0][LOSS]
    assert np.isnan(curve[2]).all()


def test_long_runs_are_thinned_by_means():
    values = np.random.default_rng(0).standard_normal(2503)
    values[[5, 6, 7, 100]] = np.nan
    for most, size in ((1, 2503), (3, 835), (1000, 3), (2503, 1), (5000, 1)):
        blocks = [values[start : start + size] for start in range(0, 2503, size)]
        means = [np.nanmean(b) if np.isfinite(b).any() else np.nan for b in blocks]
        np.testing.assert_allclose(block_means(values, most), means)


def test_runs_of_the_same_name_go_by_their_paths(tmp_path):
    workdirs = [make_run(tmp_path / parent / "tiny", lines(2)) for parent in ("a", "b")]
    workdirs.append(make_run(tmp_path / "other", lines(2)))
    assert [run.name for run in read_runs(workdirs)] == [*workdirs[:2], "other"]


def test_what_is_no_run_and_no_output_is_refused_by_name(tmp_path):
    good = make_run(tmp_path / "good", lines(2))
    young = make_run(tmp_path / "young", [])
    (tmp_path / "loop").symlink_to("loop")
    none = "has no config.json"
    for bad, reason in ((tmp_path, none), (tmp_path / "nowhere", none), (young, "not logged a step")):
        with pytest.raises(WorkdirError, match=re.escape(f"--workdir={bad}: ") + f".*{reason}"):
            report([good, str(bad)], str(tmp_path / "report.html"))
    for output, reason in (("report.pdf", "must end in"), (tmp_path / "loop" / "r.html", "cannot be written")):
        with pytest.raises(OutputError, match=f"--output={output}: {reason}"):
            report([good], str(output))
    assert not (tmp_path / "report.html").exists()
