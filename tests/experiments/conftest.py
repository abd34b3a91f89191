"""Scripts of experiments are imported one after the other in one process, although they define the same flags."""

import importlib
import sys

import pytest
from absl import flags

FLAGS = flags.FLAGS


@pytest.fixture
def script(monkeypatch):
    """Imports a script and gives back its module. Flags of scripts imported before are gone then, and its own after."""
    for name in list(FLAGS):
        if (FLAGS.find_module_defining_flag(name) or "").startswith("experiments"):
            delattr(FLAGS, name)
    before = set(FLAGS)

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield load
    for name in set(FLAGS) - before:
        delattr(FLAGS, name)
