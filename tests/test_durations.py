import pytest

from sparse_lm.durations import duration


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (8.6, "9 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599, "59 min 59 s"),
        (3599.5, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90_061, "1 d 01 h"),
    ],
)
def test_two_largest_units(seconds, text):
    assert duration(seconds) == text
