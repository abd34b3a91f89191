"""Exported models computed by transformers on PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from sparse_lm.config import Config
from sparse_lm.interop.hf_directory import HfModel
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.model import decode, llama
from tests.interop.models import MODELS, random_params, reader, save_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -r requirements-test.txt")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")


@pytest.fixture
def write(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")

    def write(model, params, shard_bytes=10**9):
        (tmp_path / "hf").mkdir()
        HfModel(model, 64, reader(params), tmp_path / "tokenizer.json", "# card").write(tmp_path / "hf", shard_bytes)
        return tmp_path / "hf"

    return write


@pytest.mark.parametrize("name", ["grouped", "one_kv_head", "wide_heads", "swiglu_tied", "qwen3", "qwen3_relu2"])
def test_transformers_computes_the_same_model(name, write, tmp_path):
    """No key missing or unexpected, logits within 1e-4, the same greedy tokens; what it saves is read back."""
    model = MODELS[name]
    params = random_params(model)
    directory = write(model, params, shard_bytes=20_000)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    expected = "Qwen3" if model.qk_norm else "Arcee" if model.activation == "squared_relu" else "Llama"
    assert type(theirs).__name__ == f"{expected}ForCausalLM"
    assert theirs.dtype == torch.float32
    assert not any(loading.values()), loading

    tokens = np.random.default_rng(1).integers(model.vocab_size, size=(2, 48))
    with torch.no_grad():
        their_logits = theirs(torch.tensor(tokens)).logits.numpy()
    ours = llama.merge(llama.graphdef(model), params)
    our_logits = ours.logits(ours(jnp.asarray(tokens, jnp.int32))[0])
    assert np.abs(our_logits).max() > 1
    np.testing.assert_allclose(their_logits, our_logits, rtol=0, atol=1e-4)

    prompt = tokens[0, :9].tolist()
    greedy = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=None)
    device_params = jax.device_put(params)
    [made] = decode.generate(llama.graphdef(model), device_params, [prompt], max_new_tokens=16, temperature=0.0)
    assert greedy[0, 9:].tolist() == made

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    started_from = Pretrained(Config(init_from=str(tmp_path / "theirs"), model=model)).params()
    jax.tree.map(np.testing.assert_array_equal, started_from, params)


def test_tokenizer_is_the_one_of_training(write, tmp_path):
    directory = write(MODELS["grouped"], random_params(MODELS["grouped"]))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = save_tokenizer(tmp_path / "again.json")
    text = "def main():  # ünïcode\n\treturn 0"
    assert theirs(text).input_ids == ours.encode(text, add_special_tokens=False).ids
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == ours.token_to_id("<|endoftext|>")


def test_no_token_is_added_even_if_the_tokenizer_would(tmp_path, write):
    """Llama 3's tokenizer.json starts texts with a token that training did not."""
    model = MODELS["grouped"]
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(tmp_path / "bos.json"))
    (tmp_path / "bos").mkdir()
    HfModel(model, 64, reader(random_params(model)), tmp_path / "bos.json", "").write(tmp_path / "bos", 10**9)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "bos")
    assert theirs("def main").input_ids == tokenizer.encode("def main", add_special_tokens=False).ids
