"""The list of commands, and that what a command imports is there: most run on GPUs alone, where no test sees them."""

import importlib

import pytest

from experiments.__main__ import HERE, commands

MODULES = sorted(HERE.rglob("*.py"))


def test_every_command_is_listed_with_a_sentence():
    listed = dict(commands())
    with_main = {path for path in MODULES if "\n    app.run(main)" in path.read_text()}
    assert len(with_main) > 10
    assert {HERE.parent / f"{module.replace('.', '/')}.py" for module in listed} == with_main
    assert all(sentence.endswith((".", ":")) or len(sentence) > 20 for sentence in listed.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of other packages
@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HERE)))
def test_every_module_is_imported(path):
    """Fails if a module imports a name that does not exist."""
    importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))
