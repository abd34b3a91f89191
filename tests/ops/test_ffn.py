"""Every recipe's outputs and gradients against masked dense float64 formulas on fresh random inputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import ffn, ffn_weights, routing
from sparse_lm.ops.plan import DENSE, DH_MVUE, PRODUCTS, RECIPES, W1_24, W2_24, Y_24, Y_MVUE, GemmPlan
from tests.model import jaxprs
from tests.ops import masked_dense_ffn as dense64

TOKENS, DIM, NEURONS = 96, 24, 160


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(20260206)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return dict(x=draw(TOKENS, DIM), w1=draw(NEURONS, DIM) / 4, w2=draw(NEURONS, DIM) / 8, do=draw(TOKENS, DIM))


def run(plan, variables, key, x, w1, w2, do, order=None, dtype=jnp.float32):
    """Output and gradients of the FFN as float64 arrays."""

    @jax.jit
    def outputs_and_gradients(x, w1, w2, do):
        f = functools.partial(
            ffn.feed_forward, variables=variables, key=key, order=order, plan=plan, implementation="reference"
        )
        o, vjp, _ = jax.vjp(f, x, w1, w2, has_aux=True)
        return o, *vjp(do)

    o, dx, dw1, dw2 = outputs_and_gradients(x.astype(dtype), w1, w2, do.astype(dtype))
    assert (dw1.dtype, dw2.dtype, o.dtype, dx.dtype) == (w1.dtype, w2.dtype, dtype, dtype)
    return dense64.Result(*(np.asarray(a, np.float64) for a in (o, dx, dw1, dw2)))


def assert_close(result, expected, tolerance=2e-6):
    for name in ("o", "dx", "dw1", "dw2"):
        a, b = getattr(result, name), getattr(expected, name)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def in_float64(inputs):
    return {name: np.asarray(a, np.float64) for name, a in inputs.items()}


arrange_rows = jax.jit(ffn.arrange_rows, static_argnums=3)


def reorder(expected, rows):
    """Rows of a result computed over slots, back in token order."""
    position = np.asarray(rows.position)
    return dataclasses.replace(expected, o=expected.o[position], dx=expected.dx[position])


def test_dense(inputs):
    a = in_float64(inputs)
    expected = dense64.ffn(a["x"], a["w1"], a["w2"], a["w2"], a["w1"], a["do"])
    assert_close(run(DENSE, ffn_weights.FfnVariables(), None, **inputs), expected)


def test_dense_matches_automatic_differentiation(inputs):
    def plain(x, w1, w2):
        return jnp.square(jax.nn.relu(x @ w1.T)) @ w2

    _, vjp = jax.vjp(plain, inputs["x"], inputs["w1"], inputs["w2"])
    result = run(DENSE, ffn_weights.FfnVariables(), None, **inputs)
    for mine, theirs in zip((result.dx, result.dw1, result.dw2), vjp(inputs["do"]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


def unbiased(a, key, use):
    """The 2:4 sample of a [T, ...] along T that the FFN draws with this key."""
    sample = jax.jit(lambda a, key: ops.sparsify_24(a, "mvue", 0, key=key).to_dense())
    return np.asarray(sample(jnp.asarray(a, jnp.float32), jax.random.fold_in(key, use)), np.float64).T


def test_fst(inputs):
    a, key = in_float64(inputs), jax.random.key(1)
    masks = {name: ops.transposable_mask(inputs[name]) for name in ("w1", "w2")}
    w1, w2 = (a[name] * np.asarray(masks[name]) for name in ("w1", "w2"))
    variables = ffn_weights.FfnVariables(mask_up=masks["w1"], mask_down=masks["w2"])
    expected = dense64.ffn(
        a["x"], w1, w2, w2, w1, a["do"],
        dh_for_dw1=lambda dh: unbiased(dh, key, 1), dw2_from=lambda do: unbiased(do, key, 2),
    )  # fmt: skip
    assert_close(run(RECIPES["fst"], variables, key, **inputs), expected, tolerance=1e-5)


@pytest.mark.parametrize("dense_weights", ["masked", "full"])
def test_sste(inputs, dense_weights):
    a, key = in_float64(inputs), jax.random.key(2)
    scales = 1.4, 1.3
    w1 = scales[0] * dense64.soft_threshold(a["w1"], axis=1)
    w2 = scales[1] * dense64.soft_threshold(a["w2"], axis=0)  # contracted over neurons in the forward
    w1_back, w2_back = (w1, w2) if dense_weights == "masked" else (a["w1"], a["w2"])
    variables = ffn_weights.FfnVariables(scale_up=jnp.float32(scales[0]), scale_down=jnp.float32(scales[1]))
    expected = dense64.ffn(
        a["x"], w1, w2, w2_back, w1_back, a["do"],
        dh_for_dw1=lambda dh: unbiased(dh, key, 1), dw2_from=lambda do: unbiased(do, key, 2),
    )  # fmt: skip
    plan = dataclasses.replace(RECIPES["sste"], dense_weights=dense_weights)
    assert_close(run(plan, variables, key, **inputs), expected, tolerance=1e-5)


@pytest.mark.parametrize("shuffle_tokens", [False, True])
@pytest.mark.parametrize("dense_features", [0.0, 0.05])
def test_act24(inputs, shuffle_tokens, dense_features):
    key = jax.random.key(3)
    plan = dataclasses.replace(RECIPES["act24"], shuffle_tokens=shuffle_tokens, dense_features=dense_features)
    a = in_float64(inputs)
    order = jax.random.permutation(key, TOKENS)
    rows, _ = arrange_rows(inputs["x"], ffn_weights.FfnVariables(), order, plan)
    if rows is None:
        rows = routing.Rows(jnp.arange(TOKENS), jnp.arange(TOKENS))
    slots = np.asarray(rows.slots)
    x, do = a["x"][slots], a["do"][slots]
    y = np.square(np.maximum(x @ a["w1"].T, 0))
    along_tokens = dense64.top_two_along_tokens(dense_features, counts=(y * dense64.top_two_of_four(y) != 0).sum(0))
    expected = dense64.ffn(
        x, a["w1"], a["w2"], a["w2"], a["w1"], do,
        mask_y=dense64.top_two_of_four, dh_for_dw1=along_tokens, y_for_dw2=along_tokens,
    )  # fmt: skip
    assert_close(run(plan, ffn_weights.FfnVariables(), key, order=order, **inputs), reorder(expected, rows))


@pytest.mark.parametrize(
    "selection, v, m, neuron_run, distance",
    [
        ("magnitude", 32, 8, 1, "cosine"),
        ("magnitude", 64, 32, 1, "l2"),  # 64 does not divide the tokens: the last block is ragged
        ("cluster_sets", 32, 8, 1, "l2"),
        ("cluster_sets", 16, 16, 1, "cosine"),
        ("cluster_sets", 16, 16, 8, "cosine"),
        ("slices", 16, 16, 1, "l2"),
        ("slices", 64, 32, 1, "cosine"),
    ],
)
def test_venom(inputs, selection, v, m, neuron_run, distance):
    clusters = m // 4 if selection == "slices" else 5
    plan = dataclasses.replace(
        RECIPES["venom"],
        selection=selection,
        v=v,
        m=m,
        clusters=clusters,
        neuron_run=neuron_run,
        distance=distance,
    )
    key, rng, a = jax.random.key(4), np.random.default_rng(v + m), in_float64(inputs)
    columns = None
    if selection == "cluster_sets":
        energy = jnp.asarray(rng.random((clusters, NEURONS)), jnp.float32)
        columns = routing.run_sets(energy, m, neuron_run) if neuron_run > 1 else routing.neuron_sets(energy, m)
    elif selection == "slices":
        columns = routing.slice_sets(NEURONS, clusters)
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.4),
        scale_down=jnp.float32(1.5),
        centroids=jnp.asarray(rng.standard_normal((clusters, DIM)), jnp.float32),
        columns=columns,
    )
    order = jax.random.permutation(key, TOKENS)
    rows, load = arrange_rows(inputs["x"], variables, order, plan)
    assert float(load.sum()) == pytest.approx(1)
    slots = np.asarray(rows.slots)
    with_padding = lambda z: np.concatenate([z, np.zeros_like(z[:1])])[slots]  # noqa: E731
    x, do = with_padding(a["x"]), with_padding(a["do"])
    w1 = 1.4 * dense64.soft_threshold(a["w1"], axis=1)
    w2 = 1.5 * dense64.soft_threshold(a["w2"], axis=1)
    if columns is None:
        mask_y = lambda y: dense64.venom_mask(y, v, m)  # noqa: E731
    else:
        listed = np.asarray(columns)[np.asarray(rows.block_clusters)]
        mask_y = lambda y: dense64.listed_mask(y, listed, v)  # noqa: E731
    along_tokens = dense64.top_two_along_tokens()
    expected = dense64.ffn(x, w1, w2, w2, w1, do, mask_y=mask_y, dh_for_dw1=along_tokens, y_for_dw2=along_tokens)
    assert_close(run(plan, variables, key, order=order, **inputs), reorder(expected, rows))


def test_venom_with_full_dense_weights(inputs):
    """The down product and dX read the master weights; up and dY still read them 2:4."""
    plan = dataclasses.replace(RECIPES["venom"], v=16, m=8, clusters=3, dense_weights="full")
    key, a = jax.random.key(5), in_float64(inputs)
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.4), scale_down=jnp.float32(1.5), centroids=jax.random.normal(key, (3, DIM))
    )
    order = jax.random.permutation(key, TOKENS)
    rows, _ = arrange_rows(inputs["x"], variables, order, plan)
    slots = np.asarray(rows.slots)
    along_tokens = dense64.top_two_along_tokens()
    expected = dense64.ffn(
        a["x"][slots],
        1.4 * dense64.soft_threshold(a["w1"], axis=1), a["w2"], 1.5 * dense64.soft_threshold(a["w2"], axis=1), a["w1"],
        a["do"][slots],
        mask_y=lambda y: dense64.venom_mask(y, 16, 8), dh_for_dw1=along_tokens, y_for_dw2=along_tokens,
    )  # fmt: skip
    assert_close(run(plan, variables, key, order=order, **inputs), reorder(expected, rows))


@pytest.mark.parametrize("recipe", ["fst", "sste", "venom", "cluster_sets"])
def test_a_layer_finds_its_weights_among_those_of_all(inputs, recipe):
    """Weights prepared for all layers at once give what a layer's own give, bit for bit."""
    plan = RECIPES.get(recipe, RECIPES["venom"])
    if plan.venom:
        selection = "magnitude" if recipe == "venom" else recipe
        plan = dataclasses.replace(plan, selection=selection, v=16, m=16, clusters=4, neuron_run=8)
    up, down = (jnp.stack([inputs[name] * factor for factor in (-2, 1, 3)]) for name in ("w1", "w2"))
    key, order = jax.random.key(9), jax.random.permutation(jax.random.key(10), TOKENS)
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.array([1.0, 1.4, 2.0]),
        scale_down=jnp.array([1.0, 1.3, 2.0]),
        mask_up=jax.vmap(ops.transposable_mask)(up),
        mask_down=jax.vmap(ops.transposable_mask)(down),
        centroids=jax.random.normal(key, (3, 4, DIM)),
        columns=jnp.broadcast_to(routing.slice_sets(NEURONS, 4), (3, 4, NEURONS // 4)),
    )
    own = jax.tree.map(lambda a: a[1], variables)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(of_all, x, do):
        weights = None
        if of_all:
            weights = ffn_weights.prepare_weights(up, down, variables, plan=plan, dtype=x.dtype)
        f = lambda x, w1, w2: ffn.feed_forward(x, w1, w2, own, key, order, weights, int(of_all), plan=plan)  # noqa: E731
        o, vjp, _ = jax.vjp(f, x, inputs["w1"], inputs["w2"], has_aux=True)
        return o, *vjp(do)

    results = [outputs_and_gradients(of_all, inputs["x"], inputs["do"]) for of_all in (False, True)]
    for alone, among_all in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, among_all)


