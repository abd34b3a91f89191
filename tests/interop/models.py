"""Small models in all the ways that exported ones differ, with no weight at a special value, and runs of them."""

import jax
import numpy as np

from sparse_lm.config import ModelConfig
from sparse_lm.data.tokenizer import load_tokenizer, train_tokenizer
from sparse_lm.interop.hf_directory import write_hf_directory
from sparse_lm.interop.hf_weights import empty_params
from sparse_lm.model import llama
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.workdir import save_config

SMALL = dict(dim=16, layers=3, heads=4, ffn_dim=24, dtype="float32")
MODELS = {
    "grouped": ModelConfig(**SMALL, kv_heads=2, vocab_size=283),
    "tied": ModelConfig(**SMALL, kv_heads=4, vocab_size=281, tie_embeddings=True, rope_theta=500_000.0),
    "one_kv_head": ModelConfig(**SMALL, kv_heads=1, head_dim=10, vocab_size=293, rope_theta=100.0, norm_epsilon=1e-3),
    "swiglu": ModelConfig(**SMALL, kv_heads=2, vocab_size=307, activation="swiglu", rope_theta=1e6),
    "geglu": ModelConfig(**SMALL, kv_heads=2, vocab_size=307, activation="geglu"),
    "gated_relu2": ModelConfig(**SMALL, kv_heads=2, vocab_size=307, activation="gated_relu2"),
    "qwen3": ModelConfig(
        **SMALL, kv_heads=2, head_dim=6, qk_norm=True, vocab_size=307, activation="swiglu", tie_embeddings=True
    ),
    "swiglu_tied": ModelConfig(**SMALL, kv_heads=1, vocab_size=311, activation="swiglu", tie_embeddings=True),
}
_SIGMOID = dict(experts=4, experts_per_token=2, expert_dim=8, router_scores="sigmoid", kv_heads=2, vocab_size=307)
MIXTURES = {
    "mixture": ModelConfig(**SMALL, **_SIGMOID, activation="swiglu", shared_expert_dim=16, qk_norm=True),
    "mixture_relu2": ModelConfig(**SMALL, **_SIGMOID, activation="gated_relu2", tie_embeddings=True),
    "softmax": ModelConfig(**SMALL, **_SIGMOID | {"router_scores": "softmax"}, activation="swiglu", head_dim=6),
    "softmax_shared": ModelConfig(
        **SMALL, **_SIGMOID | {"router_scores": "softmax"}, activation="geglu", shared_expert_dim=8, tie_embeddings=True
    ),
}
"""Models that are exported, and that no run starts from."""


def random_params(model, seed=0):
    """The shapes of `llama.init`, every entry random and none of the norms one."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape, scale=0.3).astype(np.float32), empty_params(model))
    return jax.tree.map_with_path(lambda path, p: p if llama.is_matrix(path) else p + 1, params)


def write_model(directory, model, params, tokenizer_file=None, shard_bytes=10**9):
    """Exports parameters in memory to a directory, which is made, with a tokenizer beside it if none is given."""
    directory.mkdir()
    if tokenizer_file is None:
        save_tokenizer(tokenizer_file := directory.parent / "tokenizer.json")
    options = dict(tokenizer=load_tokenizer(tokenizer_file), card="# card", shard_bytes=shard_bytes)
    write_hf_directory(directory, model, params, seq_len=64, **options)
    return directory


def save_tokenizer(path):
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 8, vocab_size=280)
    tokenizer.save(str(path))
    return tokenizer


def save_run(workdir, config, eval_losses, recipe_state=None):
    """A run made by hand: its configuration, a tokenizer, and a checkpoint of random weights for each step."""
    save_tokenizer(workdir / "tokenizer.json")
    save_config(workdir, config)
    with Checkpoints(workdir, keep=len(eval_losses)) as checkpoints:
        for seed, (step, eval_loss) in enumerate(eval_losses.items()):
            state = {"params": random_params(config.model, seed), "recipe_state": recipe_state or {}}
            checkpoints.save(step, state, eval_loss)
    return workdir
