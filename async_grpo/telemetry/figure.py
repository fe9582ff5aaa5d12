"""Curves as a picture for a paper: vector, colour-blind safe, labelled at the lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import ConfigError
from async_grpo.telemetry.curves import CLOCKS, Curve
from async_grpo.telemetry.schema import METRIC_BY_NAME, axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXTENSIONS = (".svg", ".png", ".pdf")
# Okabe and Ito's palette, darkest first; yellow is left out, it does not print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # once the colours are used up
INK, FAINT = "#222222", "#DDDDDD"
TITLE_FONT: dict[str, Any] = {"fontsize": 11.0, "fontweight": "bold"}
PANEL_INCHES = (4.0, 2.6)  # of several; a single one is larger by SINGLE
SINGLE = 1.25
LABEL_POINTS = 8.0
FEW_POINTS = 12  # up to which each is marked
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "Nimbus Sans", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.labelcolor": INK,
    "text.color": INK,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "path",  # the same everywhere, whatever fonts the reader has
    "svg.hashsalt": "async-grpo",  # the same picture gives the same file
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


def check_output(path: str | Path) -> None:
    """Raise `ConfigError` unless `path` ends in one of `EXTENSIONS`."""
    suffix = Path(path).suffix.lower()
    if suffix not in EXTENSIONS:
        raise ConfigError(f"-o must end in {', '.join(EXTENSIONS)}, got {str(path)!r}: rename it")


def save_figure(
    panels: Mapping[str, Sequence[Curve]], path: str | Path, *, x: str, title: str = ""
) -> None:
    """Write one panel a variable, {variable: curves}, over the variable `x`, to `path`.

    Raises `ConfigError` if `path` cannot be written.
    """
    check_output(path)
    import matplotlib

    matplotlib.use("Agg")
    installed = _installed(STYLE["font.sans-serif"])
    with matplotlib.rc_context({**STYLE, "font.sans-serif": installed}):
        figure = draw(panels, x=x, title=title)
        # Without the time of day the same curves give the same file.
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(
            Path(path).suffix.lower()
        )
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, bbox_inches="tight", pad_inches=0.06, metadata=metadata)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot write {path} ({reason}): choose another -o") from error


def draw(panels: Mapping[str, Sequence[Curve]], *, x: str, title: str) -> Figure:
    """The figure, laid out."""
    from matplotlib.figure import Figure

    num_columns = min(len(panels), 2)
    num_rows = math.ceil(len(panels) / num_columns)
    scale = SINGLE if len(panels) == 1 else 1.0
    size = (PANEL_INCHES[0] * num_columns * scale, PANEL_INCHES[1] * num_rows * scale)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (variable, curves) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, curves, variable=variable, x=x, with_names=len(panels) == 1)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if len(panels) > 1:
        _draw_legend(figure, next(iter(panels.values())), title=title)
    elif title:
        figure.suptitle(title, x=0.02, ha="left", **TITLE_FONT)
    figure.draw_without_rendering()  # settles the layout, which the labels need
    for axes in grid[: len(panels)]:
        _spread_labels(axes)
    return figure


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], *, variable: str, x: str, with_names: bool
) -> None:
    from matplotlib.patheffects import withStroke

    for index, curve in enumerate(curves):
        style = line_style(index)
        if curve.num_seeds > 1:
            axes.fill_between(
                curve.x, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0
            )
        elif curve.raw[0][1] is not curve.mean:
            axes.plot(*curve.raw[0], color=style["color"], alpha=0.25, linewidth=0.8)
        marker = "o" if len(curve.x) <= FEW_POINTS else ""
        axes.plot(curve.x, curve.mean, linewidth=1.8, marker=marker, markersize=4, **style)
        axes.annotate(
            (f"{curve.name}  " if with_names else "") + final_value(float(curve.mean[-1])),
            (curve.x[-1], curve.mean[-1]), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=LABEL_POINTS, fontweight="bold", color=style["color"],
            path_effects=[withStroke(linewidth=1.5, foreground="white")],  # over other lines
        )  # fmt: skip
    axes.set_title(axis_label(variable), loc="left", fontsize=10)
    axes.set_xlabel(f"Run time ({x})" if x in CLOCKS else axis_label(x))
    axes.margins(x=0.01, y=0.08)
    _format_axis(axes, x=x)


def _format_axis(axes: Axes, *, x: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps = [1, 2, 2.5, 5, 10]
    whole = METRIC_BY_NAME[x].is_count if x in METRIC_BY_NAME else False
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps, integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=steps))
    for axis in (axes.xaxis, axes.yaxis):
        largest = max(map(abs, axis.get_view_interval()))
        if largest >= 10_000:
            axis.set_major_formatter(FuncFormatter(partial(_tick, largest=largest)))


def _spread_labels(axes: Axes) -> None:
    """Move labels of lines that end side by side apart, keeping their order."""
    from matplotlib.text import Annotation

    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    points_per_pixel = 72.0 / axes.figure.dpi
    # [labels, 2]: where the lines end, in points from the left and from the bottom
    ends = axes.transData.transform([label.xy for label in labels]) * points_per_pixel
    widths = [label.get_window_extent().width * points_per_pixel for label in labels]
    for group in side_by_side(ends[:, 0].tolist(), widths):
        places = spread([ends[index, 1] for index in group], 1.25 * LABEL_POINTS)
        for index, place in zip(group, places, strict=True):
            labels[index].set_position((5, place - ends[index, 1]))


def side_by_side(starts: Sequence[float], widths: Sequence[float]) -> list[list[int]]:
    """Indices of intervals, in groups that overlap directly or through others, from the left.

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
    """`places`, moved as little as needed to lie at least `gap` apart, in their order.

    >>> spread([0.0, 1.0, 30.0], 10.0)
    [-4.5, 5.5, 30.0]
    """
    order = np.argsort(places, kind="stable")
    clusters: list[list[int]] = []  # labels that touch, lowest first, and centred on their mean
    for index in order.tolist():
        clusters.append([index])
        while len(clusters) > 1 and _low(clusters[-1], places, gap) < gap + _high(
            clusters[-2], places, gap
        ):
            top = clusters.pop()
            clusters[-1] += top
    result = [0.0] * len(places)
    for cluster in clusters:
        for rank, index in enumerate(cluster):
            result[index] = _low(cluster, places, gap) + rank * gap
    return result


