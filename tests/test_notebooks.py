"""Every notebook runs from top to bottom, and what is committed is its output."""

import json
import os
import pathlib
import sys

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
FEWER = {"inside_a_model": {"STEPS": 12, "BATCH_SIZE": 2, "GROUPS": [16]}}
"""Values for the cells tagged "parameters", which make a run shorter."""


def code_cells(name):
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def without_display(monkeypatch):
    """As a notebook's kernel: in the notebook's directory, with figures that are drawn, not shown."""
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    with matplotlib.rc_context():
        yield
    plt.close("all")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_runs_from_top_to_bottom(name, without_display):
    namespace = {"__name__": "__main__"}
    for cell in code_cells(name):
        exec("".join(line for line in cell["source"] if not line.startswith("%")), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            namespace |= FEWER[name]
        for number in plt.get_fignums():
            plt.figure(number).draw_without_rendering()
        plt.close("all")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_is_committed_executed_and_small(path):
    cells = code_cells(path.stem)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any({"image/png", "image/svg+xml"} & output.get("data", {}).keys() for output in outputs)
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert os.path.getsize(path) < 1e6
