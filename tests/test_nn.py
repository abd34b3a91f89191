"""`SquaredReluFFN` in NNX models that know nothing else of ours: phases, transformations, moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparse_lm.collectives import Axes
from sparse_lm.nn import SquaredReluFFN, sort_moments
from sparse_lm.recipes import DenseSlices, Experts24, Fst, Slices, Venom
from tests.ops.numpy_sparse import soft_threshold
from tests.ops.operands import relative_error
from tests.recipes import examples
from tests.recipes import masked_dense_ffn as dense64
from tests.recipes.examples import DIM, DO, INPUTS, KEY, NEURONS, TOKENS, W1, W2, X

RECIPE = Slices(v=16, m=16)


def dense_ffn(recipe=RECIPE):
    ffn = SquaredReluFFN(DIM, NEURONS, recipe, rngs=nnx.Rngs(0))
    ffn.up[...], ffn.down[...] = W1, W2
    return ffn


@functools.cache
def _entered():
    ffn = dense_ffn()
    order = nnx.jit(lambda ffn: ffn.enter(X))(ffn)
    return nnx.split(ffn), order


def sparse_ffn():
    """An FFN of its own in its sparse phase, and the order of its neurons."""
    (graph, state), order = _entered()
    return nnx.merge(graph, jax.tree.map(jnp.copy, state)), order


def gradients(graph, params, rest, x, do, **options):
    """O, dX, dUp, dDown."""
    o, vjp = jax.vjp(lambda params, x: nnx.merge(graph, params, rest)(x, **options), params, x)
    params, dx = vjp(do)
    return o, dx, params["up"][...], params["down"][...]


def output_and_gradients(ffn):
    return nnx.jit(lambda ffn, x, do: gradients(*nnx.split(ffn, nnx.Param, ...), x, do, key=KEY))(ffn, X, DO)


def assert_close(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < tolerance


def test_it_computes_densely_then_by_the_recipe_then_densely_with_the_weights_that_are_left():
    """Returns what the recipe computes of the arrays themselves."""
    expected = dense64.dense(INPUTS)
    assert_close(output_and_gradients(dense_ffn()), [expected.o, expected.dx, expected.dw1, expected.dw2])

    ffn, order = sparse_ffn()
    assert ffn.sparse and (order != jnp.arange(NEURONS)).any()
    state, own_order = jax.jit(RECIPE.enter)(W1, W2, X)
    np.testing.assert_array_equal(order, own_order)
    of_tokens = jax.random.permutation(KEY, TOKENS)
    *expected, _ = examples.outputs_and_gradients(RECIPE)(X, W1[order], W2[order], DO, state, KEY, of_tokens)
    assert_close(output_and_gradients(ffn), expected, 1e-6)

    x = 2 + X
    nnx.jit(lambda ffn, x: ffn.refresh(x))(ffn, x.reshape(4, -1, DIM))
    moved, _ = jax.jit(RECIPE.refresh)(ffn.up[...], ffn.down[...], state, x)
    np.testing.assert_allclose(ffn.state["centroids"][...], moved.centroids, rtol=1e-6)
    assert (ffn.state["centroids"][...] != state.centroids).any()

    nnx.jit(lambda ffn: ffn.leave())(ffn)
    assert not ffn.sparse
    up = float(state.scale_up) * soft_threshold(INPUTS.w1[order], axis=1)
    down = float(state.scale_down) * soft_threshold(INPUTS.w2[order], axis=1)
    assert_close((ffn.up[...], ffn.down[...]), (up, down))
    assert_close([nnx.jit(lambda ffn: ffn(X))(ffn)], [np.square(np.maximum(INPUTS.x @ up.T, 0)) @ down])


def test_blocks_are_of_random_tokens_in_training_and_of_one_in_evaluation():
    """`venom` chooses neurons for a block of tokens; later tokens of a text must not decide over earlier ones."""
    ffn = dense_ffn(Venom(v=32, m=8, experts=2))
    nnx.jit(lambda ffn: ffn.enter())(ffn)
    compute = nnx.jit(lambda ffn, x, key: ffn(x, key=key))
    changed = X.at[TOKENS // 2 :].set(-X[TOKENS // 2 :])
    before, after = (np.asarray(compute(ffn, x, None)) for x in (X, changed))
    np.testing.assert_allclose(before[: TOKENS // 2], after[: TOKENS // 2], atol=1e-5)
    one, other = (np.asarray(compute(ffn, X, jax.random.key(seed))) for seed in (0, 1))
    assert relative_error(one, other) > 0.01


@pytest.mark.filterwarnings("error::FutureWarning")
def test_64_bit_numbers_may_be_on():
    """Permutations are then int64, and so are sums of int32; a scatter of these into int32 is to become an error."""
    with jax.enable_x64(True):
        ffn = dense_ffn()
        ffn.enter(X)
        assert jax.eval_shape(lambda x: ffn(x, key=KEY), X).dtype == X.dtype


def test_what_is_out_of_turn_is_refused():
    ffn = dense_ffn()
    for call in (ffn.leave, ffn.refresh):
        with pytest.raises(ValueError, match="the FFN is dense: call enter first"):
            call()
    with pytest.raises(ValueError, match="the FFN is sparse: call leave first"):
        sparse_ffn()[0].enter(X)


def test_a_recipe_that_could_not_be_entered_is_refused_at_once():
    refused = {
        "recipe 'dense_slices' with activation 'swiglu' computes no squared-ReLU FFN": DenseSlices(activation="swiglu"),
        "recipe 'experts24' with activation 'squared_relu' computes no squared-ReLU FFN": Experts24(),
    }
    for message, recipe in refused.items():
        with pytest.raises(ValueError, match=message):
            dense_ffn(recipe)
    with pytest.raises(ValueError, match=r"w2 \[64, 30\], \[F, D\], must have multiples of 4 for recipe 'slices'"):
        SquaredReluFFN(30, 64, rngs=nnx.Rngs(0))


def test_gradients_are_adjusted_in_the_sparse_phase_alone():
    ffn = dense_ffn(Fst(mask_decay=0.5))
    nnx.jit(lambda ffn: ffn.enter())(ffn)
    expected = W2 + 0.5 * W1 * ~ffn.state["mask_up"][...], W1 + 0.5 * W2 * ~ffn.state["mask_down"][...]
    assert_close(ffn.adjust_gradients(W2, W1), expected)
    nnx.jit(lambda ffn: ffn.leave())(ffn)
    ffn.up[...], ffn.down[...] = W1, W2  # what was pruned has grown again
    jax.tree.map(np.testing.assert_array_equal, ffn.adjust_gradients(W2, W1), (W2, W1))


def test_initial_weights_keep_the_size_of_what_they_multiply():
    ffn = SquaredReluFFN(256, 1024, rngs=nnx.Rngs(0))
    assert [float(w[...].std()) for w in (ffn.up, ffn.down)] == pytest.approx([256**-0.5, 1024**-0.5], rel=0.01)


def test_stacked_layers_enter_together():
    """`nnx.vmap` of the module, of `enter` and of `leave`; each layer does what it does alone."""
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: SquaredReluFFN(DIM, NEURONS, RECIPE, rngs=rngs)))
    stack = make(nnx.Rngs(0))
    first = nnx.merge(nnx.graphdef(stack), jax.tree.map(lambda a: jnp.copy(a[0]), nnx.state(stack)))
    orders = nnx.jit(nnx.vmap(lambda ffn, x: ffn.enter(x)))(stack, jnp.stack([X, X + 1]))
    order = nnx.jit(lambda ffn, x: ffn.enter(x))(first, X)
    assert stack.sparse and orders.shape == (2, NEURONS)
    np.testing.assert_array_equal(orders[0], order)
    np.testing.assert_array_equal(stack.up[...][0], first.up[...])
    nnx.jit(nnx.vmap(lambda ffn: ffn.leave()))(stack)
    assert not stack.sparse and (stack.up[...] == 0).mean() >= 0.5


def test_shards_of_a_batch_compute_the_gradients_of_the_whole():
    """Under `shard_map` gradients are summed over the shards, each of which routes its own tokens."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(ffn):
        graph, params, rest = nnx.split(ffn, nnx.Param, ...)
        run = functools.partial(gradients, graph, key=KEY, axes=Axes(batch=("data",)))
        specs = dict(in_specs=(P(), P(), P("data"), P("data")), out_specs=(P("data"), P("data"), P(), P()))
        return jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))(params, rest, X, DO)

    expected = dense64.dense(INPUTS)
    assert_close(sharded(dense_ffn()), (expected.o, expected.dx, expected.dw1, expected.dw2))
    ffn, _ = sparse_ffn()
    found, expected = sharded(ffn), output_and_gradients(ffn)
    assert_close(found[:2], expected[:2])
    for mine, theirs in zip(found[2:], expected[2:], strict=True):  # with other draws
        assert 0.7 < np.vdot(mine, theirs) / np.vdot(theirs, theirs) < 1.3
        assert 0.7 < np.vdot(mine, theirs) / np.linalg.norm(mine) / np.linalg.norm(theirs) < 0.999


