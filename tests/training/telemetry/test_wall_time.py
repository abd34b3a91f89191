import jax
import jax.numpy as jnp
import pytest

from sparse_lm.training.telemetry.wall_time import WallTime
from tests.clock import Clock


def compile_for(seconds: float) -> None:
    """What JAX tells its listeners when it has compiled."""
    jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", seconds)


def test_compiling_is_told_apart():
    clock = Clock()
    with WallTime(clock) as wall:
        compile_for(1.0)
        compile_for(3.0)
        clock.now += 10.0
        wall.spent_on("sparse")
        compile_for(9.0)  # in threads side by side
        clock.now += 5.0
        wall.spent_on("evaluation")
    assert +wall.seconds == {"sparse": 6.0, "compile": 9.0}


def test_closed_it_listens_no_more():
    with WallTime(Clock()) as wall:
        pass
    compile_for(1.0)
    wall.spent_on("dense")
    assert wall.seconds["compile"] == 0


def test_jax_tells_of_what_it_compiles():
    @jax.jit
    def fresh(x):
        return jnp.sin(x) * 7.125

    with WallTime() as wall:
        fresh(jnp.ones((3, 5))).block_until_ready()
        wall.spent_on("dense")
        first = wall.seconds["compile"]
        assert 0 < first < wall.seconds.total()
        fresh(jnp.ones((3, 5))).block_until_ready()
        wall.spent_on("dense")
    assert wall.seconds["compile"] == pytest.approx(first)
