"""The tiny model, 2:4 activations, dense weights (2503.16672).

    python -m sparse_lm.train --config=configs/act24.py

Hardware: 2 CPU cores. Expected: under 4 minutes.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "act24"
    return config
