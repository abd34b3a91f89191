"""How much of a GPU's memory training asks JAX for."""

import os

import pytest

from sparse_lm.training.gpu_memory import request_memory

NAMES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of jaxlib, which refuses both together


@pytest.mark.parametrize("given", [{}, {NAMES[0]: "0.5"}, {NAMES[1]: "0.5"}], ids=["nothing", "now", "formerly"])
def test_a_user_who_has_said_how_much_is_not_overruled(given, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below goes with this test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    request_memory()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == (given or {NAMES[0]: "0.9"})
