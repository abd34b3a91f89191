import time

import hypothesis
import hypothesis.strategies as st
import numpy as np

from sparse_lm.data.packing import pack
from tests.data.examples import targets_of

END = 0


def packed(documents, seq_len, **kwargs) -> np.ndarray:
    blocks = pack(documents, seq_len=seq_len, end_of_text=END, dtype=np.dtype(np.uint16), **kwargs)
    return np.concatenate([np.empty((0, seq_len + 1), np.uint16), *blocks])


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.lists(st.integers(1, 2**16 - 1), min_size=1, max_size=20), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 80),
)
def test_windows_spell_the_documents_exactly(documents, seq_len, block):
    windows = packed(map(np.array, documents), seq_len, block=block)
    stream = [token for document in documents for token in [*document, END]]
    assert windows[0, 0] == END
    assert len(windows) == -(-len(stream) // seq_len)
    targets = targets_of(windows)
    expected = [stream[i % len(stream)] for i in range(len(targets))]  # the last window goes round
    np.testing.assert_array_equal(targets, expected)


def test_no_documents_give_no_windows():
    assert len(packed([], 8)) == 0


def test_packing_reaches_ten_million_tokens_a_second():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2000, 10_000)
    documents = [rng.integers(1, 30_000, length, dtype=np.uint16) for length in lengths]

    def seconds() -> float:
        start = time.perf_counter()
        for windows in pack(documents, seq_len=1024, end_of_text=END, dtype=np.dtype(np.uint16)):
            np.ascontiguousarray(windows)
        return time.perf_counter() - start

    assert lengths.sum() / min(seconds() for _ in range(3)) > 10e6
