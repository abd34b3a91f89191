"""The tiny model, all six products sparse: 2:4 weights, V:2:M activations (2602.06183).

    python -m sparse_lm.train --config=configs/venom.py

Hardware: 2 CPU cores. Expected: under 4 minutes.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "venom"
    return config
