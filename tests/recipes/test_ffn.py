"""Every recipe's output, gradients and statistics against masked dense float64 formulas on random inputs.

The formulas take a recipe's own draws: that these are unbiased, tests/ops/test_mvue.py says.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparse_lm import collectives
from sparse_lm.collectives import Axes
from sparse_lm.model.remat import remat
from sparse_lm.ops import backends
from sparse_lm.ops.activations import rows_per_neuron
from sparse_lm.recipes import DENSE, RECIPES, Act24, Dense, DenseSlices, Experts24, Fst, Recipe, Slices, SSte, Venom
from sparse_lm.recipes.differentiable import gather_layer
from sparse_lm.recipes.groups import group_by_expert
from tests.model import jaxprs
from tests.ops.operands import relative_error
from tests.recipes import examples
from tests.recipes.examples import DIM, DO, GATED, KEY, OF_FFNS, ORDER, TOKENS, W1, W2, X, draw

CHOSEN = jnp.zeros((TOKENS, 1), jnp.int32)

unchecked = Recipe.ffn.__wrapped__  # without the types that the tests of this folder check


def assert_close(found, expected, tolerance=1e-5):
    for name, a in zip(("o", "dx", "dw1", "dw2"), found, strict=False):
        assert relative_error(a, getattr(expected, name)) < tolerance, name


CASES = {
    **examples.RECIPES,
    "dense, in FP8": Dense(precision="fp8"),
    "act24, no dense features": Act24(dense_features=0.0),
    "act24, in FP8": Act24(precision="fp8"),
    "venom, a ragged last block": Venom(v=64, m=32, experts=5),
    "slices, more padding than tokens": Slices(v=64, m=32),
    # Every recipe that computes gates; of dense, tests/model/test_llama.py has the others.
    **{case: GATED[case] for case in ("dense, gated_relu2", "fst, swiglu", "sste, geglu")},
    "dense slices, gated, for two devices": DenseSlices(v=16, m=16, shards=2, activation="swiglu"),
    "slices, gated, for two devices": Slices(v=16, m=16, shards=2, activation="gated_relu2"),
}


@pytest.mark.parametrize("case", CASES)
def test_formulas(case):
    recipe, w1 = CASES[case], examples.w1_of(CASES[case])
    *found, stats = examples.outputs_and_gradients(recipe)(X, w1, W2, DO, examples.state_of(recipe), KEY, ORDER)
    expected = examples.expected(recipe, draw)
    # Of FP8, sums in another order may move a few numbers to the next of e4m3.
    assert_close(found, expected, 2e-3 if recipe.precision == "fp8" else 1e-5)
    assert stats.keys() == expected.stats.keys()
    for name, value in expected.stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", OF_FFNS)
def test_evaluation_takes_tokens_as_they_come_each_for_itself(name):
    """Nothing is random, and a token's output is that of the token alone."""
    recipe = examples.RECIPES[name].for_evaluation()
    o = examples.output(recipe)(X, W1, W2, examples.state_of(recipe))
    assert_close([o], examples.expected(recipe, lambda a, _: a, order=np.arange(TOKENS)))
    reversed_o = examples.output(recipe)(X[::-1], W1, W2, examples.state_of(recipe))
    np.testing.assert_allclose(reversed_o[::-1], o, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", [Slices(v=256), DenseSlices(v=256)], ids=lambda recipe: recipe.name)
def test_few_tokens_take_small_blocks(recipe):
    """Generation computes one at a time, in one slot: a block of 256 for each expert would be work for nothing."""
    state = examples.state_of(recipe)
    nine, of_fours = (examples.output(r)(X[:9], W1, W2, state) for r in (recipe, dataclasses.replace(recipe, v=4)))
    np.testing.assert_allclose(nine, of_fours, rtol=1e-5, atol=1e-6)
    jaxpr = jax.make_jaxpr(examples.output(recipe))(X[:1], W1, W2, state).jaxpr
    products = [e.outvars[0].aval.size for e in jaxprs.equations(jaxpr) if e.primitive.name == "dot_general"]
    assert max(products) == max(DIM, W1.shape[0] // recipe.experts)


@pytest.mark.parametrize("name", ["dense", "fst", "sste", "slices"])
def test_prepared_weights_of_several_layers_give_what_a_layers_own_give(name):
    recipe, state = examples.RECIPES[name], examples.state_of(examples.RECIPES[name])
    run = functools.partial(examples.outputs_and_gradients(recipe), X, W1, W2, DO, state, KEY, ORDER)
    prepared = examples.among_layers(recipe, W1, W2, state)
    jax.tree.map(np.testing.assert_array_equal, run(), run(**prepared))
    with pytest.raises(ValueError, match="weights= are prepared in float32: must be in the dtype of x, bfloat16"):
        recipe.ffn(X.astype(jnp.bfloat16), W1, W2, state, **prepared)
    others = tuple(dataclasses.replace(forms, dim=8) for forms in prepared["weights"])
    with pytest.raises(ValueError, match=r"weights= are of \[\d+, 8\], and must be of \[\d+, \d+\]"):
        recipe.ffn(X, W1, W2, state, **prepared | dict(weights=others))
    for layer in (3, -1, jnp.int32(3)):
        with pytest.raises(ValueError, match=rf"layer = {layer} must be in 0\.\.2: weights= have these layers"):
            recipe.ffn(X, W1, W2, state, **prepared | dict(layer=layer))


def test_models_side_by_side_under_vmap():
    recipe, keys = examples.RECIPES["slices"], jax.random.split(KEY, 2)
    models = [jnp.stack([a, a[::-1] / 2]) for a in (X, W1, W2)], examples.state_of(recipe), keys

    def gradients(arrays, state, key):
        loss = lambda *a: jnp.sum(jnp.square(recipe.ffn(*a, state, key=key)[0]))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    together, alone = jax.jit(jax.vmap(gradients, (0, None, 0)))(*models), jax.jit(gradients)
    for number in range(2):
        own = alone([a[number] for a in models[0]], models[1], keys[number])
        for a, b in zip(own, together, strict=True):
            np.testing.assert_allclose(b[number], a, rtol=1e-4, atol=1e-4 * float(jnp.abs(a).max()))


def test_batches_of_one_model_under_vmap():
    """Gradients of each batch by itself, by weights that they share."""
    recipe = examples.RECIPES["dense_slices"]
    loss = lambda w1, x: jnp.sum(jnp.square(recipe.ffn(x, w1, W2, examples.state_of(recipe))[0]))  # noqa: E731
    gradient, batches = jax.grad(loss), jnp.stack([X, X[::-1] / 2])
    for x, dw1 in zip(batches, jax.jit(jax.vmap(gradient, (None, 0)))(W1, batches), strict=True):
        np.testing.assert_allclose(dw1, jax.jit(gradient)(W1, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OF_FFNS)
def test_gradients_around_a_shard_map_that_checks_what_varies(name):
    """JAX then knows that `ffn` has summed the gradients of weights over shards: they are those inside of it."""
    recipe, state = examples.RECIPES[name], examples.state_of(examples.RECIPES[name])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(axes, x, w1, w2):
        return jnp.sum(jnp.square(recipe.ffn(x, w1, w2, state, key=KEY, axes=axes)[0]))

    of_shard = functools.partial(loss, Axes(batch=("data",)))
    shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P()))
    of_all = shard_map(lambda *a: collectives.total(of_shard(*a), ("data",)), out_specs=P())
    inside = shard_map(jax.grad(of_shard, (0, 1, 2)), out_specs=(P("data"), P(), P()), check_vma=False)
    found, expected = (jax.jit(gradients)(X, W1, W2) for gradients in (jax.grad(of_all, (0, 1, 2)), inside))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-6
    if name in ("dense", "dense_slices"):  # others select, or draw, among a shard's own tokens
        alone = jax.jit(jax.grad(functools.partial(loss, collectives.ONE_DEVICE), (0, 1, 2)))(X, W1, W2)
        for a, b in zip(found, alone, strict=True):
            assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("name", ["fst", "act24", "venom", "slices"])
def test_in_bfloat16_only_rounding_is_lost(name):
    """Tokens go to the same experts; of neurons, two of nearly equal activation can change places."""
    recipe, state = examples.RECIPES[name], examples.state_of(examples.RECIPES[name])
    x, w1, w2, do = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (X, W1, W2, DO))
    if name in ("venom", "slices"):
        state = state._replace(centroids=jnp.eye(*state.centroids.shape))  # exact in bfloat16
    run = examples.outputs_and_gradients(recipe)
    high, low = (run(x.astype(t), w1, w2, do.astype(t), state, KEY, ORDER)[:4] for t in (jnp.float32, jnp.bfloat16))
    for a, b in zip(low[:2], high[:2], strict=True):
        assert a.dtype == jnp.bfloat16
        assert relative_error(a, b) < (0.1 if name in ("venom", "slices") else 0.02)
    for dw in low[2:]:  # summed in float32, and not rounded on the way
        assert dw.dtype == jnp.float32
        assert np.mean(dw != dw.astype(jnp.bfloat16).astype(jnp.float32)) > 0.5
    w = jax.ShapeDtypeStruct(W1.shape, jnp.bfloat16)
    for w1, w2 in ((w, w), (W1, w), (w, W2)):
        o, *gradients, _ = jax.eval_shape(run, X, w1, w2, X, state, KEY, ORDER)
        assert o.dtype == jnp.float32 and [g.dtype for g in gradients] == [jnp.float32, w1.dtype, w2.dtype]


