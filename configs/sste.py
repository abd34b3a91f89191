"""The tiny model, 2:4 weights by soft threshold and stochastic (MVUE) 2:4 weight gradients (2409.09099).

    python -m sparse_lm.train --config=configs/sste.py

Hardware: 2 CPU cores. Expected: under 4 minutes.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "sste"
    return config
