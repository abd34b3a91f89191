"""The tiny model, transposable 2:4 weight masks, masked decay and stochastic (MVUE) 2:4 weight gradients (2404.01847).

    python -m sparse_lm.train --config=configs/fst.py

Hardware: 2 CPU cores. Expected: under 4 minutes.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.sparsity.recipe = "fst"
    return config