@pytest.mark.parametrize(
    "name, policy, again", [("act24", "save_dots", 0), ("slices", "save_dots", 0), ("venom", "full", 1)]
)
def test_tokens_are_dispatched_once_where_products_are_saved(name, policy, again):
    recipe = examples.RECIPES[name]

    def loss(x):
        return jnp.vdot(recipe.ffn(x, W1, W2, examples.state_of(recipe), key=KEY, order=ORDER)[0], DO)

    jaxpr = jax.make_jaxpr(jax.grad(remat(loss, policy)))(X).jaxpr
    made = [e.outvars[0].aval.shape for e in jaxprs.equations(jaxpr) if e.primitive.name == "gather"]
    assert sum(shape[1:] == (DIM,) for shape in made) == 4 + again  # X, O, dO and dX; all else has other dimensions


def test_a_hidden_layer_of_zeros_has_no_nan():
    _, stats = jax.jit(DENSE.ffn)(jnp.zeros((8, 8)), jnp.ones((16, 8)), jnp.ones((16, 8)))
    assert stats["kept_energy"] == 0 and stats["activation_sparsity"] == 1


# What a recipe refuses, and says of itself.


@pytest.mark.parametrize("name", OF_FFNS)
def test_a_state_and_a_key_are_needed_where_they_are_used(name):
    recipe = examples.RECIPES[name]
    state, without_key = examples.state_of(recipe), examples.outputs_and_gradients(recipe)
    assert jax.eval_shape(recipe.ffn, X, W1, W2, state)[0].shape == X.shape  # undifferentiated
    for other in (None, DENSE.State()) if state else ():
        with pytest.raises(ValueError, match=rf"recipe '{name}' reads a state: make one with enter\(w1, w2, x\)"):
            jax.eval_shape(recipe.ffn, X, W1, W2, other)
    if recipe.stochastic:
        with pytest.raises(ValueError, match=f"of recipe '{name}' are stochastic: to be differentiated it needs key="):
            jax.eval_shape(without_key, X, W1, W2, DO, state, None, None)
    else:
        assert jax.eval_shape(without_key, X, W1, W2, DO, state, None, None)[2].shape == W1.shape


