"""What all figures have in common."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

STYLE = Path(__file__).parent / "plots.mplstyle"
GREY = "#808080"


def shade_sparse(axes: Axes, start: float, end: float) -> None:
    """Marks the sparse phase on an axis of steps, tokens or time."""
    axes.axvspan(start, end, color=GREY, alpha=0.15, linewidth=0)
    axes.annotate("sparse", ((start + end) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, -3),
                  textcoords="offset points", ha="center", va="top", fontsize="small")  # fmt: skip
