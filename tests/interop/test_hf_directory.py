"""Exported models computed by transformers on PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from sparse_lm.config import Config
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.model import decode, llama
from tests.interop.models import MIXTURES, MODELS, random_params, save_tokenizer, write_model

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -r requirements-test.txt")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-test.txt")


@pytest.mark.parametrize("name", ["one_kv_head", "swiglu_tied", "qwen3", *MIXTURES])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a shared expert without neurons
def test_transformers_computes_the_same_model(name, tmp_path):
    """No key missing or unexpected, logits within 1e-4, the same greedy tokens; what it saves is read back."""
    model = (MODELS | MIXTURES)[name]
    params = random_params(model)
    directory = write_model(tmp_path / "hf", model, params, shard_bytes=20_000)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert theirs.dtype == torch.float32
    assert (theirs.config.max_position_embeddings, theirs.generation_config.eos_token_id) == (64, 0)
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

    if model.experts:
        return
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    started_from = Pretrained(Config(init_from=str(tmp_path / "theirs"), model=model)).params()
    jax.tree.map(np.testing.assert_array_equal, started_from, params)


@pytest.mark.parametrize("adds_a_token", [False, True])
def test_tokenizer_is_the_one_of_training(adds_a_token, tmp_path):
    """Llama 3's tokenizer.json starts texts with a token that training did not."""
    tokenizer = save_tokenizer(tmp_path / "own.json")
    if adds_a_token:
        tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        tokenizer.save(str(tmp_path / "own.json"))
    model = MODELS["grouped"]
    directory = write_model(tmp_path / "hf", model, random_params(model), tmp_path / "own.json")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    text = "def main():  # ünïcode\n\treturn 0"
    assert theirs(text).input_ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.token_to_id("<|endoftext|>"), 64)