def test_keys_of_both_kinds_draw_the_same():
    recipe = examples.RECIPES["sste"]
    gradients = jax.jit(examples.outputs_and_gradients(recipe))
    keys = jax.random.key(5), jax.random.PRNGKey(5)
    typed, raw = (gradients(X, W1, W2, DO, examples.state_of(recipe), key, None) for key in keys)
    jax.tree.map(np.testing.assert_array_equal, typed, raw)


def every_call(**changed):
    """Calls that give every recipe of FFNs arrays that do not fit."""
    arrays, calls = {"x": X, "w1": W1, "w2": W2} | changed, []
    for recipe in examples.RECIPES.values():
        calls.append(functools.partial(recipe.enter, **arrays))
        state = examples.state_of(recipe)
        calls.append(functools.partial(unchecked, recipe, state=state, **arrays))
        if recipe.enter_reads_inputs:
            calls.append(functools.partial(recipe.refresh, state=state, **arrays))
        if recipe.leave_reads_inputs:
            calls.append(functools.partial(recipe.leave, state=state, **arrays))
    return calls


def entered(recipe, w1=W1, w2=W2):
    return [lambda: recipe.enter(w1, w2, X)]


def on_two_devices(recipe):
    """Calls a recipe along a mesh's axis of two devices, each with the weights of the tests."""
    call = functools.partial(unchecked, recipe, state=examples.state_of(recipe), axes=Axes(tensor="tensor"))
    return lambda: jax.vmap(call, in_axes=None, axis_size=2, axis_name="tensor")(X, W1, W2)


