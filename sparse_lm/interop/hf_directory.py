"""A model as a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from sparse_lm.config import ModelConfig
from sparse_lm.data.tokenizer import end_of_text, save_tokenizer
from sparse_lm.files import write_json
from sparse_lm.interop.hf_config import to_hf_config
from sparse_lm.interop.hf_weights import hf_tensors
from sparse_lm.interop.shards import write_shards
from sparse_lm.model.llama import Params


def write_hf_directory(
    directory: Path,
    model: ModelConfig,
    params: Params,
    *,
    seq_len: int,
    tokenizer: Tokenizer,
    card: str,
    shard_bytes: int,
) -> None:
    """Writes safetensors, tokenizer files, model card and config.json to an existing, empty directory.

    `params` are float32 arrays of NumPy, `seq_len` the tokens of a training sequence, `shard_bytes` the most bytes of
    weights in a file, unless one tensor is larger.
    """
    write_shards(directory, hf_tensors(params, model), shard_bytes)
    end = end_of_text(tokenizer)
    hf_config = to_hf_config(model, seq_len=seq_len, end_of_text=end)
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        tokenizer.post_processor = None  # training added no token to a text either
    save_tokenizer(tokenizer, directory / "tokenizer.json")
    name = tokenizer.id_to_token(end)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name,
        "eos_token": name,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    (directory / "README.md").write_text(card, encoding="utf-8")
    write_json(directory / "config.json", hf_config)
