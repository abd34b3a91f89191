"""The list of commands, and that what a command imports is there: most run on GPUs alone, where no test sees them."""

import ast
import importlib
import subprocess
import sys

import pytest

from experiments.__main__ import HERE, commands

MODULES = sorted(HERE.rglob("*.py"))


def test_every_command_is_listed_with_a_sentence():
    listed = dict(commands())
    with_main = {path for path in MODULES if "\n    app.run(main)" in path.read_text()}
    assert len(with_main) > 10
    assert {HERE.parent / f"{module.replace('.', '/')}.py" for module in listed} == with_main
    assert all(sentence.endswith((".", ":")) or len(sentence) > 20 for sentence in listed.values())


def test_the_list_is_printed():
    printed = subprocess.run(
        [sys.executable, "-m", "experiments"], cwd=HERE.parent, capture_output=True, text=True, check=True
    ).stdout
    assert "python -m experiments.bench.step\n    " in printed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HERE)))
def test_imported_names_exist(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if node.module and node.module.split(".")[0] in ("sparse_lm", "experiments")]
    for node in ours:
        if node.module.startswith("sparse_lm.ops.triton"):
            pytest.importorskip("triton", reason="needs Triton")
        for alias in node.names:
            assert _exists(node.module, alias.name), f"from {node.module} import {alias.name}"


def _exists(module: str, name: str) -> bool:
    if module.startswith("sparse_lm"):
        return hasattr(importlib.import_module(module), name) or _is_module(f"{module}.{name}")
    # Importing a script defines its flags, which others define, too: its text says what it has.
    path = HERE.parent / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return (HERE.parent / module.replace(".", "/") / f"{name}.py").exists()
    defined = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return name in defined


def _is_module(name: str) -> bool:
    path = HERE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
