"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    size: float
    name: str  # on an axis
    symbol: str  # behind a number


TIME = (Unit(3600, "hours", "h"), Unit(60, "minutes", "min"), Unit(1, "seconds", "s"))
COUNT = (Unit(1e9, "billions", "G"), Unit(1e6, "millions", "M"), Unit(1e3, "thousands", "k"), Unit(1, "", ""))


def fitting(value: float, units: Sequence[Unit]) -> Unit:
    """Chooses the largest unit of which `value` is at least two; else the smallest, which is last."""
    return next((unit for unit in units if value >= 2 * unit.size), units[-1])


def label(quantity: str, unit: Unit) -> str:
    """Labels an axis, as in "tokens (millions)"."""
    return f"{quantity} ({unit.name})" if unit.name else quantity


def short(value: float, units: Sequence[Unit]) -> str:
    """Writes a number with its unit, as in "2.5 h" or "573 k"."""
    unit = fitting(value, units)
    number = f"{value / unit.size:,.0f}" if value >= 1000 * unit.size else f"{value / unit.size:.3g}"
    return f"{number} {unit.symbol}".strip()