@pytest.mark.parametrize("dense_weights", ["masked", "full"])
def test_transposable_weights_that_a_product_reads_dense(inputs, dense_weights):
    plan = dataclasses.replace(RECIPES["fst"], grad_hidden=None, grad_input=None, dense_weights=dense_weights)
    up, down = inputs["w1"][None], inputs["w2"][None]
    mask_up, mask_down = (jax.random.bernoulli(jax.random.key(seed), shape=up.shape) for seed in range(2))
    variables = ffn_weights.FfnVariables(mask_up=mask_up, mask_down=mask_down)
    weights = ffn_weights.prepare_weights(up, down, variables, plan=plan, dtype=jnp.float32)
    for form, w, mask in ((weights.up, up, mask_up), (weights.down, down, mask_down)):
        np.testing.assert_array_equal(form.dense, (w if dense_weights == "full" else w * mask)[0])


def test_ragged_shards_do_not_travel_compressed():
    plan, w = RECIPES["sste"], jax.ShapeDtypeStruct((1, 96, 64), jnp.float32)
    variables = ffn_weights.FfnVariables(scale_up=jnp.ones(1), scale_down=jnp.ones(1))
    prepare = functools.partial(ffn_weights.prepare_weights, variables=variables, plan=plan, dtype=jnp.float32)
    gather = functools.partial(ffn_weights.gather_layer, layer=jnp.int32(0), axis="fsdp")
    on_two_devices = jax.vmap(gather, in_axes=None, out_axes=None, axis_size=2, axis_name="fsdp")
    with pytest.raises(ValueError, match="a shard of 96 neurons must be a multiple of 64"):
        jax.eval_shape(on_two_devices, jax.eval_shape(prepare, w, w))


