"""The shape of AFM-4.5B (Arcee, 2025): D 2560, F 18,432, 36 layers, 20 heads of 128, 4 key-value heads, squared ReLU.

    python -m sparse_lm.train --config=configs/afm4b.py --config.data.path=data/c4-afm --config.mesh.fsdp=4

Prepare the data with AFM's own tokenizer: Llama 3's has more entries than this vocabulary.

Its FFN is 73% of the FLOPs at 4096 tokens, so that sparsity has more to gain than at llama1b's shape. Measured are 4 of
its layers with a vocabulary of 16,384 and 32 x 1024 tokens a step, on one H200. A dense step takes 163 ms, a sparse one
74 ms (experiments/results/step_afm_4_layers_h200.json). 100 M tokens at a rate of 2.5e-4 reach dense's held-out loss in
about 0.66 of its time (experiments/results/time_afm_4_layers_h200.json); with `sparsity.m` = 32, an eighth of the
neurons for a token, on 90% of the steps, in 0.59 (three seeds, docs/results.md). A step of all 36 layers takes 849 ms
densely and 439 ms sparsely on four H200s, with 4 x 4096 tokens on each (step_afm4b_fsdp_4_h200.json there). All
layers are sparse in these numbers, where the first one stays dense here. A run of this length is not measured yet.
Parameters and moments take 55 GB; gradients and activations come on top.
"""

from configs import llama1b


def get_config():
    config = llama1b.get_config()
    config.batch_size = 8

    config.model.dim = 2560
    config.model.layers = 36
    config.model.heads = 20
    config.model.kv_heads = 4
    config.model.ffn_dim = 18_432
    config.model.vocab_size = 128_004

    config.optimizer.learning_rate = 1.6e-4  # of llama1b's by width; not swept
    config.optimizer.weight_decay = 0.1

    config.sparsity.end_step = 48_000  # the decay begins; there is half a token a parameter
    return config
