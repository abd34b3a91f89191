"""Traces of chosen steps."""

import jax
import jax.numpy as jnp

from sparse_lm.training.telemetry.profile import StepProfile


def run(profile, steps):
    """Steps that were traced, as the training loop goes about it."""
    step = jax.jit(lambda x: x @ x)
    traced = []
    for number in steps:
        if profile.turns(number):
            profile.turn()
        jax.block_until_ready(step(jnp.ones((8, 8))))
        if profile.tracing:
            traced.append(number)
    profile.close()
    return traced


def traces(workdir):
    return list((workdir / "profile").rglob("*.xplane.pb"))


def test_traces_the_steps_asked_for(tmp_path):
    assert run(StepProfile(tmp_path, 2, 4), range(6)) == [2, 3]
    assert len(traces(tmp_path)) == 1


def test_traces_what_a_resumed_run_has_left_of_them(tmp_path):
    assert run(StepProfile(tmp_path, 2, 9), range(5, 7)) == [5, 6]
    assert len(traces(tmp_path)) == 1


def test_traces_nothing_by_default(tmp_path):
    assert run(StepProfile(tmp_path), range(3)) == []
    assert not traces(tmp_path)
