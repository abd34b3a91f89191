"""Pages about results name files that are there, and `python -m experiments` lists every command."""

import re

from experiments.__main__ import HERE, commands
from tests.command_lines import ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "experiments/README.md"]


def test_files_that_pages_name_exist_and_every_result_and_every_figure_is_on_a_page():
    pages = " ".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"[`/]([a-z0-9_]+_[a-z0-9]+\.(?:json|txt))[`)]", pages))
    results = {path.name for path in (ROOT / "experiments/results").iterdir() if path.suffix != ".lock"}
    assert named == results
    figures = list((ROOT / "experiments/plots").iterdir())
    assert figures and all(f"plots/{path.name})" in pages for path in figures)


def test_every_command_is_listed_with_a_sentence():
    listed = dict(commands())
    with_main = {path for path in HERE.rglob("*.py") if "\n    app.run(main)" in path.read_text()}
    assert len(with_main) > 10
    assert {HERE.parent / f"{module.replace('.', '/')}.py" for module in listed} == with_main
    assert all(sentence.endswith((".", ":")) for sentence in listed.values())
