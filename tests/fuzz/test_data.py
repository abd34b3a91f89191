"""Windows of any tokens: no token is lost, repeated or moved."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm.data.packing import window
from tests.fuzz.cases import cases


@cases(400)
@given(length=st.integers(1, 40), seq_len=st.integers(1, 60))
def test_windows_of_a_stream(length, seq_len):
    """Window w of a stream that goes round is tokens w * seq_len - 1 to (w + 1) * seq_len - 1."""
    tokens = np.random.default_rng(length).integers(0, 2**16, length).astype(np.uint16)
    for number in range(-(-length // seq_len)):
        found = window(tokens, number, seq_len)
        expected = [tokens[(number * seq_len + step) % length] for step in range(-1, seq_len)]
        assert found.dtype == np.uint16 and found.tolist() == expected
