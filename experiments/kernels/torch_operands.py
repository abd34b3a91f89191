"""Draws operands in PyTorch, for the programs that measure cuSPARSELt, each of which has required flags."""

from __future__ import annotations

import torch


def random_24(m: int, k: int, device: str = "cuda") -> torch.Tensor:
    """Draws [M, K] with two entries of each four at random positions."""
    kept = torch.rand(m, k // 4, 4, device=device).argsort(dim=-1) < 2
    return torch.randn(m, k, device=device, dtype=torch.bfloat16) * kept.reshape(m, k)