@pytest.mark.parametrize("dim, columns_run", [(64, 64), (24, 1)])
def test_padded_layers_are_not_one_run(dim, columns_run):
    """A run starts at a multiple of its length; layers of 24 rows, in whole tiles, start at multiples of 64."""
    plan, w = RECIPES["sste"], jax.ShapeDtypeStruct((3, 128, dim), jnp.float32)
    variables = ffn_weights.FfnVariables(scale_up=jnp.ones(3), scale_down=jnp.ones(3))
    prepare = functools.partial(ffn_weights.prepare_weights, variables=variables, plan=plan, dtype=jnp.float32)
    weights = jax.eval_shape(prepare, w, w)
    of_layer = ffn._Shared(plan, None, weights, jnp.int32(1))
    listed, _, listed_run = ffn._all_listed(weights.down.along_neurons, jnp.ones((8, 128)), dim, of_layer)
    np.testing.assert_array_equal(listed, [64 + np.arange(dim)])
    assert listed_run == columns_run


@pytest.mark.parametrize("recipe", ["sste", "venom"])
def test_more_tokens_than_a_block(recipe):
    plan = RECIPES[recipe]
    variables = ffn_weights.init_variables(plan, 64, 128)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((800, 64), (128, 64), (128, 64))]
    o, _ = jax.eval_shape(lambda *args: ffn.feed_forward(*args, variables, plan=plan), *shapes)
    assert o.shape == (800, 64)


