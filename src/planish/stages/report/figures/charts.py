"""Kinds of charts as SVG: lines over iterations, stacked bars, a timeline.

The charts take plain numbers and do not depend on metric names. Colours are CSS variables and
horizontal positions are per cent of the width, so one drawing fits light and dark, wide and narrow
pages. A chart with many points is thinned out, so the page of a long run is not larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from planish.stages.report.figures.panels import Panel
from planish.stages.report.text import FORMATS, seconds

MAX_MARKED_POINTS = 40
"""Lines with more points have no marker and tool tip on each point."""
MAX_POINTS = 400
MAX_BARS = 60
MAX_SPANS = 600
"""Number of bars above which a timeline joins neighbours."""

_ROUND_SECONDS = (
    *(10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200),
    *(86400 * 2**n for n in range(40)),
)

Range = tuple[float, float]


class Chart(NamedTuple):
    """A finished chart."""

    title: str
    svg: str
    hint: str
    legend: Sequence[tuple[str, str, str]] = ()
    """Label, name of the colour and kind (line, dash, box, mark)."""
    values: Sequence[Sequence[str]] = ()
    """Numbers of the chart as a table, column heads first; empty for many points."""
    is_wide: bool = False


class Line(NamedTuple):
    """One curve, or one layer of stacked bars."""

    label: str
    color: str
    points: Mapping[int, float]
    """Iteration, increasing, to value."""
    is_secondary: bool = False


class Mark(NamedTuple):
    """One measured point with its standard error, drawn as a diamond."""

    label: str
    color: str
    x: int
    y: float
    error: float = 0.0


class Span(NamedTuple):
    """One bar of the timeline, in seconds since the start of the timeline."""

    row: str
    color: str
    start: float
    length: float
    tip: str


@dataclass
class _Plot:
    """A drawing under construction: range `x` over its width, `y` over its height without margins.

    Labels of the vertical axis are in the margins of the page, left of 0 and right of 100 %.
    """

    x: Range
    y: Range
    height: int = 236
    left: int = 52
    right: int = 14
    top: int = 30
    bottom: int = 44
    is_log: bool = False
    parts: list[str] = field(default_factory=list)

    def across(self, x: float) -> float:
        low, high = self.x
        return (x - low) / (high - low) * 100

    def down(self, y: float) -> float:
        scale = math.log if self.is_log else float
        low, high, y = map(scale, (*self.y, y))
        return self.top + (high - y) / (high - low) * (self.height - self.top - self.bottom)

    def add(self, name: str, *inside: str, tip: str = "", **attributes: float | str) -> None:
        self.parts.append(_element(name, *inside, tip=tip, **attributes))

    def write(
        self, text: str, x: float | str, y: float, anchor: str = "start", **more: str
    ) -> None:
        more = {"text_anchor": anchor, "fill": "var(--muted)", **more}
        self.add("text", escape(text, quote=False), x=x, y=y, **more)

    def rule(self, x: Range, y: Range, color: str, **more: str) -> None:
        x1, x2 = map(_percent, x)
        self.add("line", x1=x1, x2=x2, y1=y[0], y2=y[1], stroke=f"var(--{color})", **more)

    def box(self, x: Range, y: Range, color: str, **more: str) -> None:
        (left, right), (bottom, top) = map(self.across, x), map(self.down, y)
        self.add(
            "rect", x=_percent(left), width=_percent(right - left), y=top, height=bottom - top,
            fill=f"var(--{color})", **more,
        )  # fmt: skip

    def bar(self, x: Range, y: Range, color: str, tip: str) -> None:
        self.box(x, y, color, stroke="var(--surface)", stroke_width="0.75", tip=tip)

    def axes(self, panel: Panel, first: float, last: float) -> None:
        """Draw the vertical axis in the panel's unit, and iterations from `first` to `last`."""
        self.write(panel.y_label, 2 - self.left, self.top - 14)
        low, high = self.y
        if self.is_log:
            powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
            heights = [10.0**power for power in powers][:: -(-len(powers) // 6) or 1]
        else:
            heights = _ticks(low, high, 5, is_time=panel.unit == "seconds")
        for height in heights:
            at = self.down(height)
            self.rule((0, 100), (at, at), "grid")
            self.write(FORMATS[panel.unit](height), -7, at + 4, "end")
        ticks = _ticks(first, max(last, first + 1), 10, factors=(1, 2, 5, 10), least=1.0)
        self.x_axis("iteration", {tick: f"{tick:.0f}" for tick in ticks if tick <= last})

    def x_axis(self, label: str, ticks: Mapping[float, str], *, in_narrow: int = 1) -> None:
        """Draw the horizontal axis; a narrow window shows every `in_narrow`th label."""
        base = self.height - self.bottom
        self.rule((0, 100), (base, base), "grid")
        for place, (tick, text) in enumerate(ticks.items()):
            more = {"class_": "dense"} if place % in_narrow else {}
            self.write(text, _percent(self.across(tick)), base + 18, "middle", **more)
        self.write(label, "50%", self.height - 8, "middle")

    def svg(self, name: str) -> str:
        style = f"height: {self.height}px; width: calc(100% - {self.left + self.right}px); "
        style += f"margin-left: {self.left}px; font-size: 12px"
        xmlns = "http://www.w3.org/2000/svg"
        return _element("svg", *self.parts, xmlns=xmlns, role="img", aria_label=name, style=style)


def _element(name: str, *inside: str, tip: str = "", **attributes: float | str) -> str:
    """Return an element as markup; `inside` is markup too, all other arguments are plain text."""
    if tip:
        attributes["class_"] = "tip"
        inside = (f"<title>{escape(tip)}</title>", *inside)
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{named}>{''.join(inside)}</{name}>" if inside else f"<{name}{named}/>"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _percent(value: float) -> str:
    return f"{_short(value)}%"


def _ticks(
    low: float,
    high: float,
    most: int,
    *,
    factors: Sequence[float] = (1, 2, 2.5, 5, 10),
    least: float = 0.0,
    is_time: bool = False,
) -> list[float]:
    """Return the multiples, in range, of the smallest round step of at least range / `most`."""
    size = (high - low) / most
    steps = [max(least, factor * 10.0 ** math.floor(math.log10(size))) for factor in factors]
    if is_time and high >= 30:
        steps = [*_ROUND_SECONDS]
    step = next(step for step in steps if step * (1 + 1e-9) >= size)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * count for count in range(first, last + 1)]


def _values(panel: Panel, lines: Sequence[Line], most: int) -> list[list[str]]:
    """Return a row of heads and one per iteration; empty if a line has more than `most` points."""
    if not lines or max(len(line.points) for line in lines) > most:
        return []
    write = FORMATS[panel.unit]
    return [
        ["iteration", *(line.label for line in lines)],
        *(
            [f"{x}", *(write(line.points[x]) if x in line.points else "" for line in lines)]
            for x in sorted({x for line in lines for x in line.points})
        ),
    ]


def line_chart(
    panel: Panel,
    lines: Sequence[Line],
    *,
    marks: Sequence[Mark] = (),
    limit: tuple[str, float] | None = None,
    bands: Sequence[tuple[int, int]] = (),
    hint: str = "",
) -> Chart:
    """Draw curves over iterations; at least one line or mark is required.

    `limit` is label and value of a dotted horizontal line; `bands` are the first and the last
    iteration of each shaded range of value pretraining.
    """
    heights = [max(panel.floor, y) for line in lines for y in line.points.values()]
    heights += [mark.y + sign * mark.error for mark in marks for sign in (-1, 1)]
    heights += [limit[1]] if limit else []
    # Bands count too, so a curve that starts after them has the same axis as other charts.
    xs = [x for line in lines for x in line.points] + [mark.x for mark in marks]
    xs += [x for band in bands for x in band]
    first, last, low, high = min(xs), max(xs), min(heights), max(heights)
    is_log = panel.is_log and low > 0
    room = 0.09 * (high - low or abs(high)) or 0.5
    bottom = min(0.0, low) if panel.from_zero else low - room
    y_range = (low / 2, high * 2) if is_log else (bottom, high + room)
    pad = max(0.35, (last - first) * 0.03)
    plot = _Plot((first - pad, last + pad), y_range, is_log=is_log)
    for begin, end in bands:
        stretch = max(plot.x[0], begin - 0.5), min(plot.x[1], end + 0.5)
        plot.box(stretch, plot.y, "line", opacity="0.6")
    plot.axes(panel, first, last)
    for line in lines:
        _draw_line(plot, line, panel)
    for mark in marks:
        _draw_mark(plot, mark, panel)
    if limit:
        at = plot.down(limit[1])
        plot.rule((0, 100), (at, at), "slate", stroke_width="1.25", stroke_dasharray="2.5 2.5")
        halo = {"stroke": "var(--surface)", "stroke_width": "4", "paint_order": "stroke"}
        plot.write(limit[0], "100%", at - 5, "end", **halo)
    is_named = len(lines) > 1 or len(panel.curves) != 1
    keys = [(line.label, line.color, "dash" if line.is_secondary else "line") for line in lines]
    keys = (keys if is_named else []) + [("value pretraining", "line", "box")] * bool(bands)
    keys += [("held out", marks[0].color, "mark")] if marks else []
    values = _values(panel, lines, MAX_MARKED_POINTS)
    return Chart(panel.title, plot.svg(panel.title), hint or panel.hint, keys, values)


def _draw_line(plot: _Plot, line: Line, panel: Panel) -> None:
    stride = max(1, -(-len(line.points) // MAX_POINTS))
    points = [
        (x, y, plot.across(x), plot.down(max(panel.floor, y)))
        for x, y in list(line.points.items())[::stride]
    ]
    color = f"var(--{line.color})"
    path = " ".join(f"{_short(right)},{_short(down)}" for _, _, right, down in points)
    style = {"stroke_width": "2.25", "stroke_linecap": "round"}
    if line.is_secondary:
        style = {"stroke_width": "1.6", "stroke_dasharray": "6.4 4"}
    # Points of a path cannot be per cent: a drawing of 100 units is stretched to the width.
    curve = _element(
        "polyline", points=path, fill="none", stroke=color, vector_effect="non-scaling-stroke",
        **style,
    )  # fmt: skip
    plot.add(
        "svg", curve, viewBox=f"0 0 100 {plot.height}", preserveAspectRatio="none",
        overflow="visible",
    )  # fmt: skip
    for x, y, right, down in points if len(points) <= MAX_MARKED_POINTS else ():
        plot.add(
            "circle", cx=_percent(right), cy=down, r=2.75 if line.is_secondary else 3.5, fill=color,
            stroke="var(--surface)", stroke_width="1.25",
            tip=f"{line.label}, iteration {x}: {FORMATS[panel.unit](y)}",
        )  # fmt: skip


def _draw_mark(plot: _Plot, mark: Mark, panel: Panel) -> None:
    write, down = FORMATS[panel.unit], plot.down(mark.y)
    color, tip = f"var(--{mark.color})", f"{mark.label}: {write(mark.y)}"
    parts = []
    if mark.error:
        tip += f" +- {write(mark.error)}"
        low, high = (_short(plot.down(mark.y + sign * mark.error) - down) for sign in (-1, 1))
        path = f"M0,{low}V{high}M-4,{low}h8M-4,{high}h8"
        parts.append(_element("path", d=path, stroke=color, stroke_width="1.5"))
    diamond = {"fill": color, "stroke": "var(--surface)", "stroke_width": "1.5", "tip": tip}
    parts.append(_element("path", d="M0,-6l6,6l-6,6l-6,-6z", **diamond))
    plot.add("svg", *parts, x=_percent(plot.across(mark.x)), y=down, overflow="visible")


def bar_chart(panel: Panel, layers: Sequence[Line], *, is_wide: bool = False) -> Chart:
    """Draw a stacked bar for each iteration; average neighbours above `MAX_BARS` iterations.

    `layers`, from the bottom up, have the same iterations. With `is_wide` the chart covers both
    columns of the page.
    """
    stride = -(-len(layers[0].points) // MAX_BARS)

    def average(values: Iterable[float]) -> list[float]:
        each = list(values)
        return [fmean(each[i : i + stride]) for i in range(0, len(each), stride)]

    at = average(layers[0].points)
    tops = [average(layer.points.values()) for layer in layers]
    bar = 0.68 * stride
    # Without this room, few bars would be as wide as the page.
    room = bar / 2 + max(0.0, 5 - len(at)) * 0.5 * stride
    pad = max(0.35, (at[-1] - at[0]) * 0.03) + room
    highest = max(max(map(sum, zip(*tops, strict=True))) * 1.06, 1e-9)
    plot = _Plot((at[0] - pad, at[-1] + pad), (0.0, highest))
    plot.axes(panel, at[0], at[-1])
    base = [0.0] * len(at)
    for layer, heights in zip(layers, tops, strict=True):
        for place, (x, height) in enumerate(zip(at, heights, strict=True)):
            tip = f"{layer.label}, iteration {x:g}: {FORMATS[panel.unit](height)}"
            top = base[place] + height
            plot.bar((x - bar / 2, x + bar / 2), (base[place], top), layer.color, tip)
            base[place] = top
    keys = [(layer.label, layer.color, "box") for layer in layers]
    values = _values(panel, layers, MAX_BARS)
    return Chart(panel.title, plot.svg(panel.title), panel.hint, keys, values, is_wide)


def timeline(
    panel: Panel, rows: Sequence[str], spans: Sequence[Span], since: str = "the run began"
) -> Chart:
    """Draw when each task ran, in a wide chart.

    `rows` are the labels from top to bottom; each span names one of them. `since` is the event at
    second 0, in words.
    """
    end = max(span.start + span.length for span in spans) or 1.0
    y_range, height = (-0.6, len(rows) - 0.4), 52 + 26 * len(rows)
    plot = _Plot((0.0, end), y_range, height=height, left=96, right=34, top=6)
    ticks = {tick: seconds(tick) for tick in _ticks(0.0, end, 9, is_time=True)}
    for tick in ticks:
        plot.rule((plot.across(tick),) * 2, (plot.top, height - plot.bottom), "grid")
    plot.x_axis(f"time since {since}", ticks, in_narrow=3)
    for place, label in enumerate(reversed(rows)):
        plot.write(label, -7, plot.down(place) + 4, "end")
    for span in _merge(spans, end) if len(spans) > MAX_SPANS else spans:
        y = len(rows) - 1 - rows.index(span.row)
        stop = span.start + max(span.length, end * 0.0012)
        plot.bar((span.start, stop), (y - 0.32, y + 0.32), span.color, span.tip)
    return Chart(panel.title, plot.svg(panel.title), panel.hint, is_wide=True)


def _merge(spans: Sequence[Span], end: float) -> list[Span]:
    """Join neighbours of one row and colour that are too close to be distinguished."""
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
