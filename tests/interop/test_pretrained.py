"""Models of transformers as starting points."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparse_lm.config import Config, ConfigError, DataConfig
from sparse_lm.data.tokenizer import train_tokenizer
from sparse_lm.interop.hf_directory import HfModel
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.model import llama
from tests.interop.models import MODEL_IDS, MODELS, random_params, reader, save_tokenizer


@pytest.fixture
def save(tmp_path):
    """Writes a model of `MODELS` and gives the configuration of a run that starts from it."""

    def save(name, params=None, shard_bytes=10**9):
        save_tokenizer(tmp_path / "tokenizer.json")
        (tmp_path / "hf").mkdir()
        params = random_params(MODELS[name]) if params is None else params
        model = HfModel(MODELS[name], 64, reader(params), tmp_path / "tokenizer.json", "")
        model.write(tmp_path / "hf", shard_bytes)
        return Config(init_from=str(tmp_path / "hf"), model=MODELS[name])

    return save


@pytest.mark.parametrize("name, shard_bytes", [("grouped", 10**9), *((name, 10_000) for name in MODEL_IDS)])
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


def test_frequencies_that_older_files_hold_are_ignored(save, tmp_path):
    config = save("grouped")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(tmp_path / "hf", lambda tensors: tensors.update({name: np.ones(2, np.float32)}))
    Pretrained(config)


@pytest.mark.parametrize("name", ["tied", "swiglu_tied"])
def test_tied_embeddings_may_be_there_twice(name, save, tmp_path):
    params = random_params(MODELS[name])
    config = save(name, params)
    change_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    jax.tree.map(np.testing.assert_array_equal, Pretrained(config).params(), params)
    change_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ConfigError, match=r"its lm_head\.weight is not model\.embed_tokens\.weight, but its config"):
        Pretrained(config)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight$"),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": np.ones(16, np.float32)}),
            r"has unexpected model\.layers\.1\.self_attn\.q_proj\.bias$",
        ),
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
    hf_config.write_text(json.dumps(json.loads(hf_config.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act = 'gelu'"):
        Pretrained(config)
    hf_config.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        Pretrained(config)


@pytest.mark.parametrize(
    "file, content, reason",
    [
        ("config.json", "[1]", "its config.json must be a group of keys, not list"),
        ("model.safetensors.index.json", "", "model.safetensors.index.json is not JSON: Expecting value: .*"),
        ("model.safetensors.index.json", "[1]", "model.safetensors.index.json must have a weight_map .*"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json must have a weight_map .*"),
        (
            "model.safetensors.index.json",
            '{"weight_map": ["a"]}',
            "model.safetensors.index.json must have a weight_map .*",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 1}}',
            "model.safetensors.index.json must have a weight_map .*",
        ),
    ],
)
def test_json_of_another_shape_is_refused_by_file(file, content, reason, save, tmp_path):
    config = save("grouped", shard_bytes=10_000)
    (tmp_path / "hf" / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"^config\.init_from = '{config.init_from}': {reason}$"):
        Pretrained(config)


def test_a_config_of_another_model_is_told_what_to_change(save):
    config = save("grouped")
    other = dataclasses.replace(config.model, dim=32, rope_theta=5.0)
    message = (
        r"config\.model\.dim = 32: the model in .* needs --config\.model\.dim=16 --config\.model\.rope_theta=10000\.0$"
    )
    with pytest.raises(ConfigError, match=message):
        Pretrained(dataclasses.replace(config, model=other))


def test_tokens_are_those_of_the_model(save, tmp_path):
    config = save("grouped")
    own = tmp_path / "hf" / "tokenizer.json"
    assert Pretrained(config).config_with_tokenizer().data.tokenizer == str(own)

    def named(path):
        return dataclasses.replace(config, data=DataConfig(tokenizer=str(path)))

    same = named(tmp_path / "tokenizer.json")
    assert Pretrained(same).config_with_tokenizer() == same
    train_tokenizer(["other words"] * 9, vocab_size=280).save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"must be empty or have the tokens of .*hf/tokenizer\.json"):
        Pretrained(named(tmp_path / "other.json")).config_with_tokenizer()
    own.unlink()
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer = '': must name the tokenizer of"):
        Pretrained(config).config_with_tokenizer()
    assert Pretrained(same).config_with_tokenizer() == same


@pytest.mark.parametrize("name", ["grouped", "swiglu_tied", "qwen3"])
def test_what_transformers_saves_can_be_started_from(name, tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -r requirements-test.txt")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install -r requirements-test.txt"
    )
    model = MODELS[name]
    kind = "Qwen3" if model.qk_norm else "Llama" if model.activation == "swiglu" else "Arcee"
    hf_config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_width,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(hf_config)
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    params = Pretrained(Config(init_from=str(tmp_path), model=model)).params()
    ours = llama.merge(llama.graphdef(model), params)
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=(2, 32))
    with torch.no_grad():
        their_logits = theirs(torch.tensor(tokens)).logits.numpy()
    our_logits = ours.logits(ours(jnp.asarray(tokens, jnp.int32))[0])
    assert np.abs(our_logits).max() > 1
    np.testing.assert_allclose(our_logits, their_logits, rtol=0, atol=1e-4)
