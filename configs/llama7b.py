"""The 7B model of 2602.06183: D 4096, 32 layers, vocabulary 128,256, 10k sparse steps and 38k dense ones.

    python -m sparse_lm.train --config=configs/llama7b.py --config.data.path=data/c4

Parameters and moments in float32 take over 80 GB: it needs a larger device than an H100, or sharding over
eight (`--config.mesh.fsdp=8 --config.batch_size=16`). The first layer is dense, as in llama1b; the steps below have all
of them sparse, and the last row takes the largest two for its weight gradients. Times are of H200s, and the files are
in experiments/results:

| flags | dense ms | sparse ms | GiB on each | file |
|---|---|---|---|---|
| one GPU, four layers | 349 | 220 | 27, 23 | step_llama7b_4_layers_8x4096_drawn_h200.json |
| `--config.mesh.fsdp=2 --config.batch_size=8` | 1391 | 851 | 95, 84 | step_llama7b_fsdp_2_h200.json |
| `--config.mesh.fsdp=4 --config.batch_size=16` | 1304 | 829 | 71, 60 | step_llama7b_fsdp_4_h200.json |

The first has `--config.model.layers=4 --config.model.vocab_size=32000 --config.batch_size=8`. Result of the run: not
measured yet. Its rate is dense's best of three over the first 6 M tokens (rates_llama7b_h200.json);
longer runs may want a lower one.
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

    config.optimizer.learning_rate = 1e-4
    config.optimizer.decay_steps = 9600
    config.optimizer.weight_decay = 0.1

    config.sparsity.end_step = 11_000
    return config
