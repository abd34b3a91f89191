"""The shapes of Llama-3.2-1B: 1.24 B parameters with SwiGLU and tied embeddings, positions not scaled.

    python -m sparse_lm.train --config=configs/llama32_1b.py --config.data.path=data/c4

Batch, rate and phases are those of configs/llama1b.py.
Hardware: one H100 or H200. A step takes 497 ms densely on an H200, 320 ms with dense_slices, 436 ms with fst
(step_llama32_1b_h200.json). With 4 of its layers, a vocabulary of 16,384 and 80% of the steps sparse, dense's held-out
loss of 100 M tokens is reached in 0.75 of the time (time_llama32_1b_4_layers_h100.json, two seeds). All layers are
sparse in these numbers, where the first one stays dense here. Result of this run: not measured yet.
"""

from configs import llama1b


def get_config():
    config = llama1b.get_config()
    config.model.layers = 16
    config.model.heads = 32
    config.model.kv_heads = 8
    config.model.activation = "swiglu"
    config.model.tie_embeddings = True
    config.sparsity.recipe = "dense_slices"
    return config