def _low(cluster: Sequence[int], places: Sequence[float], gap: float) -> float:
    return float(np.mean([places[index] for index in cluster])) - gap * (len(cluster) - 1) / 2


def _high(cluster: Sequence[int], places: Sequence[float], gap: float) -> float:
    return _low(cluster, places, gap) + gap * (len(cluster) - 1)


def _draw_legend(figure: Figure, curves: Sequence[Curve], *, title: str) -> None:
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=1.8, label=curve.name, **line_style(index))
        for index, curve in enumerate(curves)
    ]
    font = FontProperties(size=TITLE_FONT["fontsize"], weight=TITLE_FONT["fontweight"])
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(len(curves), 4), frameon=False,
        title=title or None, title_fontproperties=font, alignment="left",
    )  # fmt: skip


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the `index`-th curve: distinct for 21 of them."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


def _tick(value: float, _position: object = None, *, largest: float) -> str:
    """The label of a tick, in the unit that suits the largest value of its axis.

    >>> [_tick(value, largest=30_000) for value in (0, 5_000, 12_500)], _tick(2e6, largest=3e6)
    (['0', '5k', '12.5k'], '2M')
    """
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if largest >= size and value:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def final_value(value: float) -> str:
    """Three digits, all of them shown, so that labels compare.

    >>> [final_value(value) for value in (0.87, 18.72, 1234.5, 0.00156, 0.0, -2e-7)]
    ['0.870', '18.7', '1,234', '0.00156', '0', '-2.00e-07']
    """
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def _installed(families: Any) -> list[str]:
    from matplotlib.font_manager import get_font_names

    names = set(get_font_names())
    return [family for family in families if family in names]
