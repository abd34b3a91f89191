"""A mixture of about 1 B active parameters: D 2048, 12 layers of 16 experts of 4096 neurons, 4 a token.

    python -m sparse_lm.train --config=configs/moe_1b.py --config.data.path=data/c4

A token meets 1.0 B of the layers' 3.4 B parameters; embedding and unembedding have 0.26 B each. All but the FFNs and
the number of layers is as in llama1b.py, with whose 25 layers weights and moments alone would fill a GPU. No layer
stays dense in the phase.
Hardware: one H200; 81 GiB. A step takes 517 ms with dense experts and 455 ms with experts24
(step_moe_1b_gates_h200.json).
Result of the run: not measured yet.
"""

from configs import llama1b


def get_config():
    config = llama1b.get_config()
    config.model.layers = 12
    config.model.experts = 16
    config.model.experts_per_token = 4
    config.model.expert_dim = 4096
    config.sparsity.recipe = "experts24"
    config.sparsity.dense_layers = 0
    return config
