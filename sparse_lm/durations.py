"""Writes seconds as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Returns the two largest units, such as 1 d 02 h, 2 h 05 min, 3 min 20 s or 9 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