STATE24 = Experts24.State(jnp.float32(1.4), jnp.float32(1.3))


def mixture(state, x=X, w1=W1, w2=W2, gates=X[:, :1], experts=5, **options):
    """Differentiates experts of which each token chooses the first."""
    groups = group_by_expert(CHOSEN, experts, 16)
    o = lambda x: Experts24(v=16).mixture(x, w1, w2, gates, groups, state, **options)[0]  # noqa: E731
    return jax.grad(lambda x: o(x).sum())(x)


def gathered_of_two_devices(neurons):
    """Gathers a layer of weights of which each device has so many neurons."""
    w, scale = jnp.ones((1, neurons, 64)), jnp.ones(1)
    gather = functools.partial(gather_layer, layer=jnp.int32(0), axis="fsdp")
    on_two = jax.vmap(gather, in_axes=None, out_axes=None, axis_size=2, axis_name="fsdp")
    return on_two(SSte().prepare(w, w, SSte.State(scale, scale), jnp.float32))


def experts_on_two_devices(experts, choices):
    """Groups choices among two devices, and computes the experts for as many tokens as one of them has."""

    def on_one(_):
        groups = group_by_expert(choices, experts, 16, axis="expert")
        axes = Axes(batch=("expert",), expert="expert")
        return Experts24(v=16).mixture(X, W1, W2, X[:, :1], groups, STATE24, key=KEY, axes=axes)

    return jax.vmap(on_one, axis_name="expert")(jnp.arange(2))


