import time
from pathlib import Path

import numpy as np

from sparse_lm.data.packing import Stream, cut


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
