"""Files of any bytes: read as what was written, or refused by the error that is documented."""

import gzip
import json
import random

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from sparse_lm.data.corpus import TextFiles
from sparse_lm.data.errors import DataError
from sparse_lm.data.readers import zstd
from sparse_lm.interop.hf_config import UnsupportedModelError, from_hf_config
from sparse_lm.interop.shards import SINGLE, ShardedTensors
from sparse_lm.training.checkpoints.manifest import Manifest, ManifestError, describe
from tests.fuzz.cases import cases

seeds = st.integers(0, 2**32 - 1)


def damaged(content: bytes, seed: int) -> bytes:
    """A few bytes changed, cut out, doubled or added, or the end cut off."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice([0, 1, 1, 2, 8, 64]))
        middle = rng.choice([b"", rng.randbytes(stop - start), content[start:stop] * 2, rng.randbytes(2)])
        rest = b"" if rng.random() < 0.2 else content[stop:]
        content = content[:start] + middle + rest
    return content


MANIFEST = describe(
    7,
    {("params", "layers", "up"): jnp.ones((2, 4, 4)), ("state", "step"): jnp.int32(7)},
    {"model.dim": 4, "sparsity.recipe": "dense"},
    {"eval_loss": 3.5},
)
MANIFEST_TEXT = json.dumps(MANIFEST.to_json()).encode()


@cases(600)
@given(seed=seeds)
def test_manifest(seed):
    text = damaged(MANIFEST_TEXT, seed)
    try:
        content = json.loads(text)
    except ValueError:  # what a checkpoint's reader calls damage, too
        return
    try:
        assert Manifest.from_json(content) == MANIFEST
    except ManifestError:
        assert content != json.loads(MANIFEST_TEXT)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


HF_CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "use_sliding_window": False, "head_dim": 8, "quantization_config": None,
    "rope_parameters": {"rope_type": "default"},
}  # fmt: skip
TYPES = {"dim": int, "layers": int, "heads": int, "kv_heads": int, "ffn_dim": int, "vocab_size": int,
         "head_dim": int, "qk_norm": bool, "activation": str, "rope_theta": float, "norm_epsilon": float,
         "tie_embeddings": bool}  # fmt: skip


@cases(300)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(HF_CONFIG)), json_values | st.integers(-1, 64), min_size=1, max_size=2
    ),
    missing=st.sampled_from([None, *sorted(HF_CONFIG)]),
)
def test_config_of_a_transformers_model(changes, missing):
    config = {key: value for key, value in (HF_CONFIG | changes).items() if key != missing}
    try:
        keys = from_hf_config(config, gated=True)
    except UnsupportedModelError:
        return
    assert {key: type(value) for key, value in keys.items()} == TYPES
    assert keys["dim"] == config["hidden_size"] and keys["heads"] == config["num_attention_heads"]


TENSORS = {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for name, shape in
           {"model.norm.weight": (8,), "lm_head.weight": (5, 8)}.items()}  # fmt: skip
SAFETENSORS = save(TENSORS)


@cases(200)
@given(seed=seeds)
def test_safetensors(seed, tmp_path_factory):
    """The format has no checksum: values may differ, but names and shapes are those of the header."""
    directory = tmp_path_factory.getbasetemp()
    (directory / SINGLE).write_bytes(damaged(SAFETENSORS, seed))
    try:
        tensors = ShardedTensors(directory)
        read = {name: tensors.read(name) for name in tensors.names}
    except ValueError:
        return
    assert all(read[name].shape == tensors.shape(name) for name in read)


TEXTS = ["", "def f():\n    return 0\n", "\u00e9\u4e2d\U0001f600", '"\\ud800"', "x" * 300, "\r\n\x00\x0b"]


def packed(text: bytes, compression: str) -> bytes:
    return {"": lambda x: x, ".gz": gzip.compress, ".zst": zstd.compress}[compression](text)


@cases(300)
@given(seed=seeds, compression=st.sampled_from(["", ".gz", ".zst"]), kind=st.sampled_from([".txt", ".jsonl"]))
def test_corpus(seed, compression, kind, tmp_path_factory):
    """Texts are valid Unicode, whatever the bytes; a damaged archive or line is refused."""
    path = tmp_path_factory.getbasetemp() / f"text{kind}{compression}"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    plain = "\n".join(lines if kind == ".jsonl" else TEXTS).encode()
    rng = random.Random(seed)
    content = (
        damaged(packed(plain, compression), seed) if rng.random() < 0.5 else packed(damaged(plain, seed), compression)
    )
    path.write_bytes(content)
    try:
        documents = list(TextFiles((path,)))
    except DataError as error:
        assert str(path) in str(error)
        return
    assert all(documents)
    assert all(document.encode("utf-8") for document in documents)
    if kind == ".txt" and not compression:
        assert "".join(documents) == content.decode("utf-8", "replace")