REFUSED = {
    r"x \[96, 20\] must be \[\.\.\., D\], not empty; w1 \[160, 24\]": every_call(x=X[:, :20]),
    r"x \[0, 24\] must be \[\.\.\., D\], not empty": every_call(x=X[:0]),
    r"w1 \[24, 160\] and w2 \[160, 24\] must be \[F, D\] and \[F, D\] with": every_call(w1=W1.T),
    r"w1 \[160, 24\] and w2 \[80, 24\] must be": every_call(w2=W2[:80]),
    "w1 is int32: must be of a dtype of floats": every_call(w1=W1.astype(int)),
    "x is int32: must be of a dtype of floats": every_call(x=X.astype(int)),
    "w1 must be an array; got list": every_call(w1=W1.tolist()),
    "x must be an array; got list": every_call(x=X.tolist()),
    "recipe 'slices' reads a state: .*; got VenomState": [
        lambda: Slices().ffn(X, W1, W2, Venom().init_state(W1, W2)),
    ],
    r"weights \[160, 24\] must be \[L, F, D\], those of all layers": [
        lambda r=r: r.prepare(W1, W2, examples.state_of(r), jnp.float32) for r in (DENSE, Fst(), Slices())
    ],
    r"must be \[2 F, D\] and \[F, D\] with activation 'swiglu'": entered(DenseSlices(activation="swiglu")),
    "implementation = 'cuda' of recipe 'dense': must be one of reference,": [lambda: Dense(implementation="cuda")],
    "m = 6 of recipe 'slices': must be a positive multiple of 4": entered(Slices(m=6)),
    "m = 0 of recipe 'slices': must be a positive multiple of 4": entered(Slices(m=0)),
    "m = 24 of recipe 'dense_slices': must divide": entered(DenseSlices(m=24)),
    "shards = 3 of recipe 'slices': must divide the 160 neurons": entered(Slices(shards=3)),
    "shards = 0 of recipe 'dense_slices': must divide": entered(DenseSlices(shards=0)),
    "m = 16 of recipe 'slices': must divide the 40 neurons": entered(Slices(shards=4)),
    "shards = 1 of recipe 'dense_slices': must be a multiple of 2 devices": [on_two_devices(DenseSlices())],
    "shards = 3 of recipe 'slices': must be a multiple of 2 devices": [on_two_devices(Slices(shards=3))],
    "v = 48 of recipe 'slices': must be 4 or more, and divide 64": entered(Slices(v=48)),
    "v = 2 of recipe 'venom': must be 4 or more, and divide 64": entered(Venom(v=2)),
    "m = '16' of recipe 'slices': must be an integer": [lambda: Slices(m="16")],
    "mask_decay = None of recipe 'fst': must be a number": [lambda: Fst(mask_decay=None)],
    "m = 10 of recipe 'venom': must be a positive multiple of 4": entered(Venom(m=10)),
    "experts = 0 of recipe 'venom': must be in 1..160": entered(Venom(experts=0)),
    "mask_decay = -1.0 of recipe 'fst': must be in 0..1": entered(Fst(mask_decay=-1.0)),
    "v = 48 of recipe 'experts24': must be": entered(Experts24(v=48)),
    "dense_features = 3.0 of recipe 'act24': must be in 0..1": entered(Act24(dense_features=3.0)),
    **{
        rf"\[158, 24\], \[F, D\], must have .* 4 for recipe '{recipe.name}'": entered(recipe, W1[:158], W2[:158])
        for recipe in (Fst(), SSte(), Act24())
    },
    r"enter\(w1, w2, x\) needs a batch x": [lambda: Slices().enter(W1, W2)],
    r"refresh\(w1, w2, state, x\) needs a batch x": [lambda: Slices().refresh(W1, W2, examples.state_of(Slices()))],
    r"centroids \[4, 24\] of .* must be \[2, 24\]": [lambda: Slices(m=8).ffn(X, W1, W2, examples.state_of(Slices()))],
    "recipe 'slices' computes FFNs with squared_relu, gated_relu2, not swiglu": [
        *entered(Slices(m=8, activation="swiglu")),
        lambda: Slices(activation="swiglu").ffn(X, W1, W2),
    ],
    "recipe 'experts24' computes experts with squared_relu, gated_relu2, not swiglu": [
        lambda: Experts24(activation="swiglu").mixture(X, W1, W2, X[:, :2], None)
    ],
    r"order float32\[96\] must be int\[96\]": [lambda: unchecked(Act24(), X, W1, W2, order=X[:, 0])],
    r"order int32\[95\] must be int\[96\], a permutation of the tokens": [
        lambda: unchecked(Act24(), X, W1, W2, order=ORDER[:95]),
        lambda: unchecked(Slices(v=16), X, W1, W2, examples.state_of(Slices(v=16)), order=ORDER[:95]),
        lambda: group_by_expert(CHOSEN, 5, 16, ORDER[:95]),
    ],
    r"chosen must be a matrix .* got int32\[2, 48, 1\]": [lambda: group_by_expert(CHOSEN.reshape(2, 48, 1), 5, 16)],
    "recipe 'experts24' computes no FFNs": [lambda: Experts24().ffn(X, W1, W2)],
    "groups must be made by `group_by_expert`; got int32": [lambda: Experts24().mixture(X, W1, W2, X[:, :2], CHOSEN)],
    "v = 0 and experts = 5 must be positive": [lambda: group_by_expert(CHOSEN, 5, 0)],
    "experts = 5 must be split evenly by the mesh's axis 'expert'": [lambda: experts_on_two_devices(5, CHOSEN)],
    "the groups have k = 1 and T k = 96 of 2 devices": [lambda: experts_on_two_devices(4, CHOSEN)],
    "along None are not split along the mesh's axis 'tensor'": [lambda: mixture(STATE24, axes=Axes(tensor="tensor"))],
    "along None are not split along the mesh's axis 'expert'": [lambda: mixture(STATE24, axes=Axes(expert="expert"))],
    "recipe 'experts24' reads a state": [lambda: mixture(None)],
    r"w1 \[160, 24\] and w2 \[100, 24\] must be": [lambda: mixture(STATE24, w2=W2[:100], key=KEY)],
    r"gates \[96, 2\] must be .* k = 1 and T k = 96": [lambda: mixture(STATE24, gates=X[:, :2], key=KEY)],
    r"x \[48, 24\] and gates \[48, 1\] must be": [lambda: mixture(STATE24, x=X[:48], gates=X[:48, :1], key=KEY)],
    r"x \[48, 24\] and gates \[96, 1\] must be": [lambda: mixture(STATE24, x=X[:48], key=KEY)],
    r"w2 \[160, 24\] must be \[E Fe, D\]: the groups have E = 3": [lambda: mixture(STATE24, experts=3, key=KEY)],
    r"w2 \[30, 24\] .* Fe must be a multiple of 4": [lambda: mixture(STATE24, w1=W1[:30], w2=W2[:30], key=KEY)],
    "recipe 'slices' computes no experts": [
        lambda: Slices().mixture(X, W1, W2, X[:, :2], None),
        lambda: Slices().block_of_experts(96, 5),
    ],
    "weight gradients of recipe 'experts24' are stochastic: .* it needs key=": [lambda: mixture(STATE24)],
    "a shard of 96 neurons must be a multiple of 64": [lambda: gathered_of_two_devices(96)],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_by_name(message):
    kind = TypeError if "an array; got" in message or "must be made by" in message else ValueError
    for call in REFUSED[message]:
        with pytest.raises(kind, match=message):
            jax.eval_shape(call)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_what_they_do(name):
    recipe = RECIPES[name]
    assert recipe.refreshes == (recipe.refresh is not Recipe.refresh)
    assert recipe.sparse_weights == (recipe.prepare is not Recipe.prepare)


@pytest.mark.parametrize(
    "recipe, total",
    [
        (DENSE, 6),
        (Fst(), 3),
        (SSte(), 4),
        (Act24(dense_features=0.2), 4.4),
        (Venom(m=16), 0.5 + 3 / 8 + 2 * 0.5),  # up is of all neurons, and the weight gradients have a row for each
        (Slices(m=16), 6 / 8),
        (DenseSlices(m=16), 6 / 4),
    ],
)
def test_work(recipe, total):
    work = recipe.work()
    assert sum(work.values()) == pytest.approx(total)
    assert {product for product, share in work.items() if share < 1} == set(recipe.products)


ROUTED = dict(v=128, m=16)
ON_GPU = [
    *[Fst(), SSte(), Act24(), Venom(**ROUTED, experts=4), Slices(**ROUTED), DenseSlices(**ROUTED)],
    *[Fst(activation="swiglu"), SSte(activation="geglu"), Slices(**ROUTED, activation="gated_relu2")],
    DenseSlices(**ROUTED, activation="swiglu"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ON_GPU, ids=lambda recipe: f"{recipe.name}, {recipe.activation}")
def test_best_implementation_is_as_accurate_as_the_reference(recipe):
    assert_best_is_as_accurate_as_the_reference(recipe, tokens=1000, dim=256, neurons=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 1000])  # the kernel takes multiples of 128 along what it sums over
def test_best_implementation_of_act24_in_fp8_is_as_accurate_as_the_reference(tokens):
    with backends.record() as used:
        assert_best_is_as_accurate_as_the_reference(Act24(precision="fp8"), tokens, dim=512, neurons=1024)
    if backends.unavailable("hopper") is None:
        assert "hopper" in used["matmul_24_fp8"]


def assert_best_is_as_accurate_as_the_reference(recipe, tokens, dim, neurons):
    rows = rows_per_neuron(recipe.activation) * neurons
    x, w1, w2, do = examples.random_bf16((1, tokens, dim), (0.1, rows, dim), (0.05, neurons, dim), (1, tokens, dim))
    state, _ = jax.jit(recipe.enter)(w1, w2, x)

    def run(recipe, dtype):
        function = examples.outputs_and_gradients(recipe)
        return function(x.astype(dtype), w1, w2, do.astype(dtype), state, jax.random.key(0), None)[:4]

    examples.assert_best_is_as_accurate_as_the_reference(recipe, run)


@pytest.mark.parametrize("name", ["act24", "dense_slices"])
def test_arrays_of_numpy_outside_of_jit(name):
    """Covers the recipes that call what takes JAX's arrays alone."""
    recipe = examples.RECIPES[name]
    state = examples.state_of(recipe)
    o, _ = unchecked(recipe, *jax.tree.map(np.asarray, (X, W1, W2, state)))
    assert relative_error(o, examples.output(recipe)(X, W1, W2, state)) < 1e-6


def test_the_type_of_a_knob_is_its_annotation_and_not_its_defaults():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(Dense):
        strength: float = 1

    assert Own(strength=0.5).strength == 0.5
    with pytest.raises(ValueError, match="strength = '1' of recipe 'dense': must be a number"):
        Own(strength="1")
