"""The type checker passes on what other code bases import: ops, recipes and the NNX module."""

import sys
import tomllib

import pytest

from tests.command_lines import ROOT, run


@pytest.mark.long
def test_ops_and_recipes_pass(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy")
    wrong = tmp_path / "caller.py"
    wrong.write_text("from sparse_lm.recipes import Slices\n\nSlices(m='16').ffn(1)\n")
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    found = run([sys.executable, "-m", "mypy", *checked, str(wrong)]).stdout
    *errors, summary = found.splitlines()
    assert " errors in 1 file (checked " in summary, found
    assert all("caller.py" in error for error in errors), found  # annotations reach a caller
    assert 'Argument "m" to "Slices" has incompatible type "str"' in found
    assert 'Missing positional arguments "w1", "w2" in call to "ffn"' in found
