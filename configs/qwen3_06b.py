"""The shapes of Qwen3-0.6B: 0.60 B parameters with SwiGLU, tied embeddings, and queries and keys normed (2505.09388).

    python -m sparse_lm.train --config=configs/qwen3_06b.py --config.data.path=data/c4

Batch, rate and phases are those of configs/llama1b.py.
Hardware: one H100 or H200. Result: not measured yet.
"""

from configs import llama1b


def get_config():
    config = llama1b.get_config()
    config.model.dim = 1024
    config.model.layers = 28
    config.model.kv_heads = 8
    config.model.head_dim = 128
    config.model.qk_norm = True
    config.model.ffn_dim = 3072
    config.model.vocab_size = 151_936
    config.model.activation = "swiglu"
    config.model.rope_theta = 1_000_000.0
    config.model.norm_epsilon = 1e-6
    config.model.tie_embeddings = True
    config.sparsity.recipe = "dense_slices"
    return config
