"""One training step: it learns, it donates, it is causal, and it compiles once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.model import llama
from sparse_lm.training.step import _sum_of_parts, forward_loss, in_compute_dtype, loss_and_gradients
from tests import small


@pytest.mark.long
def test_both_steps_share_donated_state_and_compile_once():
    config = small.config("sste")
    trainer, transitions = small.compiled(config)  # perhaps by other tests, too
    state = trainer.init()
    losses, programs = [], {}
    for step in range(config.steps):
        if config.phase(step) == "sparse" and config.phase(step - 1) == "dense":
            state, _ = transitions["enter"](state, small.windows(config))
        before = state
        phase = config.phase(step)
        state, metrics = trainer.steps[phase](state, small.windows(config, step))
        assert trainer.steps[phase]._cache_size() == programs.setdefault(phase, trainer.steps[phase]._cache_size())
        losses.append(float(metrics["loss"]))
        assert jax.tree.structure(before) == jax.tree.structure(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.opt_state))
    assert losses[-1] < losses[0] - 0.3
    assert int(state.step) == config.steps


@pytest.mark.long
def test_weight_gradients_are_drawn_with_each_runs_and_steps_own_key():
    config = small.config("slices")
    trainer, _ = small.compiled(config)

    def gradient_norm(step=0, seed=0):
        state = small.entered(config)
        state = dataclasses.replace(state, step=state.step + step, seed=state.seed + np.uint32(seed))
        return float(trainer.steps["sparse"](state, small.windows(config))[1]["grad_norm"])

    assert gradient_norm() == gradient_norm() not in (gradient_norm(step=1), gradient_norm(seed=1))


def test_the_seed_decides_the_weights():
    same, another = (small.compiled(small.config(seed=seed))[0] for seed in (0, 1))
    first, again, other = (trainer.init().params["unembed"] for trainer in (same, same, another))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def of_sparse_phase(function, config):
    """`function` of params, recipe_state, windows and key, computed as the sparse phase does."""
    trainer, _ = small.compiled(config)
    return functools.partial(function, config=config, graphdef=trainer.graphdef, recipe=config.sparsity.recipe)


@pytest.mark.long
def test_a_microbatch_is_of_neighbouring_windows_and_has_its_own_key():
    """Losses, statistics and gradients are means over parts. The z-loss has gradients, and is no part of the loss."""
    state = small.entered(small.config("experts24"))
    config, key = small.config("experts24", microbatches=2), jax.random.key(5)
    windows = small.windows(config)

    @functools.partial(jax.grad, has_aux=True)
    def of_part(params, *inputs):
        loss, stats = of_sparse_phase(forward_loss, config)(params, *inputs)
        return loss + 1e-3 * jnp.mean(stats["router_z_loss"]), (loss, stats)

    parts = [
        jax.jit(of_part)(state.params, state.recipe_state, part, jax.random.fold_in(key, number))
        for number, part in enumerate(np.split(windows, 2))
    ]
    of_step = jax.jit(of_sparse_phase(loss_and_gradients, config))
    outputs, gradients = of_step(state.params, state.recipe_state, windows, key)
    mean = jax.tree.map(lambda *of_parts: np.mean(of_parts, axis=0), *parts)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), (gradients, outputs), mean)
    assert float(outputs[0]) == pytest.approx(float(mean[1][0]), rel=1e-6)


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_step_in_bfloat16_reads_routers_tables_and_scales_in_float32(unrolled):
    config = small.config("dense", **small.MIXTURE)
    params = small.compiled(config)[0].init().params
    model = dataclasses.replace(config.model, dtype="bfloat16", unroll_layers=unrolled)
    cast = in_compute_dtype(params, dataclasses.replace(config, model=model))
    low = {path[-1].key for path, leaf in jax.tree.leaves_with_path(cast) if leaf.dtype == jnp.bfloat16}
    assert low == {*"qkvo", "up", "down", "shared_up", "shared_down"}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), cast, params)


def test_gradients_of_microbatches_are_added_in_float32():
    """Gradients of matrices come in bfloat16, in which 256 + 1 is 256."""
    total = _sum_of_parts(lambda number, _: jnp.where(number, 1, 256).astype("bfloat16"), jnp.arange(8), jnp.zeros(8))
    assert total == 263


@pytest.mark.parametrize("name", ["act24", "slices", "experts24"])
def test_no_position_sees_a_later_one(name):
    """Recipes that choose neurons or permute tokens are causal in training; others compute what evaluation does.

    Of `venom`, whose blocks decide together in training, tests/recipes/test_ffn.py has the formulas.
    """
    config, first = small.config(name), 20  # the first position of 32 that changes
    graphdef, state, before = small.compiled(config)[0].graphdef, small.entered(config), small.windows(config)[:, :-1]
    after = np.where(np.arange(config.seq_len) < first, before, (before + 1) % config.model.vocab_size)

    @jax.jit
    def forward(tokens):
        options = dict(recipe=config.sparsity.recipe, recipe_state=state.recipe_state, key=jax.random.key(3))
        return llama.merge(graphdef, state.params)(tokens, **options)[0]

    before, after = np.asarray(forward(before)), np.asarray(forward(after))
    # Rows move to other places in the batch, where XLA may sum in another order.
    np.testing.assert_allclose(before[:, :first], after[:, :first], rtol=1e-4, atol=1e-5)
    assert np.abs(before[:, first:] - after[:, first:]).max() > 0.1
