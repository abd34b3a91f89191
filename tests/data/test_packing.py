import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np

from sparse_lm.data.packing import Stream, count_windows, cut
from tests.data.examples import targets_of

TOKENS = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(TOKENS, min_size=1, max_size=6), st.integers(1, 30), st.data())
def test_windows_spell_the_files_exactly_and_go_round(tmp_path_factory, files, seq_len, data):
    folder = tmp_path_factory.mktemp("tokens")
    paths = [folder / str(number) for number in range(len(files))]
    for path, tokens in zip(paths, files, strict=True):
        np.array(tokens, np.uint16).tofile(path)
    stream = Stream(list(zip(paths, map(len, files), strict=True)))
    expected = [token for tokens in files for token in tokens]
    assert len(stream) == len(expected)
    count = count_windows(len(stream), seq_len)
    assert count == -(-len(expected) // seq_len)
    middle = data.draw(st.integers(0, count))  # written to two shards
    windows = [
        window
        for first, last in ((0, middle), (middle, count))
        for block in cut(
            [span.read(np.dtype(np.uint16)) for span in stream.window_spans(first, last, seq_len)], seq_len
        )
        for window in block
    ]
    assert len(windows) == count
    assert windows[0][0] == expected[-1]
    targets = targets_of(np.array(windows))
    np.testing.assert_array_equal(targets, [expected[i % len(expected)] for i in range(count * seq_len)])


@hypothesis.given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9), st.integers(1, 12))
def test_where_pieces_end_does_not_matter(pieces, seq_len):
    tokens = [token for piece in pieces for token in piece]
    blocks = cut([np.array(piece, np.uint32) for piece in pieces], seq_len)
    windows = np.concatenate([np.empty((0, seq_len + 1), np.uint32), *blocks])
    starts = range(0, len(tokens) - seq_len, seq_len)
    expected = [tokens[start : start + seq_len + 1] for start in starts]
    np.testing.assert_array_equal(windows, np.array(expected).reshape(-1, seq_len + 1))


def test_spans_name_no_token_of_another_file():
    spans = Stream([(Path("a"), 5), (Path("b"), 3)]).window_spans(0, 3, 3)
    assert [(span.path.name, span.start, span.stop) for span in spans] == [
        ("b", 2, 3),
        ("a", 0, 5),
        ("b", 0, 3),
        ("a", 0, 1),
    ]


def test_cutting_reaches_a_hundred_million_tokens_a_second():
    rng = np.random.default_rng(0)
    pieces = [rng.integers(1, 30_000, 2**20, dtype=np.uint16) for _ in range(10)]

    def seconds() -> float:
        start = time.perf_counter()
        for windows in cut(pieces, 1024):
            np.ascontiguousarray(windows)
        return time.perf_counter() - start

    assert sum(map(len, pieces)) / min(seconds() for _ in range(3)) > 100e6
