import errno
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparse_lm.errors import WorkdirError
from sparse_lm.training.checkpoints.checkpoint import Checkpoints, restore_params
from sparse_lm.training.checkpoints.saved_checkpoint import DamagedCheckpoint


def make_state(seed: int = 0, dim: int = 4, recipe_state: Any = None) -> dict[str, Any]:
    """A training state in small."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    params = {"embed": {"embedding": draw(5, dim)}, "layers": {"ffn": {"up": draw(2, 8, dim)}}}
    if recipe_state is None:
        numbers = jnp.asarray(rng.integers(0, 99, (2, 3)), jnp.int32)
        recipe_state = {"scale": draw(2), "mask": draw(2, 8, dim) > 0, "numbers": numbers}
    optimizer = optax.chain(optax.clip(1.0), optax.scale_by_adam(mu_dtype=jnp.bfloat16))
    return {
        "step": jnp.int32(seed),
        "params": params,
        "opt_state": (optimizer.init(params), None, draw(3).astype(jnp.bfloat16), jnp.asarray([7, 250], jnp.uint8)),
        "recipe_state": recipe_state,
    }


def save(workdir: Path, step: int, state: dict[str, Any], eval_loss: float | None = None) -> None:
    with Checkpoints(workdir, keep=2) as checkpoints:
        checkpoints.save(step, state, eval_loss)


def steps_on_disk(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_restores_every_leaf_bit_for_bit(tmp_path):
    """Floats of both widths, integers, bools and scalars; None and empty nodes; NaN and signed zeros."""
    state = make_state()
    state["params"]["norm"] = jnp.asarray([-0.0, math.nan, math.inf, 1e-45], jnp.float32)
    save(tmp_path, 7, state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore_latest(jax.eval_shape(lambda: state)), state)
        assert_same_bits(checkpoints.restore_latest(state), state)
    params, recipe_state, step = restore_params(tmp_path)  # without a template
    assert step == 7
    assert_same_bits((params, recipe_state), (state["params"], state["recipe_state"]))


def test_a_run_that_goes_on_finds_the_programs_that_it_compiled(tmp_path):
    """One that has its state committed to the device is another program."""
    state, program = make_state(), jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    save(tmp_path, 7, state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        restored = checkpoints.restore_latest(jax.eval_shape(lambda: state))
    assert program.lower(restored).as_text() == program.lower(state).as_text()


def test_buffers_may_be_donated_while_they_are_saved(tmp_path):
    x = jnp.arange(4_000_000, dtype=jnp.float32)
    expected = np.arange(4_000_000, dtype=np.float32)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, make_state() | {"params": {"x": x}})
        for _ in range(10):
            x = jax.jit(lambda x: -x - 1, donate_argnums=0)(x)
        x.block_until_ready()
    params, _, _ = restore_params(tmp_path)
    assert np.array_equal(params["x"], expected)


def test_keeps_the_newest_and_the_best(tmp_path):
    """Also of checkpoints that an earlier process saved. Of those without a loss none is the best."""
    losses = {1: None, 2: math.nan, 3: None, 4: 3.0, 5: 1.0, 6: math.nan, 7: None, 8: 2.0, 9: None}
    for steps, kept in (((1, 2, 3), [2, 3]), ((4, 5, 6), [5, 6]), ((7, 8, 9), [5, 8, 9])):
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            for step in steps:
                checkpoints.save(step, make_state(step), losses[step])
        assert steps_on_disk(tmp_path) == kept
    for wanted, found in (("best", 5), ("latest", 9), (8, 8)):
        params, _, step = restore_params(tmp_path, wanted)
        assert step == found
        assert_same_bits(params, make_state(found)["params"])


def test_multiples_of_every_stay_whatever_processes_save_between_them(tmp_path):
    for steps, kept in (((2, 4, 5), [4, 5]), ((6, 8), [4, 8]), ((9,), [4, 8, 9])):
        with Checkpoints(tmp_path, keep=1, every=4) as checkpoints:
            for step in steps:
                checkpoints.save(step, make_state(step))
        assert steps_on_disk(tmp_path) == kept


def test_what_a_machine_cannot_read_now_is_not_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1, make_state(1))
    save(tmp_path, 2, make_state(2))
    read = Path.read_text

    def stale(self, *args, **kwargs):
        if self.name == "manifest.json" and "2" in self.parts:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, *args, **kwargs)

    with monkeypatch.context() as patch, Checkpoints(tmp_path, keep=2) as checkpoints:
        patch.setattr(Path, "read_text", stale)
        with pytest.raises(WorkdirError, match=r"checkpoint 2 cannot be read now: .*Stale") as refused:
            checkpoints.restore_latest(make_state())
        assert not isinstance(refused.value, DamagedCheckpoint)
    assert steps_on_disk(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "changed, message",
    [
        (make_state(dim=6), r"embedding is float32\[5, 4\] in the checkpoint and float32\[5, 6\] here \(\d+ more"),
        (make_state(recipe_state={}), r"mask is bool\[2, 8, 4\] in the checkpoint and absent here \(2 more"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, changed, message):
    save(tmp_path, 5, make_state())
    message = f"^--workdir={tmp_path}: checkpoint 5 does not fit this run: .*{message}"
    with Checkpoints(tmp_path, keep=2) as checkpoints, pytest.raises(WorkdirError, match=message):
        checkpoints.restore_latest(changed)


@pytest.mark.parametrize(
    "step, message", [(4, "no checkpoint of step 4, only of 5"), ("best", "no checkpoint was evaluated")]
)
def test_missing_checkpoint_is_refused(tmp_path, step, message):
    with pytest.raises(WorkdirError, match=r"holds no checkpoint$"):
        restore_params(tmp_path, step)
    save(tmp_path, 5, make_state(), math.nan)  # which is none
    with pytest.raises(WorkdirError, match=message):
        restore_params(tmp_path, step)
