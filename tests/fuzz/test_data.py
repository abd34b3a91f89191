"""The data builder on any documents: no token is lost, repeated or moved, and no document is on both sides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm.data.packing import Stream
from tests.fuzz.cases import cases

seeds = st.integers(0, 2**32 - 1)


@cases(400)
@given(seed=seeds, lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), seq_len=st.integers(1, 12))
def test_windows_of_a_stream_in_files(seed, lengths, seq_len, tmp_path_factory):
    """Window w of a stream that goes round is tokens w * seq_len - 1 to (w + 1) * seq_len - 1."""
    tokens = np.random.default_rng(seed).integers(0, 2**16, sum(lengths)).astype(np.uint16)
    paths = [tmp_path_factory.getbasetemp() / f"{number}.tokens" for number in range(len(lengths))]
    for path, part in zip(paths, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
        part.tofile(path)
    stream = Stream(paths, np.uint16)
    count = -(-len(stream) // seq_len)
    middle = seed % (count + 1)  # written to two shards
    shards = [(first, last) for first, last in ((0, middle), (middle, count)) if first < last]
    windows = np.concatenate([stream.windows(first, last, seq_len) for first, last in shards])
    starts = np.arange(-(-len(tokens) // seq_len)) * seq_len
    np.testing.assert_array_equal(windows, tokens[(starts[:, None] + np.arange(-1, seq_len)) % len(tokens)])
