"""Curves as a picture for a paper: vector, colour-blind safe, labelled at the lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.telemetry.schema import METRIC_BY_NAME, axis_label
from async_grpo.util.errors import ConfigError
from async_grpo.viewing.curves import CLOCKS, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# {suffix: metadata without the time of day}: the same curves give the same file.
TIMES = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
# Okabe and Ito's palette, darkest first, without yellow, which does not print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # once the colours are used up
PANEL_INCHES = (4.0, 2.6)  # of each of several panels; a single one is SINGLE times as large
SINGLE = 1.25
LABEL_POINTS = 8.0
NOTE_POINTS = 7.0
MANY = 3  # up to which curves show raw points: those of more would hide one another
FEW_POINTS = 12  # of a curve, up to which each is marked
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "figure.titlesize": 11.0,
    "figure.titleweight": "bold",
    "svg.hashsalt": "async-grpo",  # the same picture gives the same file
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


def check_output(path: str | Path) -> None:
    """Raise `ConfigError` unless `path` ends in the suffix of a format."""
    if Path(path).suffix.lower() not in TIMES:
        raise ConfigError(f"-o must end in {', '.join(TIMES)}, got {str(path)!r}: rename it")


def save_figure(
    panels: Mapping[str, Sequence[Curve]], path: str | Path, *, x: str, title: str = ""
) -> None:
    """Write `panels` {variable: curves} to `path`: one panel a variable, over the variable `x`.

    Raises `ConfigError` if `path` cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fill(figure := Figure(), panels, x=x, title=title)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            metadata = TIMES[Path(path).suffix.lower()]
            figure.savefig(path, bbox_inches="tight", pad_inches=0.06, metadata=metadata)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot write {path} ({reason}): choose another -o") from error