def test_tokens_are_shuffled_where_the_plan_says():
    plan, x, order = RECIPES["act24"], jnp.ones((12, 4)), jax.random.permutation(jax.random.key(0), 12)
    rows, _ = ffn.arrange_rows(x, ffn_weights.NO_VARIABLES, order, plan)
    np.testing.assert_array_equal(rows.slots, order)
    for arguments in ((None, plan), (order, plan.for_evaluation())):
        assert ffn.arrange_rows(x, ffn_weights.NO_VARIABLES, *arguments) == (None, None)


@pytest.mark.parametrize("selection", ["magnitude", "cluster_sets"])
def test_tokens_of_a_cluster_are_taken_in_the_order_given(inputs, selection):
    plan = dataclasses.replace(RECIPES["venom"], selection=selection, v=16, m=8, clusters=2)
    x, order = inputs["x"], np.random.default_rng(0).permutation(TOKENS)
    variables = ffn_weights.FfnVariables(centroids=jax.random.normal(jax.random.key(1), (2, DIM)))
    slots = np.asarray(arrange_rows(x, variables, jnp.asarray(order), plan)[0].slots)
    clusters = np.asarray(routing.assign_tokens(x, variables.centroids, plan.distance))
    np.testing.assert_array_equal(slots[slots < TOKENS], order[np.argsort(clusters[order], kind="stable")])


