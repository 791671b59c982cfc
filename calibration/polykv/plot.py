"""The picture of a calibration: each unit's method and rows, error curves, held-out loss."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from kvir.calibration.polykv.result import PolyCalibration, interval
from kvir.lowering.plan_file import write_atomically


def draw(found: PolyCalibration, path: Path) -> None:
    """Methods and rows by layer and unit; mean error against budget by method; held-out loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(14, 8), layout="constrained")
    _methods(figure, axes[0, 0], found)
    _rows(figure, axes[0, 1], found)
    _curves(axes[1, 0], found)
    _losses(axes[1, 1], found)
    image = io.BytesIO()
    # without metadata the same grid gives the same bytes
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(path, image.getvalue())


def _grid(found: PolyCalibration, value: Any) -> Any:
    """[units, layers]; a layer with fewer heads is filled up with nothing."""
    heads = max(len(row) for row in found.choices)
    grid = np.full((heads, len(found.choices)), np.nan)
    for column, row in enumerate(found.choices):
        grid[: len(row), column] = [value(choice) for choice in row]
    return grid


def _methods(figure: Any, axes: Any, found: PolyCalibration) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap

    names = [method.name for method in found.methods]
    context = found.inputs.context_tokens
    grid = _grid(found, lambda c: len(names) if c.rows >= context else c.method)
    colors = [*colormaps["tab20"].colors[: len(names)], (0.2, 0.2, 0.2)]  # type: ignore[attr-defined]
    norm = BoundaryNorm(np.arange(len(colors) + 1) - 0.5, len(colors))
    drawn = axes.imshow(grid, aspect="auto", cmap=ListedColormap(colors), norm=norm, origin="lower")
    bar = figure.colorbar(drawn, ax=axes, ticks=range(len(colors)))
    bar.ax.set_yticklabels([*names, "everything"])
    _label(axes, found, "method")


def _rows(figure: Any, axes: Any, found: PolyCalibration) -> None:
    context = found.inputs.context_tokens
    drawn = axes.imshow(
        _grid(found, lambda c: c.rows / context),
        aspect="auto",
        cmap="viridis",
        origin="lower",
        vmin=0,
        vmax=1,
    )
    figure.colorbar(drawn, ax=axes)
    _label(axes, found, f"share of the rows kept, {found.inputs.budget:.0%} in all")


def _label(axes: Any, found: PolyCalibration, title: str) -> None:
    step = max(1, len(found.layers) // 10)
    axes.set_xticks(range(0, len(found.layers), step), [str(i) for i in found.layers[::step]])
    axes.set_yticks(range(max(len(row) for row in found.choices)))
    unit = "KV head" if found.inputs.grain == "head" else "unit"
    axes.set(xlabel="layer", ylabel=unit, title=title)


def _curves(axes: Any, found: PolyCalibration) -> None:
    for m, method in enumerate(found.methods):
        means = [
            float(np.mean([unit for layer in found.signals for unit in layer.residual[m][k]]))
            for k in range(len(found.shares))
        ]
        axes.plot(found.shares, means, marker="o", markersize=3, label=method.name)
    axes.axvline(found.inputs.budget, color="0.5", linestyle="--", linewidth=1)
    axes.set(xlabel="share of the rows", ylabel="error over the residual stream, mean of units")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _losses(axes: Any, found: PolyCalibration) -> None:
    if found.full is None or found.plan is None:
        axes.set_axis_off()
        return
    ranked = [found.plan, *sorted(found.singles, key=lambda point: point.loss)]
    for place, point in enumerate(reversed(ranked)):
        mean, half = interval(point.losses, found.full.losses)
        color = "tab:red" if point is found.plan else "tab:blue"
        axes.barh(place, mean, xerr=None if half != half else half, color=color)
    axes.set_yticks(range(len(ranked)), [point.name for point in reversed(ranked)])
    axes.set(xlabel="held-out loss above full KV, nats per token")
    axes.grid(axis="x", alpha=0.3)
