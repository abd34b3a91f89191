"""The tiny model, 2:4 weights by soft threshold and stochastic (MVUE) 2:4 weight gradients (2409.09099).

    python -m sparse_lm.train --config=configs/sste.py

Hardware: 2 CPU cores. Expected: 3.0 minutes; held-out loss 4.19 nats per token
(experiments/results/tiny_cpu.json).
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "sste"
    return config
