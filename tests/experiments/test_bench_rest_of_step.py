"""The rest of the step's benchmark calls the model as this wants to be called: every row is traced."""

import jax
import pytest


@pytest.mark.parametrize("part, rows", [("loss", 5), ("norm", 12), ("rotary", 1)])
def test_rows(script, part, rows):
    bench = script("experiments.bench.rest_of_step")
    names = set()

    def results():
        for row in bench.PARTS[part]():
            assert row.flops > 0 or row.bytes > 0
            names.add(row.name)
            yield row.function(*row.operands)

    traced = jax.eval_shape(lambda: list(results()))
    assert len(traced) == len(names) == rows
    if part == "loss":
        loss, (grad_hidden, grad_unembedding) = traced[-1]
        assert loss.shape == () and grad_hidden.shape[0] == bench.TOKENS and grad_unembedding.shape == (16_384, 2048)
