"""Result files, and what every figure of them has: a caption that names the source, and its marks."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparse_lm.reporting.style import GREY

RESULTS = pathlib.Path(__file__).parent / "results"


class Results(NamedTuple):
    """What one run of a benchmark or of a suite wrote."""

    path: pathlib.Path
    data: Any

    @property
    def name(self) -> str:
        """Of the file, without its ending: what was run, and on what machine."""
        return self.path.stem

    def beside(self, files: str) -> Results | None:
        """Results of something else on the same machine."""
        path = self.path.with_name(f"{files}_{self.name.rpartition('_')[2]}.json")
        return read_results(path) if path.exists() else None

    @property
    def caption(self) -> str:
        """The file, the device and the date."""
        known = [self.data[key].split(";")[0] for key in ("device", "date") if key in self.data]
        return ", ".join([f"{self.name}.json", *known])

    @property
    def has_dense_run(self) -> bool:
        """A suite of training runs whose losses can be compared with dense ones."""
        return any(run["name"] == "dense" for run in self.data["runs"])

    @property
    def ends_dense(self) -> bool:
        """The suite's sparse phase is followed by dense steps."""
        return self.data["base"]["sparsity.end_step"] < self.data["base"]["steps"]


def read_results(path: pathlib.Path) -> Results:
    """The results in a JSON file."""
    return Results(path, json.loads(path.read_text()))


def find_results(files: str, table: str, directory: pathlib.Path = RESULTS) -> list[Results]:
    """The results in `directory` whose file name is `files` and more, and which have `table`."""
    found = [read_results(path) for path in sorted(directory.glob(f"{files}_*.json"))]
    return [results for results in found if table in results.data]


def new_figure(width: float, height: float, caption: str, **subplots: Any) -> tuple[Figure, Any]:
    """A figure of that many inches with a caption at its foot, and its axes, as `plt.subplots` gives them."""
    figure, axes = plt.subplots(figsize=(width, height), **subplots)
    figure.supxlabel(caption, fontsize="x-small", x=0.99, ha="right")
    return figure, axes


def limit(axes: Axes, x: float, label: str) -> None:
    """A dashed vertical line that no measurement can pass, or that it is measured against."""
    axes.axvline(x, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(label, (x, 1), xycoords=("data", "axes fraction"), xytext=(-3, 2), textcoords="offset points",
                  ha="right", fontsize="small")  # fmt: skip
