"""Kinds of charts as SVG: lines over iterations, stacked bars, a timeline.

They take plain numbers and know nothing of metric names. Colours are variables of the page, so that
one drawing serves light and dark pages. Every chart thins out by itself when it gets many points,
so that a run of a thousand iterations gives a page of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from statistics import fmean
from typing import Literal

from planish.stages.report.words import number, percent, seconds

MAX_MARKED_POINTS = 40
"""Lines with more points than this are drawn without a marker and a tool tip on each."""
MAX_POINTS = 400
"""Longer lines are thinned out to this many points."""
MAX_BARS = 60
"""More bars than this are averaged over neighbours."""
MAX_SPANS = 600
"""A timeline with more bars joins neighbours."""
LARGEST = 1e300
"""What is farther from 0 is drawn at the edge: sums and differences of it would overflow."""
WIDE = 1124
"""Width in CSS pixels of a chart that takes both columns of the page."""
NARROW = 380
"""Width of a chart for a telephone, whose text is then as large as that of the page."""

_ROUND_SECONDS = (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)

Unit = Literal["number", "percent", "seconds"]
_FORMATS: dict[Unit, Callable[[float], str]] = {
    "number": number,
    "percent": percent,
    "seconds": seconds,
}


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
    """Label, name of the colour and kind (line, dash, box, mark)."""
    is_wide: bool = False
    """Takes both columns."""
    narrow: str = ""
    """The same for a narrow window, where the other would be too small to read."""
    values: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())
    """The numbers as a table: its heads, and a row for each iteration; no rows for many points."""


@dataclass(frozen=True)
class LineSeries:
    """One curve, or one layer of stacked bars.

    Example:
        >>> LineSeries("reward", "blue", (1, 2), (-0.5, -0.1)).label
        'reward'
    """

    label: str
    """Name in the legend."""
    color: str
    """Name of a colour of the page."""
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
    """Text of the tool tip."""
    color: str
    """Name of a colour of the page."""
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
class Span:
    """One bar of the timeline, in seconds since the run began."""

    row: str
    """Label of its row."""
    color: str
    """Name of a colour of the page."""
    start: float
    """First second."""
    length: float
    """Seconds."""
    tip: str
    """Tool tip."""


@dataclass
class _Plot:
    """A drawing under construction: values from `x` and `y` fill the box inside the margins."""

    width: int
    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 236
    left: int = 52
    right: int = 14
    top: int = 30
    bottom: int = 44
    is_log: bool = False
    parts: list[str] = field(default_factory=list)

    def across(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / (high - low) * (self.width - self.left - self.right)

    def down(self, y: float) -> float:
        y = min(max(y, self.y[0]), self.y[1])
        low, high = map(math.log, self.y) if self.is_log else self.y
        y = math.log(y) if self.is_log else y
        return self.top + (high - y) / (high - low) * (self.height - self.top - self.bottom)

    def add(self, tag: str, text: str = "", *, tip: str = "", **attributes: float | str) -> None:
        if tip:
            attributes["class"] = "tip"
        named = "".join(
            f' {name.replace("_", "-")}="{escape(_short(value))}"'
            for name, value in attributes.items()
        )
        inside = (f"<title>{escape(tip)}</title>" if tip else "") + escape(text, quote=False)
        self.parts.append(f"<{tag}{named}>{inside}</{tag}>" if inside else f"<{tag}{named}/>")

    def write(self, text: str, x: float, y: float, anchor: str = "start", **more: str) -> None:
        self.add("text", text, x=x, y=y, text_anchor=anchor, fill="var(--muted)", **more)

    def rule(self, x: tuple[float, float], y: tuple[float, float], color: str, **more: str) -> None:
        self.add("line", x1=x[0], x2=x[1], y1=y[0], y2=y[1], stroke=f"var(--{color})", **more)

    def y_axis(self, label: str, ticks: Iterable[float], unit: Unit) -> None:
        self.write(label, 2, self.top - 14)
        for tick in ticks:
            at = self.down(tick)
            self.rule((self.left, self.width - self.right), (at, at), "grid")
            self.write(_FORMATS[unit](tick), self.left - 7, at + 4, "end")

    def x_axis(self, label: str, ticks: Iterable[tuple[float, str]]) -> None:
        base = self.height - self.bottom
        self.rule((self.left, self.width - self.right), (base, base), "grid")
        for tick, text in ticks:
            self.write(text, self.across(tick), base + 18, "middle")
        self.write(label, (self.left + self.width - self.right) / 2, self.height - 8, "middle")

    def svg(self, name: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(name)}" style="max-width: {self.width}px; '
            f'aspect-ratio: {self.width} / {self.height}; font-size: 12px">'
            f"{''.join(self.parts)}</svg>"
        )


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return multiples of a round step, at most so many steps apart."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (size * nice for nice in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)))
    step = next(step for step in steps if (high - low) / step <= most * (1 + 1e-9))
    return _multiples(low, high, max(step, 1.0) if whole else step)


def _times(end: float, most: int) -> list[float]:
    """Return whole minutes and hours up to `end` seconds."""
    if end < 30:
        return _ticks(0.0, end, most)
    steps = (*_ROUND_SECONDS, *(86400 * 2**n for n in range(40)))
    return _multiples(0.0, end, next(step for step in steps if end / step <= most))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * count for count in range(first, last + 1)]


def _iterations(first: float, last: float) -> list[tuple[float, str]]:
    """Return the iterations that an axis names."""
    ticks = _ticks(first, max(last, first + 1), 10, whole=True)
    return [(tick, f"{tick:.0f}") for tick in ticks if first <= tick <= last]


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
        name: what the chart shows, for screen readers.
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
    lowest = -math.inf if floor is None else floor
    heights = [max(lowest, y) for line in lines for y in line.y]
    heights += [mark.y + sign * mark.error for mark in marks for sign in (-1, 1)]
    heights += [limit[1]] if limit else []
    heights = [min(max(y, -LARGEST), LARGEST) for y in heights]
    xs = [x for line in lines for x in line.x] + [mark.x for mark in marks]
    # A curve that begins later keeps the axis of the other charts.
    xs += [x for band in bands for x in (band.first, band.last)]
    first, last, low, high = min(xs), max(xs), min(heights), max(heights)
    is_log = is_log and low > 0
    room = 0.09 * (high - low or abs(high)) or 0.5
    bottom = min(0.0, low) if from_zero else low - room
    y_range = (low / 2, high * 2) if is_log else (bottom, high + room)
    pad = max(0.35, (last - first) * 0.03)
    plot = _Plot(width, (first - pad, last + pad), y_range, is_log=is_log)
    for band in bands:
        start, end = max(plot.x[0], band.first - 0.5), min(plot.x[1], band.last + 0.5)
        plot.add(
            "rect", x=plot.across(start), width=plot.across(end) - plot.across(start), y=plot.top,
            height=plot.height - plot.top - plot.bottom, fill="var(--line)", opacity="0.6",
        )  # fmt: skip
    plot.y_axis(y_label, _y_ticks(plot, unit), unit)
    plot.x_axis("iteration", _iterations(first, last))
    if limit is not None:
        at = plot.down(limit[1])
        ends = (plot.left, plot.width - plot.right)
        plot.rule(ends, (at, at), "slate", stroke_width="1.25", stroke_dasharray="2.5 2.5")
    for line in lines:
        _draw_line(plot, line, unit, lowest)
    for mark in marks:
        _draw_mark(plot, mark, unit)
    if limit is not None:
        halo = {"stroke": "var(--surface)", "stroke_width": "4", "paint_order": "stroke"}
        plot.write(limit[0], plot.width - plot.right, plot.down(limit[1]) - 5, "end", **halo)
    return plot.svg(name)


def _y_ticks(plot: _Plot, unit: Unit) -> list[float]:
    low, high = plot.y
    if plot.is_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers][:: -(-len(powers) // 6) or 1]
    return _times(high, 5) if unit == "seconds" and low >= 0 else _ticks(low, high, 5)


def _draw_line(plot: _Plot, line: LineSeries, unit: Unit, lowest: float) -> None:
    stride = max(1, -(-len(line.x) // MAX_POINTS))
    points = [
        (x, y, plot.across(x), plot.down(max(lowest, y)))
        for x, y in zip(line.x[::stride], line.y[::stride], strict=True)
    ]
    color = f"var(--{line.color})"
    path = " ".join(f"{_short(right)},{_short(down)}" for _, _, right, down in points)
    style = {"stroke_width": "2.25", "stroke_linecap": "round"}
    if line.is_secondary:
        style = {"stroke_width": "1.6", "stroke_dasharray": "6.4 4"}
    plot.add("polyline", points=path, fill="none", stroke=color, **style)
    for x, y, right, down in points if len(points) <= MAX_MARKED_POINTS else ():
        plot.add(
            "circle", cx=right, cy=down, r=2.75 if line.is_secondary else 3.5, fill=color,
            stroke="var(--surface)", stroke_width="1.25",
            tip=f"{line.label}, iteration {x:g}: {_FORMATS[unit](y)}",
        )  # fmt: skip


def _draw_mark(plot: _Plot, mark: Mark, unit: Unit) -> None:
    right, down = plot.across(mark.x), plot.down(mark.y)
    spread = ""
    if mark.error > 0:
        spread = f" +- {_FORMATS[unit](mark.error)}"
        ends = (plot.down(mark.y - mark.error), plot.down(mark.y + mark.error))
        plot.rule((right, right), ends, mark.color, stroke_width="1.5")
        for end in ends:
            plot.rule((right - 4, right + 4), (end, end), mark.color, stroke_width="1.5")
    plot.add(
        "path", d=f"M{right:.2f},{down - 6:.2f}l6,6l-6,6l-6,-6z", fill=f"var(--{mark.color})",
        stroke="var(--surface)", stroke_width="1.5",
        tip=f"{mark.label}: {_FORMATS[unit](mark.y)}{spread}",
    )  # fmt: skip


def stacked_bars(
    name: str, parts: Sequence[LineSeries], *, y_label: str, unit: Unit, width: int = 540
) -> str:
    """Draw one stacked bar per iteration as SVG; neighbours are averaged beyond `MAX_BARS`.

    Args:
        name: what the chart shows, for screen readers.
        parts: layers from the bottom up, all of the same iterations.
        y_label: name and unit of the vertical axis.
        unit: how values are written.
        width: CSS pixels.
    """
    stride = -(-len(parts[0].x) // MAX_BARS)
    at, *layers = (_average(values, stride) for values in (parts[0].x, *(p.y for p in parts)))
    bar = 0.68 * stride
    # Few bars would be as broad as the page.
    room = bar / 2 + max(0.0, 5 - len(at)) * 0.5 * stride
    pad = max(0.35, (at[-1] - at[0]) * 0.03) + room
    highest = max(min(max(map(sum, zip(*layers, strict=True))), LARGEST) * 1.06, 1e-9)
    plot = _Plot(width, (at[0] - pad, at[-1] + pad), (0.0, highest))
    plot.y_axis(y_label, _y_ticks(plot, unit), unit)
    plot.x_axis("iteration", _iterations(at[0], at[-1]))
    base = [0.0] * len(at)
    for part, heights in zip(parts, layers, strict=True):
        for place, (x, height) in enumerate(zip(at, heights, strict=True)):
            top, left = plot.down(base[place] + height), plot.across(x - bar / 2)
            plot.add(
                "rect", x=left, width=plot.across(x + bar / 2) - left, y=top,
                height=plot.down(base[place]) - top, fill=f"var(--{part.color})",
                stroke="var(--surface)", stroke_width="0.75",
                tip=f"{part.label}, iteration {x:g}: {_FORMATS[unit](height)}",
            )  # fmt: skip
            base[place] += height
    return plot.svg(name)


def _average(values: Sequence[float], stride: int) -> list[float]:
    return [fmean(values[i : i + stride]) for i in range(0, len(values), stride)]


def table(
    lines: Sequence[LineSeries], unit: Unit, most: int = MAX_MARKED_POINTS
) -> tuple[list[str], list[list[str]]]:
    """Return the values of curves by iteration; no rows where one has more than `most` points."""
    heads = ["iteration", *(line.label for line in lines)]
    if not lines or max(len(line.x) for line in lines) > most:
        return heads, []
    known = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    return heads, [
        [f"{x:g}", *(_FORMATS[unit](points[x]) if x in points else "" for points in known)]
        for x in sorted({x for points in known for x in points})
    ]


def timeline(
    name: str,
    rows: Sequence[str],
    spans: Sequence[Span],
    *,
    width: int = WIDE,
    since: str = "the run began",
) -> str:
    """Draw when each task ran as SVG.

    Args:
        name: what the chart shows, for screen readers.
        rows: labels from top to bottom.
        spans: bars; each names one of `rows`.
        width: CSS pixels.
        since: what happened at second 0.
    """
    end = max(span.start + span.length for span in spans) or 1.0
    height = 52 + 26 * len(rows)
    plot = _Plot(
        width, (0.0, end), (-0.6, len(rows) - 0.4), height=height, left=96, right=34, top=6
    )
    ticks = _times(end, width // 120)
    for tick in ticks:
        plot.rule((plot.across(tick),) * 2, (plot.top, height - plot.bottom), "grid")
    plot.x_axis(f"time since {since}", [(tick, seconds(tick)) for tick in ticks])
    for place, label in enumerate(reversed(rows)):
        plot.write(label, plot.left - 7, plot.down(place) + 4, "end")
    for span in _merge(spans, end) if len(spans) > MAX_SPANS else spans:
        top = plot.down(len(rows) - 1 - rows.index(span.row) + 0.32)
        left = plot.across(span.start)
        plot.add(
            "rect", x=left, width=plot.across(span.start + max(span.length, end * 0.0012)) - left,
            y=top, height=plot.down(0) - plot.down(0.64), fill=f"var(--{span.color})",
            stroke="var(--surface)", stroke_width="0.75", tip=span.tip,
        )  # fmt: skip
    return plot.svg(name)


def _merge(spans: Sequence[Span], end: float) -> list[Span]:
    """Join neighbours of one row and colour that a reader could not tell apart."""
    merged = []
    ordered = sorted(spans, key=lambda span: (span.row, span.color, span.start))
    for (row, color), own in groupby(ordered, key=lambda span: (span.row, span.color)):
        bars: list[list[float]] = []
        for span in own:
            stop = span.start + span.length
            if bars and span.start - bars[-1][1] < end / 60:
                bars[-1] = [bars[-1][0], max(bars[-1][1], stop), bars[-1][2] + 1]
            else:
                bars.append([span.start, stop, 1])
        merged += [Span(row, color, a, b - a, f"{row}: {n:.0f} tasks") for a, b, n in bars]
    return merged
