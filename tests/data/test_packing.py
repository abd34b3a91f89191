from pathlib import Path

from sparse_lm.data.packing import Stream


def test_spans_name_no_token_of_another_file():
    spans = Stream([(Path("a"), 5), (Path("b"), 3)]).window_spans(0, 3, 3)
    assert [(span.path.name, span.start, span.stop) for span in spans] == [
        ("b", 2, 3),
        ("a", 0, 5),
        ("b", 0, 3),
        ("a", 0, 1),
    ]
