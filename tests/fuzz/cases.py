"""How many cases: the same ones every time, or with FUZZ=20 in the environment others, twenty times as many."""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ", "0"))


def cases(count: int) -> settings:
    """Settings of a test that draws `count` cases."""
    return settings(
        max_examples=count * max(1, TIMES),
        derandomize=not TIMES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
