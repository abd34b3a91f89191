"""Pages about results name files that are there, and `python -m experiments` lists every command."""

import re

import pytest

from experiments.__main__ import HERE, commands
from tests.command_lines import ROOT

PAGES = [ROOT / "docs/results.md", ROOT / "docs/kernels.md", ROOT / "experiments/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    files = set(re.findall(r"`([a-z0-9_*]+_[a-z0-9*]+\.(?:json|txt))`", text))
    assert not {name for name in files if not list((ROOT / "experiments/results").glob(name))}


def test_every_result_is_on_a_page():
    named = " ".join(page.read_text() for page in PAGES)
    patterns = set(re.findall(r"`([a-z0-9_*]+\.(?:json|txt))`", named))
    for path in (ROOT / "experiments/results").iterdir():
        assert path.suffix == ".lock" or any(path.match(pattern) for pattern in patterns), path.name


def test_every_figure_is_on_a_page():
    pages = " ".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    figures = list((ROOT / "experiments/plots").iterdir())
    assert figures and all(path.name in pages for path in figures)


def test_every_command_is_listed_with_a_sentence():
    listed = dict(commands())
    with_main = {path for path in HERE.rglob("*.py") if "\n    app.run(main)" in path.read_text()}
    assert len(with_main) > 10
    assert {HERE.parent / f"{module.replace('.', '/')}.py" for module in listed} == with_main
    assert all(sentence.endswith((".", ":")) for sentence in listed.values())