def fill(figure: Figure, panels: Mapping[str, Sequence[Curve]], *, x: str, title: str = "") -> None:
    """Draw the panels, as `save_figure` writes them, into an empty figure."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        _lay_out(figure, panels, x=x, title=title)


def _lay_out(figure: Figure, panels: Mapping[str, Sequence[Curve]], *, x: str, title: str) -> None:
    num_columns = min(len(panels), 2)
    num_rows = math.ceil(len(panels) / num_columns)
    scale = SINGLE if len(panels) == 1 else 1.0
    size = (PANEL_INCHES[0] * num_columns * scale, PANEL_INCHES[1] * num_rows * scale)
    figure.set_size_inches(*size)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (variable, curves) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, curves, variable=variable, x=x, with_names=len(panels) == 1)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if len(panels) > 1:
        lines = grid[0].get_legend_handles_labels()
        figure.legend(
            *lines, loc="outside upper left", ncols=min(len(lines[0]), 4), frameon=False,
            title=title or None, title_fontproperties={"size": 11.0, "weight": "bold"},
            alignment="left",
        )  # fmt: skip
    elif title:
        figure.suptitle(title, x=0.02, ha="left")
    if text := note(panels):
        figure.supxlabel(text, x=0.02, ha="left", fontsize=NOTE_POINTS, color="#666666")
    figure.draw_without_rendering()  # lays out the panels, whose sizes the labels need
    for axes in grid[: len(panels)]:
        _spread_labels(axes)


def note(panels: Mapping[str, Sequence[Curve]]) -> str:
    """A line below the picture that explains bands and smoothing; empty without either."""
    curves = [curve for each in panels.values() for curve in each]
    parts = []
    if seeds := sorted({curve.num_seeds for curve in curves} - {1}):
        parts.append(f"mean of {' or '.join(map(str, seeds))} seeds, lowest to highest")
    if windows := sorted({curve.smooth_window for curve in curves} - {1}):
        parts.append(f"moving average over {windows[0]} points")
    return "; ".join(parts)


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], *, variable: str, x: str, with_names: bool
) -> None:
    from cycler import cycler
    from matplotlib.patheffects import withStroke

    axes.set_prop_cycle(cycler(linestyle=DASHES) * cycler(color=COLOURS))
    for curve in curves:
        marker = "o" if len(curve.x) <= FEW_POINTS else ""
        [line] = axes.plot(
            curve.x, curve.mean, linewidth=1.8, marker=marker, markersize=4, label=curve.name
        )
        colour = line.get_color()
        if curve.num_seeds > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        elif curve.raw and len(curves) <= MANY:
            axes.plot(*curve.raw[0], "-", color=colour, alpha=0.25, linewidth=0.8, zorder=1.5)
        axes.annotate(
            (f"{curve.name}  " if with_names else "") + final_value(float(curve.mean[-1])),
            (curve.x[-1], curve.mean[-1]), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=LABEL_POINTS, fontweight="bold", color=colour,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],  # over other lines
        )  # fmt: skip
    axes.set_title(axis_label(variable))
    axes.set_xlabel(f"Run time ({x})" if x in CLOCKS else axis_label(x))
    axes.margins(x=0.01, y=0.08)
    _format_axes(axes, x=x)


def _format_axes(axes: Axes, *, x: str) -> None:
    from matplotlib.ticker import EngFormatter

    is_count = x in METRIC_BY_NAME and METRIC_BY_NAME[x].is_count
    axes.locator_params(axis="x", nbins=6, integer=is_count)
    axes.locator_params(axis="y", nbins=5)
    for axis in (axes.xaxis, axes.yaxis):
        if max(map(abs, axis.get_view_interval())) >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=""))


def _spread_labels(axes: Axes) -> None:
    """Move the labels of lines that end side by side apart, in their order."""
    from matplotlib.text import Annotation

    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    points_per_pixel = 72.0 / axes.figure.dpi
    # [labels, 2]: where the lines end, in points from the left and from the bottom
    ends = axes.transData.transform([label.xy for label in labels]) * points_per_pixel
    widths = [label.get_window_extent().width * points_per_pixel for label in labels]
    for group in side_by_side(ends[:, 0].tolist(), widths):
        places = spread([ends[index, 1] for index in group], 1.25 * LABEL_POINTS)
        # The labels of a crowded panel stay between its bottom and its top.
        low, high = (axes.bbox.y0 * points_per_pixel, axes.bbox.y1 * points_per_pixel)
        shift = min(0.0, high - max(places)) or max(0.0, low - min(places))
        places = [place + shift for place in places]
        for index, place in zip(group, places, strict=True):
            labels[index].set_position((5, place - ends[index, 1]))


def side_by_side(starts: Sequence[float], widths: Sequence[float]) -> list[list[int]]:
    """Groups of intervals that overlap directly or through others, as indices from the left.

    >>> side_by_side([0.0, 50.0, 5.0], [10.0, 10.0, 10.0])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    reach = -math.inf
    for index in np.argsort(starts, kind="stable").tolist():
        if starts[index] >= reach:
            groups.append([])
        groups[-1].append(index)
        reach = max(reach, starts[index] + widths[index])
    return groups


def spread(places: Sequence[float], gap: float) -> list[float]:
    """`places`, moved as little as needed to be at least `gap` apart, in their order.

    >>> spread([0.0, 1.0, 30.0], 10.0)
    [-4.5, 5.5, 30.0]
    """
    order = np.argsort(places, kind="stable")
    steps = gap * np.arange(len(places))
    packed = np.array(places)[order] - steps  # these must not fall: isotonic regression
    last = len(places) + 1
    risen = [
        max(min(packed[low:high].mean() for high in range(i + 1, last)) for low in range(i + 1))
        for i in range(len(places))
    ]
    result = np.empty(len(places))
    result[order] = risen + steps
    return [float(place) for place in result]


def final_value(value: float) -> str:
    """The value with three significant digits, zeros included, so that labels compare.

    >>> [final_value(value) for value in (0.87, 18.72, 1234.5, 0.00156, 0.0, -2e-7)]
    ['0.870', '18.7', '1,234', '0.00156', '0', '-2.00e-07']
    """
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.3g}"
