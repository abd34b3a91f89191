"""Figures of kernel times: products, sparsifiers, and one FFN by recipe."""

from __future__ import annotations

import itertools

from matplotlib.figure import Figure

from experiments.plot_results import Results, limit, new_figure
from sparse_lm.reporting.style import GREY


def products_24(results: Results) -> Figure:
    """2:4 products against cuBLAS, by shape, and cuSPARSELt's against the cuBLAS of its own process."""
    rows, rival = results.data["matmul_24"], results.beside("cusparselt")
    caption = f"{results.caption}; {rival.name}.json" if rival else results.caption
    figure, axes = new_figure(6.5, 0.8 + 0.4 * len(rows), caption)
    names = [_shape(row) for row in rows]
    axes.plot([row["speedup"] for row in rows], names, "o", label="B as stored")
    axes.plot([row["speedup_transposed"] for row in rows], names, "x", label="B and result transposed")
    if rival:
        theirs = {_shape(row): row["cublas_ms"] / row["best_ms"] for row in rival.data["matmul_24"]}
        axes.plot([theirs[name] for name in names], names, "|", markersize=12, label="cuSPARSELt")
    limit(axes, 1, "cuBLAS, dense")
    limit(axes, 2, "limit")
    axes.invert_yaxis()
    axes.margins(y=0.15)
    axes.set(xlim=(0.9, 2.1), xlabel="speed-up (times)", ylabel="M x N x K")
    axes.set_title("2:4 product, bf16", pad=16)
    axes.legend(loc="center", bbox_to_anchor=(0.25, 0.5))
    return figure


def products_venom(results: Results) -> Figure:
    """Products with the rows that blocks list against cuBLAS, by M and V, on axes of powers of two."""
    rows = results.data["matmul_venom"]
    shapes = list(dict.fromkeys((row["t"], row["f"], row["d"]) for row in rows))
    groups, blocks = sorted({row["m"] for row in rows}), sorted({row["v"] for row in rows})
    figure, panels = new_figure(9, 3.2, results.caption, ncols=len(shapes), sharex=True, sharey=True, squeeze=False)
    operations = {"speedup": ("matmul_venom", "-"), "speedup_sampled": ("sampled_matmul_24", ":")}
    for shape, axes in zip(shapes, panels[0], strict=True):
        for (key, (name, line)), v in itertools.product(operations.items(), blocks):
            points = [row for row in rows if (row["t"], row["f"], row["d"], row["v"]) == (*shape, v) and key in row]
            if points:
                axes.plot(
                    [row["m"] for row in points], [row[key] for row in points], f"o{line}",
                    color=f"C{blocks.index(v)}", label=f"{name}, V = {v}",
                )  # fmt: skip
        axes.plot(groups, [m / 2 for m in groups], "--", color=GREY, label="limit, M / 2")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(groups, [f"2:{m}" for m in groups])
        axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.set_xlabel("kept in each row, of columns")
        axes.set_title("bf16, T {}, F {}, D {}".format(*shape))
    panels[0, 0].set_ylabel("speed-up over cuBLAS, dense (times)")
    panels[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def sparsifiers(results: Results) -> Figure:
    """The bandwidth of 2:4 sparsifiers against that of a copy."""
    rows = results.data["sparsify_24"]
    figure, axes = new_figure(7, 0.9 + 0.3 * len(rows), results.caption)
    along = {-1: "along rows", 0: "along columns"}
    names = [
        f"{row['dtype']} {row['rows']} x {row['columns']}, {row['method'].replace('_', ' ')} {along[row['axis']]}"
        for row in rows
    ]
    for key, marker, label in (("ms", "o", "kernel"), ("xla_ms", "x", "XLA")):
        axes.plot([row["bytes"] / row[key] / 1e6 for row in rows], names, marker, label=label)
    limit(axes, results.data["copy_bandwidth"] / 1e9, "copy")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s, every byte counted once")
    axes.set_title("2:4 sparsifiers", pad=16)
    axes.legend()
    return figure


def feed_forwards(results: Results) -> Figure:
    """One FFN by recipe against the dense one: a panel for each shape, without and with its backward."""
    rows = [row for row in results.data["ffn"] if row["plan"] != "dense"]
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    shapes = list(dict.fromkeys((row["dim"], row["neurons"]) for row in rows))
    lengths = sorted({row["tokens"] for row in rows})
    figure, panels = new_figure(
        8.5, (0.9 + 0.25 * len(plans)) * len(shapes), results.caption, nrows=len(shapes), ncols=2,
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for shape, in_a_row in zip(shapes, panels, strict=True):
        parts = {"forward": "forward", "both": "forward and backward"}
        for (part, title), axes in zip(parts.items(), in_a_row, strict=True):
            for tokens in lengths:
                points = [row for row in rows if (row["dim"], row["neurons"], row["tokens"]) == (*shape, tokens)]
                axes.plot(
                    [row[f"{part}_speedup"] for row in points], [plans.index(row["plan"]) for row in points], "o",
                    label=f"{tokens} tokens",
                )  # fmt: skip
            axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
            axes.set_yticks(range(len(plans)), plans)
            axes.set_ylim(len(plans) - 0.5, -0.5)
            axes.set_title(f"D {shape[0]}, F {shape[1]}: {title}")
    panels[0, 1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axes in panels[-1]:
        axes.set_xlabel("speed-up over dense (times)")
    return figure


def _shape(row: dict[str, int]) -> str:
    return f"{row['m']} x {row['n']} x {row['k']}"
