"""Every sequence once, in shapes that are few."""

import numpy as np
import pytest

from sparse_lm.interop.harness.text_model import TextModel


@pytest.mark.parametrize("longest", [20, 64, 1000])
@pytest.mark.parametrize("batch_tokens", [1, 300, 10**6])
def test_batches_hold_every_sequence_once_in_few_shapes(longest, batch_tokens):
    lengths = np.random.default_rng(longest).integers(1, longest + 1, 500).tolist()
    model = TextModel(None, None, None, 0, longest, batch_tokens)
    made = list(model.batches(lengths))
    assert sorted(index for batch in made for index in batch.indices) == list(range(500))
    for batch in made:
        assert max(lengths[index] for index in batch.indices) <= batch.length <= longest
        assert 1 <= len(batch.indices) <= batch.rows
        assert batch.rows == 1 or batch.rows * batch.length <= batch_tokens
    shapes = [batch[1:] for batch in made]
    assert len(set(shapes)) == {20: 1, 64: 2, 1000: 6}[longest]
    assert [length for _, length in shapes] == sorted((length for _, length in shapes), reverse=True)
