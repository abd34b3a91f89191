"""Generation against the whole-sequence forward, and what its options do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.config import ModelConfig
from sparse_lm.model import decode, llama
from sparse_lm.recipes import Venom
from tests.model.test_llama import logits

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=40, dtype="float32")
PROMPT = [7, 1, 30, 30, 2]
MIXTURE = dict(experts=5, expert_dim=16, shared_expert_dim=24)


def sharp_model(**overrides):
    graphdef, params = llama.init(dataclasses.replace(CONFIG, **overrides), jax.random.key(0))
    return graphdef, jax.tree.map(lambda x: 1.5 * x, params)  # sharper than a fresh one


@pytest.fixture(scope="module")
def model():
    return sharp_model()


def generate(model, prompt, *, seed=0, **options):
    """The continuation of one prompt."""
    (made,) = decode.generate(*model, [prompt], seeds=[seed], **options)
    return made


def by_pieces(net, tokens, **options):
    """Hidden states of tokens [B, S], the first seven at once and then one at a time, with a cache."""
    extend = jax.jit(lambda tokens, cache, start: net.extend(tokens, cache, start, **options))
    cache, pieces = decode.empty_cache(net.config, capacity=16, batch=len(tokens)), []
    for piece in (range(7), *([position] for position in range(7, tokens.shape[1]))):
        hidden, cache = extend(tokens[:, np.array(piece)], cache, piece[0])
        pieces.append(hidden)
    return jnp.concatenate(pieces, axis=1)


@pytest.mark.parametrize(
    "overrides",
    [dict(activation="swiglu", tie_embeddings=True, kv_heads=4), dict(qk_norm=True, head_dim=6), MIXTURE],
    ids=str,
)
def test_cached_logits_equal_the_whole_forward(overrides):
    config = dataclasses.replace(CONFIG, **overrides)
    net = llama.merge(*llama.init(config, jax.random.key(1)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 10), dtype=np.int32)
    whole = jax.jit(lambda tokens: net.logits(net(tokens)[0]))(tokens)
    np.testing.assert_allclose(net.logits(by_pieces(net, tokens)), whole, rtol=1e-4, atol=1e-5)


def test_temperature_zero_takes_the_most_probable_token_until_one_ends_the_text(model):
    options = dict(max_new_tokens=40, temperature=0.0, seed=3)  # past a power of two
    made = generate(model, PROMPT, **options)
    most_probable = jnp.argmax(logits(*model, jnp.array([PROMPT + made]))[0], axis=-1)
    assert made == most_probable[len(PROMPT) - 1 : -1].tolist()
    assert generate(model, PROMPT, stop=made[5], **options) == made[: made.index(made[5])]


@pytest.mark.long
@pytest.mark.parametrize("temperature, overrides", [(1.0, {}), (0.0, MIXTURE)], ids=str)
def test_a_batch_gives_what_its_prompts_give_alone(temperature, overrides):
    """Of any lengths, each with its seed; a row that stops early holds up no other."""
    model = sharp_model(**overrides)
    prompts = [PROMPT, [3], [9] * 12, PROMPT]
    options = dict(max_new_tokens=15, temperature=temperature, top_p=0.9)
    options["stop"] = generate(model, prompts[0], seed=0, **options)[6]
    alone = [generate(model, prompt, seed=seed, **options) for seed, prompt in enumerate(prompts)]
    assert len({len(made) for made in alone}) > 1
    assert decode.generate(*model, prompts, seeds=range(4), **options) == alone


SCALES = jnp.full(CONFIG.layers, 1.4)
CENTROIDS = jax.random.normal(jax.random.key(1), (CONFIG.layers, 2, CONFIG.dim))


@pytest.mark.long
def test_a_sparse_model_continues_a_batch_as_its_prompts_alone(model):
    """Tokens of a block of V:N:M choose their neurons together in training, and each for itself in generation."""
    recipe, prompts = Venom(v=16, m=8, experts=2), [PROMPT, [3]]
    ffns = dict(recipe=recipe, recipe_state=recipe.State(SCALES, SCALES, CENTROIDS))
    options = dict(max_new_tokens=6, temperature=0.0)
    alone = [generate(model, prompt, **ffns, **options) for prompt in prompts]
    assert decode.generate(*model, prompts, **ffns, **options) == alone
    assert [generate(model, prompt, **options) for prompt in prompts] != alone


def test_every_token_is_drawn_anew(model):
    graphdef, params = model
    indifferent = graphdef, dict(params, unembed=jnp.zeros_like(params["unembed"]))
    assert np.bincount(generate(indifferent, PROMPT, max_new_tokens=400)).max() < 30  # of 40 tokens, each 10 times


def test_sampled_tokens_follow_the_distribution_at_the_temperature():
    draw = jax.jit(jax.vmap(decode.sample, (None, 0, None, None)))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 20_000)
    counts = np.bincount(draw(logits, keys, 0.7, 1.0), minlength=8)
    np.testing.assert_allclose(counts / 20_000, jax.nn.softmax(logits / 0.7), atol=0.015)
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))  # at 0.5, 0.66 of the mass is on the first
    at_one, at_half = (set(draw(logits, keys[:200], temperature, 0.6).tolist()) for temperature in (1.0, 0.5))
    assert (at_one, at_half) == ({0, 1}, {0})


MASSES, EVEN = (0.26, 0.08, 0.42, 0.04, 0.2), (0.25,) * 4


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1.2e-38])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_the_smallest_temperatures_take_the_most_probable_token(temperature, top_p):
    logits = jnp.array([10.0, -20.0, 50.0, 30.0])
    assert decode.sample(logits, jax.random.key(0), jnp.float32(temperature), jnp.float32(top_p)) == 2


@pytest.mark.parametrize(
    ("masses", "top_p", "kept"),
    [
        (MASSES, 0.3, [2]),
        (MASSES, 0.45, [0, 2]),
        (MASSES, 0.75, [0, 2, 4]),
        (MASSES, 1.0, [0, 1, 2, 3, 4]),
        (EVEN, 0.4, [0, 1]),
        (EVEN, 1e-9, [0]),
    ],
)
def test_top_p_keeps_the_smallest_sufficient_set(masses, top_p, kept):
    """Ties go to the lower token, and one token always stays."""
    logits = jnp.log(jnp.array(masses))
    filtered = decode.keep_top_p(logits, top_p)
    assert kept == np.flatnonzero(np.isfinite(filtered)).tolist()
    np.testing.assert_array_equal(filtered[jnp.array(kept)], logits[jnp.array(kept)])


def test_few_compilations(model):
    decode._generate.clear_cache()
    for length, new, temperature in [(1, 5, 0.0), (9, 0, 1.0), (20, 12, 0.5), (5, 27, 0.1)]:
        made = generate(model, [3] * length, max_new_tokens=new, temperature=temperature, top_p=0.9)
        assert len(made) == new
    assert decode._generate._cache_size() == 1
    generate(model, [3] * 20, max_new_tokens=13)
    assert decode._generate._cache_size() == 2


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "no tokens"),
        ([5, CONFIG.vocab_size], {}, f"tokens 5 to {CONFIG.vocab_size}: must be in 0..{CONFIG.vocab_size - 1}"),
        ([-1, 5], {}, "tokens -1 to 5"),
        (PROMPT, dict(temperature=-1.0), "temperature = -1.0"),
        (PROMPT, dict(temperature=float("nan")), "temperature = nan"),
        (PROMPT, dict(top_p=0.0), "top_p = 0.0"),
        (PROMPT, dict(max_new_tokens=-1), "max_new_tokens = -1"),
    ],
)
def test_bad_arguments_are_refused(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **(dict(max_new_tokens=3) | options))


def test_there_is_a_seed_for_each_prompt(model):
    with pytest.raises(ValueError, match="inconsistent sizes"):
        decode.generate(*model, [PROMPT, PROMPT], seeds=[1], max_new_tokens=3)
    assert decode.generate(*model, [], max_new_tokens=3) == []