def drawing(plan):
    return dataclasses.replace(plan, grad_up=DH_MVUE, grad_down=Y_MVUE)


@pytest.mark.parametrize("recipe", ["fst", "sste", "magnitude", "cluster_sets"])
def test_mvue_gradients_are_unbiased(inputs, recipe):
    """The mean weight gradient over many draws is that of dense dH, and dO or Y, within its own spread."""
    plan = RECIPES.get(recipe, RECIPES["venom"])
    if plan.venom:
        plan = drawing(dataclasses.replace(plan, selection=recipe, v=32, m=8, clusters=2))
    sets = routing.neuron_sets(jax.random.uniform(jax.random.key(12), (2, NEURONS)), 8)
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.4),
        scale_down=jnp.float32(1.3),
        mask_up=ops.transposable_mask(inputs["w1"]),
        mask_down=ops.transposable_mask(inputs["w2"]),
        centroids=jax.random.normal(jax.random.key(13), (2, DIM)),
        columns=sets,
    )

    @functools.partial(jax.jit, static_argnums=1)
    def weight_gradients(key, plan):
        f = lambda w1, w2: ffn.feed_forward(inputs["x"], w1, w2, variables, key, plan=plan)[0]  # noqa: E731
        return jax.vjp(f, inputs["w1"], inputs["w2"])[1](inputs["do"])

    keys = jax.random.split(jax.random.key(6), 400)
    draws = jax.lax.map(lambda key: weight_gradients(key, plan), keys, batch_size=50)
    exact = weight_gradients(None, dataclasses.replace(plan, grad_up=None, grad_down=None))
    for samples, mean in zip(draws, exact, strict=True):
        samples, mean = np.asarray(samples, np.float64), np.asarray(mean)
        random = samples.std(0) > 1e-3  # not of a neuron that few tokens keep
        z = (samples.mean(0) - mean)[random] / (samples.std(0)[random] / np.sqrt(len(keys)))
        np.testing.assert_allclose(samples.mean(0)[~random], mean[~random], atol=5e-3)
        assert random.mean() > 0.5
        assert abs(np.mean(z)) < 5 / np.sqrt(z.size) * 3  # entries of one product are correlated
        assert 0.8 < np.std(z) < 1.2