def test_moments_of_an_optax_state():
    """Adam's, of plain dictionaries; stacked layers have an order each, and a gate two rows a neuron."""
    tx = optax.adamw(1e-3)
    params = {"ffn": {"up": jnp.zeros((2, 8, 3)), "down": jnp.zeros((2, 4, 3))}, "other": jnp.zeros((4, 3))}
    grads = jax.tree.map(lambda w: jnp.arange(w.size, dtype=w.dtype).reshape(w.shape), params)
    _, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
    order = jnp.asarray([[2, 0, 1, 3], [3, 2, 1, 0]])
    found = sort_moments(opt_state, params, {("ffn",): order})
    expected = jax.tree.map(lambda a: a, opt_state)
    for moments in (expected[0].mu, expected[0].nu):
        for name, m in moments["ffn"].items():
            by_neuron = m.reshape(2, 4, -1)
            moments["ffn"][name] = jnp.stack([by_neuron[0][order[0]], by_neuron[1][order[1]]]).reshape(m.shape)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    same = sort_moments(opt_state, params, {("ffn",): None})
    jax.tree.map(np.testing.assert_array_equal, same, opt_state)
    with pytest.raises(ValueError, match=r"no parameters are at \('fnn',\)"):
        sort_moments(opt_state, params, {("fnn",): order})
    with pytest.raises(ValueError, match=r"\('ffn', 'up'\) \[2, \d, 3\].* must be \[..., F, D\].* order \[4\] is"):
        sort_moments(opt_state, params, {("ffn",): order[0]})
    muon = optax.contrib.muon(1e-3).init(params)  # whose coefficients are no moments
    sort_moments(muon, params, {("ffn",): order})
    numbers = optax.novograd(1e-3).init(params)  # one a parameter
    jax.tree.map(np.testing.assert_array_equal, sort_moments(numbers, params, {("ffn",): order}), numbers)
    for of_rows in (optax.adafactor(1e-3, min_dim_size_to_factor=1), optax.sm3(1e-3)):
        with pytest.raises(ValueError, match=r"of the optimizer has shape \(\d.*, its parameter \(2, \d, 3\)"):
            sort_moments(of_rows.init(params), params, {("ffn",): order})
    flat = optax.flatten(optax.adam(1e-3)).init(params)
    with pytest.raises(ValueError, match=r"of the optimizer, of shape \(84,\), is of no one parameter"):
        sort_moments(flat, params, {("ffn",): order})
