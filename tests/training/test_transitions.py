"""The edges of the sparse phase keep what they promise to keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparse_lm.ops.plan import DENSE
from sparse_lm.training.step import forward_loss
from sparse_lm.training.transitions import dense_params, fix_scales
from tests import small


@functools.cache
def compiled_loss(config, plan):
    trainer, _ = small.compiled(config)
    return jax.jit(
        lambda state, windows: forward_loss(
            state.params, state.variables, windows, jax.random.key(0),
            config=config, graphdef=trainer.graphdef, plan=plan,
        )[0]
    )  # fmt: skip


class Run:
    """A small run with a few dense steps behind it."""

    def __init__(self, recipe, **changes):
        self.config = small.config(recipe, **changes)
        self.trainer, self.transitions = small.compiled(self.config)
        self.state = small.after_dense_steps(self.config, 3)
        self.windows = small.windows(self.config, 100)

    def loss(self, plan):
        return float(compiled_loss(self.config, plan)(self.state, self.windows))

    def enter(self):
        self.state = self.transitions.enter_sparse(self.state, self.windows)

    def train_sparse(self, steps=2):
        for step in range(steps):
            self.state, _ = self.trainer.sparse_step(self.state, small.windows(self.config, 50 + step))

    def leave(self):
        self.state = self.transitions.leave_sparse(self.state)

    @property
    def ffn(self):
        return jax.device_get(self.state.params["layers"]["ffn"])

    def moments(self):
        (adam,) = [
            node
            for node in jax.tree.leaves(
                self.state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)
            )
            if isinstance(node, optax.ScaleByAdamState)
        ]
        return jax.device_get((adam.mu, adam.nu))


def without_activation_sparsity(plan):
    return dataclasses.replace(plan, down=None, grad_input=None, shuffle_tokens=False)


@pytest.mark.parametrize(
    "recipe, dense_layers",
    [("fst", 0), ("sste", 0), ("venom", 0), ("slices", 1)],
)
def test_leaving_keeps_the_function_that_sparse_weights_computed(recipe, dense_layers):
    """The dense loss just after the flip is the loss with sparse weights just before, to rounding."""
    run = Run(recipe, **{"sparsity.dense_layers": dense_layers})
    run.enter()
    run.train_sparse()
    plan = run.trainer.plan
    sparse = run.loss(without_activation_sparsity(plan) if plan.venom else plan)
    unbaked = run.loss(DENSE)
    before = run.ffn
    run.leave()
    assert run.loss(DENSE) == pytest.approx(sparse, abs=2e-5)
    assert abs(unbaked - sparse) > 1e-3  # the flip without the bake would have moved the loss
    for name, matrices in run.ffn.items():
        changed = (matrices != before[name]).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, np.arange(len(matrices)) >= dense_layers)


@pytest.mark.parametrize("recipe", ["act24"])
def test_leaving_dense_weights_leaves_them_alone(recipe):
    run = Run(recipe)
    run.enter()
    run.train_sparse()
    before = run.ffn
    run.leave()
    jax.tree.map(np.testing.assert_array_equal, before, run.ffn)


@pytest.mark.parametrize("recipe", ["fst", "sste", "venom"])
def test_baked_weights_are_two_of_four(recipe):
    run = Run(recipe)
    run.enter()
    run.leave()
    along = {"up": 2, "down": 1 if recipe == "sste" else 2}
    for name, axis in along.items():
        axes = (1, 2) if recipe == "fst" else (axis,)
        for a in axes:
            groups = np.moveaxis(run.ffn[name], a, -1).reshape(-1, 4)
            assert ((groups != 0).sum(1) <= 2).all()


@pytest.mark.parametrize("recipe", ["fst", "sste", "venom"])
def test_leaving_again_changes_nothing(recipe):
    """A run that ended in its sparse phase leaves it again if it is made longer; readers do likewise."""
    run = Run(recipe)
    run.enter()
    run.train_sparse()
    run.leave()
    once = jax.device_get(run.state)
    run.leave()
    jax.tree.map(np.testing.assert_array_equal, once, jax.device_get(run.state))


def test_leaving_twice_changes_nothing_more():
    """Weights that are 2:4 already have beta 1 and stay as they are."""
    run = Run("venom")
    run.enter()
    run.leave()
    once = run.ffn
    run.enter()
    np.testing.assert_allclose(run.state.variables.scale_up, 1, rtol=1e-6)
    run.leave()
    for name in once:
        np.testing.assert_allclose(run.ffn[name], once[name], rtol=1e-6)


def test_scale_is_the_least_squares_fit():
    run = Run("venom")
    w = run.ffn["up"].astype(np.float64)
    groups = w.reshape(*w.shape[:-1], -1, 4)
    t = np.sort(np.abs(groups), axis=-1)[..., 1:2]
    s = (np.sign(groups) * np.maximum(np.abs(groups) - t, 0)).reshape(w.shape)
    expected = (w * s).sum((1, 2)) / (s * s).sum((1, 2))
    scales = fix_scales(run.state.variables, run.state.params["layers"]["ffn"], run.trainer.plan)
    np.testing.assert_allclose(scales.scale_up, expected, rtol=1e-5)


def test_scale_stays_what_it_was_at_the_start_of_the_phase():
    run = Run("venom")
    run.enter()
    before = np.asarray(run.state.variables.scale_up)
    run.train_sparse()
    np.testing.assert_array_equal(before, run.state.variables.scale_up)


@pytest.mark.parametrize(
    "recipe, centres", [("slices", "neurons"), ("slices", "tokens"), ("run_sets", "neurons"), ("run_sets", "tokens")]
)
def test_neurons_are_sorted_with_their_weights_and_moments(recipe, centres):
    """Neurons change places as wholes; the dense function stays what it was."""
    run = Run(recipe, **{"sparsity.centres": centres})
    before, loss = jax.device_get((run.ffn, *run.moments())), run.loss(DENSE)
    run.enter()
    assert run.loss(DENSE) == pytest.approx(loss, abs=1e-6)
    after = (run.ffn, *run.moments())
    mu_before, mu_after = before[1]["layers"]["ffn"], after[1]["layers"]["ffn"]
    nu_before, nu_after = before[2]["layers"]["ffn"], after[2]["layers"]["ffn"]
    moved = 0
    for layer in range(run.config.model.layers):
        place = {row.tobytes(): i for i, row in enumerate(before[0]["up"][layer])}
        order = [place[row.tobytes()] for row in after[0]["up"][layer]]
        assert sorted(order) == list(range(run.config.model.ffn_dim))
        moved += order != sorted(order)
        for old, new in ((before[0], after[0]), (mu_before, mu_after), (nu_before, nu_after)):
            for name in ("up", "down"):
                np.testing.assert_array_equal(old[name][layer][order], new[name][layer])
    assert moved


def test_other_selections_leave_the_order_of_neurons_alone():
    for recipe in ("venom", "cluster_sets"):
        run = Run(recipe)
        before = run.ffn
        run.enter()
        jax.tree.map(np.testing.assert_array_equal, before, run.ffn)


def test_sets_hold_four_of_every_m_and_follow_the_activations():
    run = Run("cluster_sets")
    run.enter()
    m, columns = run.config.sparsity.m, np.asarray(run.state.variables.columns)
    assert columns.shape == (2, 4, 128 * 4 // m)
    np.testing.assert_array_equal(columns // m, np.broadcast_to(np.repeat(np.arange(128 // m), 4), columns.shape))
    assert (np.diff(columns, axis=-1) > 0).all()
    centres = np.asarray(run.state.variables.centroids)
    run.state, metrics = run.transitions.refresh(run.state, run.windows)
    np.testing.assert_array_equal(run.state.variables.centroids, centres)  # among neurons they stay
    chosen = float(metrics["kept_set_energy"].mean())
    assert 4 / m + 0.05 < chosen <= 1  # more than as many neurons taken blindly would hold


def test_refresh_of_transposable_masks_reports_flips():
    run = Run("fst")
    run.enter()
    before = jax.device_get(run.state.variables)
    run.state, metrics = run.transitions.refresh(run.state, run.windows)
    np.testing.assert_array_equal(metrics["flip_rate"], 0)  # the weights have not moved
    run.train_sparse(4)
    run.state, metrics = run.transitions.refresh(run.state, run.windows)
    after = jax.device_get(run.state.variables)
    expected = np.mean([a != b for a, b in ((before.mask_up, after.mask_up), (before.mask_down, after.mask_down))])
    assert float(metrics["flip_rate"].mean()) == pytest.approx(expected)
    assert expected > 0
    for mask in (after.mask_up, after.mask_down):
        tiles = mask.reshape(2, 32, 4, 8, 4)
        assert (tiles.sum(2) == 2).all()
        assert (tiles.sum(4) == 2).all()


@pytest.mark.parametrize("option", ["keep", "reset", "reset_first"])
@pytest.mark.parametrize("edge", ["enter", "leave"])
def test_moments_at_the_edges(option, edge):
    run = Run("venom", **{"sparsity.moments": option, "sparsity.dense_layers": 1})
    before = run.moments()
    getattr(run, edge)()
    for moment, old, new in zip(("mu", "nu"), before, run.moments(), strict=True):
        cleared = option == "reset" or (option == "reset_first" and moment == "mu")
        for name in ("up", "down"):
            expected = np.array(old["layers"]["ffn"][name])
            if cleared:
                expected[1:] = 0  # the first layer stays dense
            np.testing.assert_array_equal(new["layers"]["ffn"][name], expected)
        np.testing.assert_array_equal(new["norm"], old["norm"])  # nothing outside the FFN is touched


def test_masked_decay_shrinks_what_the_mask_prunes():
    run = Run("fst")
    run.enter()
    run.state = dataclasses.replace(run.state, mask_decay=jnp.float32(10.0))
    before, mask = run.ffn["up"], np.asarray(run.state.variables.mask_up)
    run.train_sparse(1)
    shrunk = np.abs(run.ffn["up"]) < np.abs(before)
    assert shrunk[~mask].mean() > 0.95
    assert shrunk[mask].mean() < 0.8
    run.leave()
    assert float(run.state.mask_decay) == 0


def test_dense_params_are_what_the_run_would_leave_with():
    run = Run("venom")
    run.enter()
    run.train_sparse()
    baked = jax.jit(dense_params, static_argnums=(2, 3))(run.state.params, run.state.variables, run.trainer.plan, 0)
    params = jax.device_get(baked)
    run.leave()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, jax.device_get(run.state.params))
