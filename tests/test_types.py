"""The type checker passes on what other code bases import: ops, recipes and the NNX module."""

import subprocess
import sys

import pytest

from tests.documents import ROOT


def check(*arguments):
    return subprocess.run([sys.executable, "-m", "mypy", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_ops_and_recipes_pass(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy")
    wrong = tmp_path / "caller.py"
    wrong.write_text("from sparse_lm.recipes import Slices\n\nSlices(m='16').ffn(1)\n")
    clean = check(f"--cache-dir={tmp_path}")
    assert clean.returncode == 0, clean.stdout
    assert "Success: no issues found" in clean.stdout
    misused = check(f"--cache-dir={tmp_path}", str(wrong))
    assert 'Argument "m" to "Slices" has incompatible type "str"' in misused.stdout  # annotations reach a caller
    assert 'Missing positional arguments "w1", "w2" in call to "ffn"' in misused.stdout
