"""2:4 matrices in the "sparse-24-bitmask" layout of compressed-tensors, which its versions up to 0.14 read.

A matrix `NAME.weight` [R, C], two of each four neighbours of a row kept, becomes

    NAME.compressed [R, C / 2]          the kept values, in order
    NAME.bitmask    uint8 [R, C / 8]    which they are: bit j of byte i is column 8 i + j; rounded up
    NAME.shape      int64 [2, 1]        R, C

Rows are those of torch.nn.Linear, so that groups run along its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def compress(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Makes the three tensors that stand for `name`.weight, which is [R, C], C a multiple of 4.

    Raises:
      ValueError: the matrix is not 2:4.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, 4)
    if (np.count_nonzero(groups, axis=-1) > 2).any():
        raise ValueError(f"{name} has more than two non-zeros in a group of four")
    # Two a group exactly: zeros fill up a group with fewer non-zeros.
    kept = np.argsort(groups == 0, axis=-1, kind="stable")[..., :2]
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, kept, True, axis=-1)
    return {
        f"{name}.compressed": groups[mask].reshape(rows, columns // 2),
        f"{name}.bitmask": np.packbits(mask.reshape(rows, columns), axis=-1, bitorder="little"),
        f"{name}.shape": np.array([[rows], [columns]], np.int64),
    }


def quantization_config(modules: Sequence[str]) -> dict[str, Any]:
    """Describes a model some of whose linear layers are compressed, for its config.json."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": list(modules),
            "ignore": [],
        },
    }
