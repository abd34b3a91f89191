"""Models of transformers as starting points."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers.normalizers import Lowercase

from sparse_lm.config import Config, DataConfig
from sparse_lm.data.tokenizer import end_of_text, load_tokenizer
from sparse_lm.errors import ConfigError
from sparse_lm.interop.pretrained import Pretrained
from tests.interop.models import MODELS, random_params, write_model


@pytest.fixture
def save(tmp_path):
    """Writes a model of `MODELS` and gives the configuration of a run that starts from it."""

    def save(name, params=None, shard_bytes=10**9):
        params = random_params(MODELS[name]) if params is None else params
        write_model(tmp_path / "hf", MODELS[name], params, shard_bytes=shard_bytes)
        return Config(init_from=str(tmp_path / "hf"), model=MODELS[name])

    return save


@pytest.mark.parametrize("name, shard_bytes", [("grouped", 10**9), *((name, 10_000) for name in MODELS)])
def test_round_trip_is_exact(name, shard_bytes, save):
    params = random_params(MODELS[name])
    jax.tree.map(np.testing.assert_array_equal, Pretrained(save(name, params, shard_bytes)).params(), params)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_becomes_float32(dtype, save, tmp_path):
    params = random_params(MODELS["grouped"])
    config = save("grouped", params)
    file = tmp_path / "hf" / "model.safetensors"
    save_file({name: array.astype(dtype) for name, array in load_file(file).items()}, file)
    rounded = jax.tree.map(lambda p: p.astype(dtype).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, Pretrained(config).params(), rounded)


def change_weights(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_tied_embeddings_may_be_there_twice(save, tmp_path):
    params = random_params(MODELS["tied"])
    config = save("tied", params)
    change_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    jax.tree.map(np.testing.assert_array_equal, Pretrained(config).params(), params)
    change_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        Pretrained(config)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight$"),
        (lambda t: t.update({"model.bias": np.ones(16, np.float32)}), r"has unexpected model\.bias$"),
        (lambda t: t.update({"lm_head.weight": np.ones((283, 8), np.float32)}), r"is \[283, 8\]; must be \[283, 16\]"),
        (lambda t: t.update({"lm_head.weight": np.ones((283, 16))}), "is F64; must be one of F32, BF16, F16"),
    ],
)
def test_weights_of_another_model_are_refused(change, message, save, tmp_path):
    config = save("grouped")
    change_weights(tmp_path / "hf", change)
    with pytest.raises(ConfigError, match=rf"config\.init_from = '{config.init_from}'.*{message}"):
        Pretrained(config)


def test_other_files_are_refused_by_name(save, tmp_path):
    config = save("grouped")
    with pytest.raises(ConfigError, match=r"must be a directory with config\.json"):
        Pretrained(dataclasses.replace(config, init_from=str(tmp_path / "nowhere")))
    hf_config = tmp_path / "hf" / "config.json"
    hf_config.write_text(hf_config.read_text().replace('"relu2"', '"gelu"'))
    with pytest.raises(ConfigError, match="hidden_act = 'gelu'"):
        Pretrained(config)
    hf_config.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        Pretrained(config)


def test_a_config_of_another_model_is_told_what_to_change(save):
    config = save("grouped")
    other = dataclasses.replace(config.model, dim=32, rope_theta=5.0)
    needed = r"the model in .* needs --config\.model\.dim=16 --config\.model\.rope_theta=10000\.0$"
    with pytest.raises(ConfigError, match=rf"config\.model\.dim = 32: {needed}"):
        Pretrained(dataclasses.replace(config, model=other))
    assert config.model.head_dim == 0  # which may be spelled out
    Pretrained(dataclasses.replace(config, model=dataclasses.replace(config.model, head_dim=config.model.head_width)))


def test_a_head_width_that_the_model_has_not_is_refused_as_it_was_spelled(save):
    config = save("one_kv_head")
    width = config.model.dim // config.model.heads
    other = dataclasses.replace(config.model, head_dim=width)
    with pytest.raises(ConfigError, match=rf"model\.head_dim = {width}: .* needs --config\.model\.head_dim=10$"):
        Pretrained(dataclasses.replace(config, model=other))


def test_tokens_are_those_of_the_model(save, tmp_path):
    config = save("grouped")
    own = tmp_path / "hf" / "tokenizer.json"
    assert Pretrained(config).config_with_tokenizer().data.tokenizer == str(own)

    def named(path):
        return dataclasses.replace(config, data=DataConfig(tokenizer=str(path)))

    same = named(tmp_path / "tokenizer.json")
    assert Pretrained(same).config_with_tokenizer() == same
    other = load_tokenizer(own)  # which has the same tokens
    other.normalizer = Lowercase()
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"must be empty or tokenise as .*hf/tokenizer\.json"):
        Pretrained(named(tmp_path / "other.json")).config_with_tokenizer()
    own.unlink()
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer = '': must name the tokenizer of"):
        Pretrained(config).config_with_tokenizer()
    assert Pretrained(same).config_with_tokenizer() == same


def test_a_tokenizer_that_does_not_fit_its_model_is_named(save, tmp_path, caplog):
    config = save("grouped")
    file, own = tmp_path / "hf" / "config.json", tmp_path / "hf" / "tokenizer.json"
    stated, end, other = json.loads(file.read_text()), end_of_text(load_tokenizer(own)), config.model.vocab_size - 1
    for ends, warned in ((other, True), ([other, end], False), (None, False)):
        file.write_text(json.dumps(stated | {"eos_token_id": ends}))
        caplog.clear()
        Pretrained(config).config_with_tokenizer()
        assert (f"ends texts by token {other}: here, and in an export, token {end} does" in caplog.text) == warned
    many = load_tokenizer(own)
    many.add_tokens([f"word {number}" for number in range(300)])
    many.save(str(own))
    with pytest.raises(ConfigError, match=r"config\.init_from = .*: its tokenizer\.json has \d+ entries: its vocab"):
        Pretrained(config).config_with_tokenizer()
