"""Kinds of charts: lines over iterations, stacked bars, a timeline.

They take plain numbers and know nothing of metric names. Every chart thins out by itself when it
gets many points, so that a run of a thousand iterations gives a page of the same size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, Literal

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullLocator,
)

from planish.stages.report.figures.canvas import PALETTE, Canvas, canvas
from planish.stages.report.words import number, percent, seconds

MAX_MARKED_POINTS = 40
"""Lines with more points than this are drawn without a marker and a tool tip on each."""
MAX_POINTS = 400
"""Longer lines are thinned out to this many points."""
MAX_BARS = 60
"""More bars than this are averaged over neighbours."""

MAX_SPANS = 600
"""A timeline with more bars joins neighbours."""

NARROW = 380
"""Width in CSS pixels of a chart for a telephone, whose text is then as large as that of the page.
"""

_VALUE = re.compile(r"(?P<label>.+), iteration (?P<at>[\d.]+): (?P<value>.+)")
_ROUND_SECONDS = (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)

Unit = Literal["number", "percent", "seconds"]
_NICE_STEPS = [1, 2, 2.5, 5, 10]
_FORMATS = {"number": number, "percent": percent, "seconds": seconds}


@dataclass(frozen=True)
class Chart:
    """A finished chart."""

    title: str
    """Heading."""
    svg: str
    """The drawing."""
    hint: str
    """How to read it."""
    legend: tuple[tuple[str, str, str], ...] = ()
    """Label, palette key and kind (line, dash, box, mark)."""
    is_wide: bool = False
    """Takes both columns."""
    narrow: str = ""
    """The same for a narrow window, where the other would be too small to read."""

    def values(self) -> tuple[list[str], list[list[str]]]:
        """Return what the tool tips say as a table: its heads, and a row for each iteration.

        A chart with too many points for tool tips has no rows.
        """
        tips = [
            _VALUE.fullmatch(unescape(tip)) for tip in re.findall("<title>(.*?)</title>", self.svg)
        ]
        found: dict[float, dict[str, str]] = {}
        for tip in tips:
            if tip:
                found.setdefault(float(tip["at"]), {})[tip["label"]] = tip["value"]
        labels = list(dict.fromkeys(label for row in found.values() for label in row))
        rows = [
            [f"{at:g}", *(row.get(label, "") for label in labels)]
            for at, row in sorted(found.items())
        ]
        return ["iteration", *labels], rows


@dataclass(frozen=True)
class LineSeries:
    """One curve.

    Example:
        >>> LineSeries("reward", "blue", (1, 2), (-0.5, -0.1)).label
        'reward'
    """

    label: str
    """Name in the legend."""
    color: str
    """Key of the palette."""
    x: Sequence[float]
    """Iterations, increasing."""
    y: Sequence[float]
    """Values, as long as `x`."""
    is_secondary: bool = False
    """Drawn thinner and dashed."""


@dataclass(frozen=True)
class Mark:
    """One measured point with its standard error, drawn as a diamond."""

    label: str
    """Text of the tool tip and of the label beside the point."""
    color: str
    """Key of the palette."""
    x: float
    """Iteration."""
    y: float
    """Value."""
    error: float = 0.0
    """One standard error; 0 draws no bar."""


@dataclass(frozen=True)
class Band:
    """A shaded stretch of iterations.

    Example:
        >>> Band("value pretraining", 1, 10).last
        10
    """

    label: str
    """What it is, for the legend."""
    first: int
    """First iteration in it."""
    last: int
    """Last iteration in it."""


@dataclass(frozen=True)
class BarPart:
    """One layer of stacked bars."""

    label: str
    """Name in the legend."""
    color: str
    """Key of the palette."""
    y: Sequence[float]
    """Height per bar."""


@dataclass(frozen=True)
class Span:
    """One bar of the timeline, in seconds since the run began."""

    row: str
    """Label of its row."""
    color: str
    """Key of the palette."""
    start: float
    """First second."""
    length: float
    """Seconds."""
    tip: str
    """Tool tip."""


def line_chart(
    name: str,
    lines: Sequence[LineSeries],
    *,
    y_label: str,
    unit: Unit = "number",
    limit: tuple[str, float] | None = None,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    is_log: bool = False,
    floor: float | None = None,
    bands: Sequence[Band] = (),
    width: int = 540,
) -> str:
    """Draw curves over iterations as SVG.

    Args:
        name: what the chart shows; also for screen readers.
        lines: at least one curve, or at least one mark.
        y_label: name and unit of the vertical axis.
        unit: how values are written.
        limit: label and height of a horizontal line.
        marks: measured points.
        from_zero: the vertical axis starts at 0.
        is_log: the vertical axis is logarithmic, where every value is positive.
        floor: lower values are drawn at this height; their tool tips keep the value.
        bands: shaded stretches behind the curves.
        width: CSS pixels.
    """
    with canvas(name, width=width) as page:
        page.axes.margins(y=0.09)
        for line in lines:
            _draw_line(page, line, unit, floor)
        for mark in marks:
            _draw_mark(page, mark, unit)
        if limit is not None:
            page.axes.axhline(
                limit[1], color=PALETTE["slate"], linewidth=1.25, linestyle=(0, (2, 2))
            )
            page.axes.annotate(
                limit[0],
                (1.0, limit[1]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color=PALETTE["muted"],
            )
        positive = all(value > 0 for line in lines for value in line.y)
        if is_log and positive:
            page.axes.set_yscale("log")
        _finish(page, y_label, unit, from_zero=from_zero, is_log=is_log and positive)
        xs = [x for line in lines for x in line.x] + [mark.x for mark in marks]
        # A curve that begins later keeps the axis of the other charts.
        xs += [x for band in bands for x in (band.first, band.last)]
        _iteration_axis(page.axes, min(xs), max(xs))
        # The axis has its range by now, which a band must not widen.
        low, high = page.axes.get_xlim()
        for band in bands:
            start, end = max(low, band.first - 0.5), min(high, band.last + 0.5)
            if start < end:
                page.axes.axvspan(start, end, color=PALETTE["line"], alpha=0.6, lw=0, zorder=0)
        page.axes.set_xlim(low, high)
    return page.svg


def _draw_line(page: Canvas, line: LineSeries, unit: Unit, floor: float | None) -> None:
    stride = max(1, -(-len(line.x) // MAX_POINTS))
    x, y = list(line.x[::stride]), list(line.y[::stride])
    height = y if floor is None else [max(floor, value) for value in y]
    color = PALETTE[line.color]
    style: dict[str, Any] = {"color": color}
    if line.is_secondary:
        style.update(linewidth=1.6, linestyle=(0, (4, 2.5)), dash_capstyle="butt")
    page.axes.plot(x, height, **style)
    if len(x) > MAX_MARKED_POINTS:
        return
    size = 5.5 if line.is_secondary else 7
    for at, value, drawn in zip(x, y, height, strict=True):
        tip = page.tip(f"{line.label}, iteration {at:g}: {_FORMATS[unit](value)}")
        page.axes.plot(
            [at], [drawn], "o", gid=tip, markersize=size, markerfacecolor=color,
            markeredgecolor=PALETTE["surface"], markeredgewidth=1.25, clip_on=False, zorder=3,
        )  # fmt: skip


def _draw_mark(page: Canvas, mark: Mark, unit: Unit) -> None:
    color = PALETTE[mark.color]
    if mark.error > 0:
        page.axes.errorbar(
            [mark.x], [mark.y], yerr=[mark.error], color=color, capsize=4, linewidth=1.5, zorder=4
        )
    spread = f" +- {_FORMATS[unit](mark.error)}" if mark.error > 0 else ""
    tip = page.tip(f"{mark.label}: {_FORMATS[unit](mark.y)}{spread}")
    page.axes.plot(
        [mark.x], [mark.y], "D", gid=tip, markersize=8.5, markerfacecolor=color,
        markeredgecolor=PALETTE["surface"], markeredgewidth=1.5, clip_on=False, zorder=5,
    )  # fmt: skip


def _finish(
    page: Canvas, y_label: str, unit: Unit, *, from_zero: bool, is_log: bool = False
) -> None:
    axes = page.axes
    low, high = axes.get_ylim()
    if is_log:
        axes.set_ylim(low / 2, high * 2)
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        low = 0.0 if from_zero else low
        axes.set_ylim(low, high if high > low else low + 1)
        locator: Locator = MaxNLocator(nbins=5, min_n_ticks=3, steps=_NICE_STEPS)
        axes.yaxis.set_major_locator(_times(high, 5) if unit == "seconds" else locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _FORMATS[unit](value)))
    axes.text(
        -50 / axes.bbox.width, 1 + 14 / axes.bbox.height, y_label,
        transform=axes.transAxes, ha="left", va="bottom", color=PALETTE["muted"],
    )  # fmt: skip


def _times(end: float, most: int) -> Locator:
    """Return ticks at whole minutes and hours; at most so many up to `end` seconds."""
    if end < 30:
        return MaxNLocator(nbins=most, steps=_NICE_STEPS)
    steps = (*_ROUND_SECONDS, *(86400 * 2**n for n in range(40)))
    return MultipleLocator(next(step for step in steps if end / step <= most))


def _iteration_axis(axes: Any, first: float, last: float, *, room: float = 0.0) -> None:
    pad = max(0.35, (last - first) * 0.03) + room
    axes.set_xlim(first - pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.0f}" if first <= value <= last else "")
    )
    axes.set_xlabel("iteration", labelpad=4)


def stacked_bars(
    name: str,
    x: Sequence[float],
    parts: Sequence[BarPart],
    *,
    y_label: str,
    unit: Unit = "number",
    width: int = 540,
) -> str:
    """Draw one stacked bar per iteration as SVG; neighbours are averaged beyond `MAX_BARS`."""
    stride = -(-len(x) // MAX_BARS)
    at = _average(x, stride)
    bar = 0.68 * stride
    with canvas(name, width=width) as page:
        base = np.zeros(len(at))
        for part in parts:
            heights = _average(part.y, stride)
            bars = page.axes.bar(
                at, heights, bar, bottom=base, color=PALETTE[part.color],
                edgecolor=PALETTE["surface"], linewidth=0.75,
            )  # fmt: skip
            for patch, value, position in zip(bars, heights, at, strict=True):
                text = f"{part.label}, iteration {position:g}: {_FORMATS[unit](value)}"
                patch.set_gid(page.tip(text))
            base = base + heights
        page.axes.set_ylim(0, max(float(base.max()) * 1.06, 1e-9))
        _finish(page, y_label, unit, from_zero=True)
        # Few bars would be as broad as the page.
        room = bar / 2 + max(0.0, 5 - len(at)) * 0.5 * stride
        _iteration_axis(page.axes, float(at.min()), float(at.max()), room=room)
    return page.svg


def _average(values: Sequence[float], stride: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    means = [np.mean(values[i : i + stride]) for i in range(0, len(values), stride)]
    return np.asarray(means, dtype=np.float64)


def timeline(
    name: str,
    rows: Sequence[str],
    spans: Sequence[Span],
    *,
    width: int = 1124,
    since: str = "the run began",
) -> str:
    """Draw when each task ran as SVG.

    Args:
        name: what the chart shows.
        rows: labels from top to bottom.
        spans: bars; each names one of `rows`.
        width: CSS pixels.
        since: what happened at second 0.
    """
    height = 52 + 26 * len(rows)
    end = max(span.start + span.length for span in spans)
    with canvas(name, width=width, height=height, left=96, right=34, top=6) as page:
        axes = page.axes
        for span in _merge(spans, end) if len(spans) > MAX_SPANS else spans:
            at = len(rows) - 1 - rows.index(span.row)
            axes.add_patch(
                Rectangle(
                    (span.start, at - 0.32), max(span.length, end * 0.0012), 0.64,
                    facecolor=PALETTE[span.color], edgecolor=PALETTE["surface"], linewidth=0.75,
                    gid=page.tip(span.tip),
                )
            )  # fmt: skip
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(range(len(rows)), list(reversed(rows)))
        axes.set_xlim(0, end)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(_times(end, width // 120))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axes.set_xlabel(f"time since {since}", labelpad=4)
    return page.svg


def _merge(spans: Sequence[Span], end: float) -> list[Span]:
    """Join neighbours of one row and colour that a reader could not tell apart."""
    merged: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        bars = merged.setdefault((span.row, span.color), [])
        stop = span.start + span.length
        if bars and span.start - bars[-1][1] < end / 60:
            start, reached, count = bars[-1]
            bars[-1] = (start, max(reached, stop), count + 1)
        else:
            bars.append((span.start, stop, 1))
    return [
        Span(row, color, start, stop - start, f"{row}: {count} tasks")
        for (row, color), bars in merged.items()
        for start, stop, count in bars
    ]
