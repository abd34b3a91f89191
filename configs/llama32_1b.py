"""The shapes of Llama-3.2-1B: 1.24 B parameters with SwiGLU and tied embeddings, positions not scaled.

    python -m sparse_lm.train --config=configs/llama32_1b.py --config.data.path=data/c4

Batch, rate and phases are those of configs/llama1b.py.
Hardware: one H100 or H200. A step takes 529 ms densely on an H200, 472 ms with fst, 337 ms with dense_slices
(step_llama32_1b_h200.json). Result of the run: not measured yet.
"""

from sparse_lm import config as config_lib


def get_config():
    config = config_lib.default()
    config.steps = 60_000
    config.batch_size = 8
    config.seq_len = 4096
    config.eval_every = 1000
    config.checkpoint_every = 1000

    config.model.dim = 2048
    config.model.layers = 16
    config.model.heads = 32
    config.model.kv_heads = 8
    config.model.ffn_dim = 8192
    config.model.vocab_size = 128_256
    config.model.activation = "swiglu"
    config.model.rope_theta = 500_000.0
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
