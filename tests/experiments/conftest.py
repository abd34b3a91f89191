"""Scripts of experiments are imported one after the other in one process, although they define the same flags."""

import importlib
import sys

import pytest
from absl import flags


@pytest.fixture
def script(monkeypatch):
    """Imports a script and gives back its module; its flags are gone when the test ends."""
    before = set(flags.FLAGS)

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield load
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
