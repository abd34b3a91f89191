"""A run that crashed in any phase and was resumed is the run that was never stopped."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from sparse_lm.training import evaluation, loop
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.step import make_trainer
from sparse_lm.training.transitions import make_transitions
from tests.test_train import Crash, corpus, crash_before, lines, small_config, trace  # noqa: F401 (a fixture)


@contextlib.contextmanager
def compiled_once():
    """Runs of one configuration share what they compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_trainer", functools.cache(make_trainer))
        patch.setattr(loop, "make_transitions", functools.cache(make_transitions))
        made, make = {}, evaluation.make_evaluation
        cached = lambda *args: made.get(args[3]) or made.setdefault(args[3], make(*args))  # noqa: E731
        patch.setattr(evaluation, "make_evaluation", cached)
        yield


def compiled_ahead(program):
    """`program`, but an error if it is called before it was compiled, as then no signal could interrupt that."""
    compiled = []

    def call(*args):
        assert compiled
        return program(*args)

    def lower(*args):
        compiled.append(program)
        return program.lower(*args)

    call.lower = lower
    return call


def edges_compiled_ahead(patch):
    make = loop.make_transitions

    def wrapped(*args):
        edges = make(*args)
        enter, refresh = compiled_ahead(edges.enter_sparse), compiled_ahead(edges.refresh)
        return dataclasses.replace(edges, enter_sparse=enter, refresh=refresh)

    patch.setattr(loop, "make_transitions", wrapped)


@pytest.mark.parametrize(
    "recipe", ["slices", "fst", "experts24"]
)  # a mixture, and those that choose anew while they are sparse
@compiled_once()
def test_resumed_run_is_the_whole_run(recipe, corpus, tmp_path, monkeypatch):  # noqa: F811
    """A crash in every phase and just behind both flips; checkpoints are 3 steps apart."""
    config = small_config(corpus, recipe)
    edges_compiled_ahead(monkeypatch)
    assert loop.train(config, str(tmp_path / "whole"))
    for step in (2, 5, 7, 10):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crash_before(patch, step)
            loop.train(config, str(tmp_path / "stopped"))
    assert loop.train(config, str(tmp_path / "stopped"))
    assert trace(tmp_path / "stopped") == trace(tmp_path / "whole")
    if recipe == "fst":  # whose flip rate is a refresh's
        assert [line["step"] for line in lines(tmp_path / "whole") if "flip_rate" in line] == [6]

    abstract = jax.eval_shape(make_trainer(config).init)
    states = []
    for name in ("whole", "stopped"):
        with Checkpoints(tmp_path / name, keep=2) as checkpoints:
            states.append(jax.device_get(checkpoints.restore_latest(abstract)))
    jax.tree.map(np.testing.assert_array_equal, *states)
