"""The data builder on any documents: no token is lost, repeated or moved, and no document is on both sides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm.data.packing import Stream, count_windows, cut
from tests.fuzz.cases import cases

seeds = st.integers(0, 2**32 - 1)


def all_windows(stream, seq_len):
    """Window w of a stream that goes round: tokens w * seq_len - 1 to (w + 1) * seq_len - 1."""
    starts = np.arange(count_windows(len(stream), seq_len)) * seq_len
    return stream[(starts[:, None] + np.arange(-1, seq_len)) % len(stream)]


@cases(400)
@given(seed=seeds, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seq_len=st.integers(1, 12))
def test_windows_of_a_stream_in_files(seed, lengths, seq_len):
    stream = np.random.default_rng(seed).integers(0, 2**16, sum(lengths)).astype(np.uint16)
    files = dict(enumerate(np.split(stream, np.cumsum(lengths)[:-1])))
    count = count_windows(len(stream), seq_len)
    middle = seed % (count + 1)  # written to two shards
    joined = Stream(list(zip(files, lengths, strict=True)))
    windows = [
        batch.copy()
        for spans in (joined.window_spans(0, middle, seq_len), joined.window_spans(middle, count, seq_len))
        for batch in cut((files[span.path][span.start : span.stop] for span in spans), seq_len)
    ]
    np.testing.assert_array_equal(np.concatenate(windows), all_windows(stream, seq_len))
