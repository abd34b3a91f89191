"""The tiny model, 2:4 weights by soft threshold and unbiased 2:4 gradients (2409.09099).

    python -m sparse_lm.train --config=configs/sste.py

Hardware: 2 CPU cores. Time and result: not measured yet.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "sste"
    return config
