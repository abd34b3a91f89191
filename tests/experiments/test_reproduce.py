"""Rows of `experiments.reproduce` are those of the README's tables, and pages name files and commands that are there.

That commands parse, tests/test_documented_commands.py says.
"""

import copy
import json
import re

import pytest

from experiments import reproduce
from tests.command_lines import ROOT
from tests.documents import PAGES

README = (ROOT / "README.md").read_text()


def result(name):
    return json.loads((reproduce.RESULTS / reproduce.ROWS[name].file).read_text())


def test_every_result_file_of_the_readmes_tables_has_a_row():
    linked = set(re.findall(r"experiments/results/(\w+\.json)", README))
    assert linked == {row.file for row in reproduce.ROWS.values()}


@pytest.mark.parametrize("name", reproduce.ROWS)
def test_the_readme_has_the_numbers(name):
    """R links the file of its row, but where the text links the section of results; a star marks extrapolation."""
    row = reproduce.ROWS[name]
    times = {"ms": "{:.0f} ms", "seconds": "{:.0f} s", "gain": "{:.2f}x"}
    for number, value in row.read(row.expected()).items():
        if text := times.get(number.split()[-1]):
            assert text.format(value) in README, number
        elif number.endswith("ratio"):
            links = rf"\[{value:.2f}(\\\*)?( of the time)?\]\((experiments/results/{row.file}|docs/results\.md#fp8)\)"
            assert re.search(links, README), number
        else:
            line = f"| `{number.split()[0]}` |"
            assert any(f" {value:.1f}x " in row for row in README.splitlines() if row.startswith(line))


def test_numbers_are_compared_within_their_tolerance(tmp_path, capsys):
    new = copy.deepcopy(result("step_afm"))
    new["recipes"]["slices"]["step_ms"] *= 1.07  # a time may be 10% off, a ratio 5%
    compared = {name: within for name, _, _, within in reproduce.compare(reproduce.ROWS["step_afm"], new)}
    assert compared == {"dense ms": True, "slices ms": True, "gain": False}
    path = tmp_path / "new.json"
    path.write_text(json.dumps(new))
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["reproduce", "step_afm", str(path)])
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert "gain: 2.064, expected 2.208 +- 5%: OUTSIDE" in printed and "slices ms: 78.77" in printed


@pytest.mark.parametrize("text", ["", "[]", '{"recipes": {"dense": {"step_ms": 1.0}}}', None])
def test_a_file_that_is_no_whole_result_or_is_not_there_is_refused_by_name(text, tmp_path):
    path = tmp_path / "new.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r"new\.json is no whole result of step_afm: "):
        reproduce.main(["reproduce", "step_afm", str(path)])


def test_files_that_pages_name_exist_and_every_result_and_every_figure_is_on_a_page():
    pages = " ".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"[`/]([a-z0-9_]+_[a-z0-9]+\.(?:json|txt))[`)]", pages))
    results = {path.name for path in (ROOT / "experiments/results").iterdir() if path.suffix != ".lock"}
    assert named == results
    figures = list((ROOT / "experiments/plots").iterdir())
    assert figures and all(f"plots/{path.name})" in pages for path in figures)