@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_error_is_rounding(inputs, recipe):
    """In bf16 the loss of accuracy is that of bf16, whatever the recipe. (Venom with m = 4 keeps all columns:
    among more, two of nearly equal norm can change places, which is no rounding error.)"""
    plan = dataclasses.replace(RECIPES[recipe], v=32, m=4, clusters=4) if recipe == "venom" else RECIPES[recipe]
    rounded = {name: a.astype(jnp.bfloat16).astype(jnp.float32) for name, a in inputs.items()}
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.5),
        scale_down=jnp.float32(1.5),
        mask_up=ops.transposable_mask(rounded["w1"]),
        mask_down=ops.transposable_mask(rounded["w2"]),
        centroids=jax.random.normal(jax.random.key(0), (4, DIM)),
    )
    f = jax.jit(functools.partial(ffn.feed_forward, plan=plan))
    low, high = (
        f(rounded["x"].astype(dtype), rounded["w1"], rounded["w2"], variables, jax.random.key(7))[0].astype(jnp.float32)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert float(jnp.linalg.norm(low - high) / jnp.linalg.norm(high)) < 2e-2


def bfloat16_gradients(plan, variables):
    """The gradients of a step in bfloat16 as a function of x, W1, W2 and dO, and shapes to trace it with."""

    def gradients(x, w1, w2, do):
        f = functools.partial(ffn.feed_forward, variables=variables, key=jax.random.key(0), plan=plan)
        return jax.vjp(f, x, w1, w2, has_aux=True)[1](do)

    tokens, weight = jax.ShapeDtypeStruct((96, 64), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.float32)
    return gradients, (tokens, weight, weight, tokens)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_have_the_dtype_of_the_weights(recipe):
    plan = RECIPES[recipe]
    gradients, shapes = bfloat16_gradients(plan, ffn_weights.init_variables(plan, 64, 128))
    dx, dw1, dw2 = jax.eval_shape(gradients, *shapes)
    assert (dx.dtype, dw1.dtype, dw2.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


def test_weight_gradients_are_made_in_float32():
    """By the products themselves, as XLA might leave out a rounding on the way but need not."""
    gradients, shapes = bfloat16_gradients(DENSE, ffn_weights.NO_VARIABLES)
    products = [
        e for e in jaxprs.equations(jax.make_jaxpr(gradients)(*shapes).jaxpr) if e.primitive.name == "dot_general"
    ]
    made = [e.outvars[0].aval for e in products]
    of_weights = [a.dtype for a in made if sorted(a.shape) == [64, 128]]
    assert of_weights == [jnp.float32] * 2


@pytest.mark.parametrize("recipe", ["act24", "cluster_sets"])
def test_weight_gradients_of_a_bfloat16_step_are_not_rounded(inputs, recipe):
    plan = RECIPES.get(recipe, RECIPES["venom"])
    if plan.venom:
        plan = dataclasses.replace(plan, selection=recipe, v=16, m=8, clusters=4, neuron_run=4)
    variables = dataclasses.replace(
        ffn_weights.init_variables(plan, DIM, NEURONS),
        centroids=jax.random.normal(jax.random.key(0), (4, DIM)),
        columns=routing.run_sets(jax.random.uniform(jax.random.key(1), (4, NEURONS)), 8, 4),
    )
    result = run(plan, variables, None, **inputs, dtype=jnp.bfloat16)
    for dw in (result.dw1, result.dw2):
        assert np.mean(dw != dw.astype(jnp.bfloat16).astype(np.float64)) > 0.5


def test_no_energy_is_not_nan():
    _, stats = jax.jit(ffn.feed_forward)(jnp.zeros((8, 8)), jnp.ones((16, 8)), jnp.ones((16, 8)))
    assert stats["kept_energy"] == 0 and stats["activation_sparsity"] == 1


def test_statistics(inputs):
    plan = dataclasses.replace(RECIPES["venom"], v=32, m=8, clusters=4)
    variables = ffn_weights.init_variables(plan, DIM, NEURONS)
    variables = dataclasses.replace(variables, centroids=jax.random.normal(jax.random.key(0), (4, DIM)))
    f = jax.jit(functools.partial(ffn.feed_forward, plan=plan))
    _, stats = f(inputs["x"], inputs["w1"], inputs["w2"], variables, jax.random.key(8))
    a = in_float64(inputs)
    h = a["x"] @ dense64.soft_threshold(a["w1"], axis=1).T
    assert float(stats["activation_sparsity"]) == pytest.approx((h <= 0).mean(), abs=1e-6)
    assert 0.25 < float(stats["kept_energy"]) < 1
    assert stats["expert_load"].shape == (4,)


def test_measured_energy_is_each_clusters_own(inputs):
    plan = dataclasses.replace(RECIPES["venom"], selection="cluster_sets", v=32, m=8, clusters=3)
    variables = dataclasses.replace(
        ffn_weights.init_variables(plan, DIM, NEURONS), centroids=jax.random.normal(jax.random.key(1), (3, DIM))
    )
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    _, stats = jax.jit(functools.partial(ffn.feed_forward, plan=plan.for_measuring()))(x, w1, w2, variables)
    a = in_float64(inputs)
    y = np.square(np.maximum(a["x"] @ dense64.soft_threshold(a["w1"], axis=1).T, 0))
    similarity = a["x"] @ np.asarray(variables.centroids).T / np.linalg.norm(variables.centroids, axis=1)
    expected = np.stack([np.square(y[similarity.argmax(1) == e]).sum(0) for e in range(3)])
    np.testing.assert_allclose(stats["clusters"].energy, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe, dense_weights", [*((recipe, "masked") for recipe in RECIPES), ("sste", "full")])
def test_effective_weights_reproduce_the_weight_sparse_forward(inputs, recipe, dense_weights):
    """Dense products with the effective weights give what the plan gives if activations are left alone."""
    plan = dataclasses.replace(RECIPES[recipe], dense_weights=dense_weights)
    if plan.venom or recipe == "act24":
        plan = dataclasses.replace(plan, down=None, grad_input=None, shuffle_tokens=False)
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.4),
        scale_down=jnp.float32(1.3),
        mask_up=ops.transposable_mask(inputs["w1"]),
        mask_down=ops.transposable_mask(inputs["w2"]),
    )

    @jax.jit
    def outputs(x, w1, w2, variables):
        sparse, _ = ffn.feed_forward(x, w1, w2, variables, jax.random.key(0), plan=plan)
        dense, _ = ffn.feed_forward(x, *ffn_weights.effective_weights(w1, w2, variables, plan))
        return sparse, dense

    sparse, dense = outputs(inputs["x"], inputs["w1"], inputs["w2"], variables)
    np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_plan_refuses_an_operand_that_its_product_lacks(product):
    wrong = Y_24 if product in ("up", "grad_hidden") else W1_24 if product != "grad_input" else Y_24
    with pytest.raises(ValueError, match=product):
        GemmPlan(**{product: wrong}, weights="transposable")


def test_plan_refuses_one_sided_activation_patterns():
    with pytest.raises(ValueError, match="share one activation pattern"):
        GemmPlan(down=Y_24)


@pytest.mark.parametrize(
    "recipe, changes",
    [
        ("venom", dict(grad_up=DH_MVUE)),
        ("venom", dict(grad_down=Y_MVUE)),
        ("sste", dict(grad_down=Y_MVUE)),
    ],
)
def test_plan_refuses_to_draw_one_half_of_a_pass(recipe, changes):
    with pytest.raises(ValueError, match="both of these or neither"):
        dataclasses.replace(RECIPES[recipe], **changes)


@pytest.mark.parametrize(
    "recipe, changes",
    [
        ("fst", {}),  # dO is 2:4 in grad_down, whose rows are no neurons
        ("dense", {}),
        ("venom", dict(selection="slices")),
        ("venom", dict(selection="cluster_sets", neuron_run=128)),
    ],
)
def test_plan_refuses_dense_features_that_no_product_would_have(recipe, changes):
    with pytest.raises(ValueError, match=r"dense_features = .* must be 0"):
        dataclasses.replace(RECIPES[recipe], dense_features=0.05, **changes)


@pytest.mark.parametrize(
    "operands, weights, message",
    [
        (dict(up=W1_24), "full", "weights = 'full' must be"),
        (dict(up=W1_24, grad_input=W1_24), "soft_threshold", "W1 is 2:4 along both dimensions"),
        (dict(down=W2_24, grad_hidden=W2_24), "soft_threshold", "W2 is 2:4 along both dimensions"),
    ],
)
def test_plan_refuses_weights_that_cannot_be_sparse_so(operands, weights, message):
    with pytest.raises(ValueError, match=message):
        GemmPlan(**operands, weights=weights)


def test_a_plan_that_draws_needs_a_key(inputs):
    plan = drawing(dataclasses.replace(RECIPES["act24"], dense_features=0.0))
    with pytest.raises(ValueError, match="Y mvue draws at random: key must be given"):
        run(plan, ffn_weights.FfnVariables(), None, **inputs)


@pytest.mark.parametrize(
    "recipe, changes, ordered, random",
    [
        ("dense", {}, False, False),
        ("fst", {}, False, True),
        ("act24", {}, True, True),
        ("act24", dict(shuffle_tokens=False), False, False),
        ("venom", {}, True, True),
        ("venom", dict(v=1), False, False),  # a block is one token, whatever the order
    ],
)
def test_what_of_a_plan_is_random(recipe, changes, ordered, random):
    plan = dataclasses.replace(RECIPES[recipe], **changes)
    assert (plan.ordered, plan.random) == (ordered, random)


@pytest.mark.parametrize("recipe, total", [("dense", 6), ("fst", 3), ("sste", 4)])
def test_relative_work_counts_half_for_each_sparse_product(recipe, total):
    assert sum(RECIPES[recipe].relative_work().values()) == total


@pytest.mark.parametrize(
    "selection, neuron_run, total",
    [
        ("magnitude", 1, 0.5 * 3 + 3 / 8),
        ("cluster_sets", 1, 4 / 8 + 0.5 * 2),  # the weight gradients' sparse operands have a row for every neuron
        ("cluster_sets", 64, 6 / 8),
        ("slices", 1, 6 / 8),
    ],
)
def test_relative_work_of_venom(selection, neuron_run, total):
    plan = dataclasses.replace(RECIPES["venom"], m=16, selection=selection, neuron_run=neuron_run)
    assert sum(plan.relative_work().values()) == pytest.approx(total)


@pytest.mark.parametrize("changes", [dict(selection="slice"), dict(dense_weights="ful"), dict(distance="l1")])
def test_plan_refuses_words_that_it_does_not_know(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} = .* must be one of"):
        dataclasses.replace(RECIPES["venom"], **changes)


@pytest.mark.parametrize("recipe, name", [("sste", "scale_up"), ("fst", "mask_up"), ("venom", "centroids")])
def test_variables_that_are_missing_are_named(inputs, recipe, name):
    with pytest.raises(ValueError, match=f"the plan reads variables.{name}"):
        ffn.feed_forward(inputs["x"], inputs["w1"], inputs["w2"], plan=RECIPES[recipe])


def test_relative_work_counts_dense_features():
    plan = dataclasses.replace(RECIPES["act24"], dense_features=0.2)
    expected = dict(up=1, down=0.5, grad_hidden=1, grad_input=0.5, grad_up=0.6, grad_down=0.6)
    assert plan.relative_work() == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe, selection",
    [
        ("sste", None),
        ("act24", None),
        ("venom", "magnitude"),
        ("venom", "cluster_sets"),
        ("venom", "slices"),
        ("drawn", "magnitude"),
        ("drawn", "slices"),
    ],
)
def test_best_implementation_is_as_accurate_as_the_reference(recipe, selection):
    """In bf16 on a GPU, whichever kernels run: against float32, at most 1.5 times the reference's error."""
    tokens, dim, neurons = 1000, 256, 1024
    rng = np.random.default_rng(11)
    x, w1, w2, do = (
        jnp.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16).astype(jnp.float32)
        for shape, scale in (((tokens, dim), 1), ((neurons, dim), 0.1), ((neurons, dim), 0.05), ((tokens, dim), 1))
    )
    plan, columns = drawing(RECIPES["venom"]) if recipe == "drawn" else RECIPES[recipe], None
    if selection:
        plan = dataclasses.replace(plan, selection=selection, v=128, m=16, clusters=4)
        columns = {"magnitude": None, "slices": routing.slice_sets(neurons, 4)}.get(
            selection, routing.neuron_sets(jnp.asarray(rng.random((4, neurons)), jnp.float32), 16)
        )
    variables = ffn_weights.FfnVariables(
        scale_up=jnp.float32(1.4),
        scale_down=jnp.float32(1.5),
        centroids=jnp.asarray(rng.standard_normal((4, dim)), jnp.float32),
        columns=columns,
    )

    def compute(dtype, implementation):
        f = functools.partial(
            ffn.feed_forward, variables=variables, key=jax.random.key(0), plan=plan, implementation=implementation
        )

        @jax.jit
        def outputs_and_gradients(x, w1, w2, do):
            o, vjp, _ = jax.vjp(f, x, w1, w2, has_aux=True)
            return o, *vjp(do)

        with jax.default_matmul_precision("highest"):
            results = outputs_and_gradients(x.astype(dtype), w1, w2, do.astype(dtype))
        return [np.asarray(a, np.float64) for a in results]

    exact = compute(jnp.float32, "reference")
    errors = [
        [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(compute(jnp.bfloat16, name), exact, strict=True)]
        for name in (None, "reference")
    ]
    for best, reference in zip(*errors, strict=True):
        assert best <= 1.5 * reference, errors
