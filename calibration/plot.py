"""The picture of a calibration: what each head keeps, and what the grid trades."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from kvir.calibration.result import Calibration, Point
from kvir.lowering.plan_file import write_atomically


def draw(found: Calibration, path: Path) -> None:
    """Heat map layer x head of the chosen policy; kept share against minimum-head cosine and against loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), width_ratios=(1.2, 1, 1), layout="constrained")
    _heat_map(figure, axes[0], found)
    _trade(axes[1], found, [p.minimum_head_score for p in found.points], "minimum-head cosine")
    losses = [p.loss for p in found.points if p.loss is not None]
    if found.loss_full is not None and len(losses) == len(found.points):
        _trade(axes[2], found, losses, "held-out loss, nats per token")
        axes[2].axhline(found.loss_full, color="0.5", linestyle="--", linewidth=1)
        axes[2].annotate("full KV", (0.02, found.loss_full), xycoords=("axes fraction", "data"), va="bottom")
    else:
        axes[2].set_axis_off()
    image = io.BytesIO()
    # without metadata the same grid gives the same bytes
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(path, image.getvalue())


def _heat_map(figure: Any, axes: Any, found: Calibration) -> None:
    best, codes = found.best, found.codes
    heads = max(len(row) for row in best.choices)
    grid = np.full((heads, len(best.choices)), np.nan)
    for column, row in enumerate(best.choices):
        grid[: len(row), column] = row
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    norm = BoundaryNorm(np.arange(len(codes) + 1) - 0.5, colormaps["viridis"].N)
    drawn = axes.imshow(grid, aspect="auto", cmap="viridis", norm=norm, origin="lower")
    bar = figure.colorbar(drawn, ax=axes, ticks=range(len(codes)))
    bar.ax.set_yticklabels([str(code) for code in codes])
    step = max(1, len(found.layers) // 10)
    axes.set_xticks(range(0, len(found.layers), step), [str(i) for i in found.layers[::step]])
    axes.set_yticks(range(heads))
    axes.set(xlabel="layer", ylabel="KV head", title=f"rows kept: {best.name}, {best.kept_share:.1%}")


def _trade(axes: Any, found: Calibration, values: list[float], label: str) -> None:
    points: list[tuple[Point, float]] = sorted(
        zip(found.points, values, strict=True), key=lambda pair: pair[0].kept_share
    )
    grid = [(p.kept_share, v) for p, v in points if p.tau is not None]
    axes.plot(*zip(*grid, strict=True), marker="o", color="tab:blue", label="SeqCalib")
    other = [(p.kept_share, v) for p, v in points if p.tau is None]
    if other:
        axes.plot(*zip(*other, strict=True), marker="s", linestyle="", color="tab:green", label="residual")
    best = found.best
    axes.plot(
        best.kept_share,
        values[found.chosen],
        marker="o",
        markersize=14,
        markerfacecolor="none",
        markeredgecolor="tab:red",
        markeredgewidth=2,
        linestyle="",
        label="chosen",
    )
    for point, value in points:
        axes.annotate(point.name, (point.kept_share, value), textcoords="offset points", xytext=(6, -12))
    axes.set(xlabel="share of the rows kept", ylabel=label)
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    axes.legend()
