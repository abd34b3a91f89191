"""A mixture of experts in minutes on a CPU: 8 experts, 2 a token; dense, sparse, dense.

    python -m sparse_lm.train --config=configs/moe_tiny.py

Hardware: 2 CPU cores.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.steps = 240
    config.eval_every = 120
    config.checkpoint_every = 60
    config.model.experts = 8
    config.model.experts_per_token = 2
    config.model.expert_dim = 192
    config.sparsity.recipe = "experts24"
    config.sparsity.end_step = 120
    return config
