import pytest


def test_two_of_each_four_are_kept():
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -r requirements-test.txt")
    from experiments.kernels.torch_operands import random_24

    torch.manual_seed(0)
    nonzero = (random_24(64, 32, device="cpu") != 0).reshape(64, 8, 4)
    assert (nonzero.sum(-1) == 2).all()
    assert nonzero.any(0).all()  # every position is kept somewhere
