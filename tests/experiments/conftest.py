"""Tests of experiments know the recipes that are there to be compared with."""

import pytest

from experiments.quality import controls
from sparse_lm.recipes import RECIPES


@pytest.fixture(autouse=True)
def controls_are_registered(monkeypatch):
    for control in controls.CONTROLS:
        monkeypatch.setitem(RECIPES, control.name, control)
