"""The shapes of Qwen3-0.6B: 0.60 B parameters with SwiGLU, tied embeddings, and queries and keys normed (2505.09388).

    python -m sparse_lm.train --config=configs/qwen3_06b.py --config.data.path=data/c4

Batch, rate and phases are those of configs/llama1b.py.
Hardware: one H100 or H200. Result: not measured yet.
"""

from sparse_lm import config as config_lib


def get_config():
    config = config_lib.default()
    config.steps = 60_000
    config.batch_size = 8
    config.seq_len = 4096
    config.eval_every = 1000
    config.checkpoint_every = 1000

    config.model.dim = 1024
    config.model.layers = 28
    config.model.heads = 16
    config.model.kv_heads = 8
    config.model.head_dim = 128
    config.model.qk_norm = True
    config.model.ffn_dim = 3072
    config.model.vocab_size = 151_936
    config.model.activation = "swiglu"
    config.model.rope_theta = 1_000_000.0
    config.model.norm_epsilon = 1e-6
    config.model.tie_embeddings = True
    config.model.remat = "save_dots"
    config.model.unroll_layers = True
    config.model.loss_chunk = 2048

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_steps = 12_000
    config.optimizer.weight_decay = 0.033

    config.sparsity.recipe = "fst"
    config.sparsity.start_step = 1000
    config.sparsity.end_step = 16_000
    return config
