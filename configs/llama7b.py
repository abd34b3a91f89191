"""The 7B model of 2602.06183: D 4096, 32 layers, 128,256 tokens, 10k sparse steps and 38k dense ones.

    python -m sparse_lm.train --config=configs/llama7b.py --config.data.path=data/c4

Parameters and moments in float32 take over 80 GB: it needs a larger device than an H100, or sharding over
eight (`--config.mesh.fsdp=8 --config.batch_size=16`).
Three layers are dense, as in llama1b; benchmarks have all of them sparse.
`--config.model.layers=4 --config.model.vocab_size=32000 --config.batch_size=8` is their one-GPU shape: on an
H200 a dense step takes 349 ms and a sparse one 220 ms
(experiments/results/step_llama7b_4_layers_8x4096_drawn_h200.json).
The whole model on four H200s (`--config.mesh.fsdp=4 --config.batch_size=16`): 1304 and 829 ms, 71 and 60 GiB on each
(experiments/results/step_llama7b_fsdp_4_h200.json); on two (`--config.mesh.fsdp=2 --config.batch_size=8`): 1391 and
851 ms, 95 and 84 GiB (experiments/results/step_llama7b_fsdp_2_h200.json). Time and result of the run: not measured yet.
"""

from configs import llama1b


def get_config():
    config = llama1b.get_config()
    config.steps = 48_000

    config.model.dim = 4096
    config.model.layers = 32
    config.model.heads = 32
    config.model.kv_heads = 32
    config.model.ffn_dim = 16_384

    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 2000
    config.optimizer.decay_steps = 9600
    config.optimizer.weight_decay = 0.1

    config.sparsity.start_step = 1000
    config.sparsity.end_step = 11_000
    return config
