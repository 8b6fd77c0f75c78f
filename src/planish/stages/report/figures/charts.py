"""Kinds of charts as SVG: lines over iterations, stacked bars, a timeline.

They take plain numbers and know nothing of metric names. Colours are variables of the page, so that
one drawing serves light and dark pages. A chart of many points is thinned out, so that the page of
a run of a thousand iterations is not larger than that of a short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from planish.stages.report.figures.panels import Panel
from planish.stages.report.text import FORMATS, seconds

MAX_MARKED_POINTS = 40
"""Lines with more points than this are drawn without a marker and a tool tip on each."""
MAX_POINTS = 400
MAX_BARS = 60
MAX_SPANS = 600
"""A timeline with more bars joins neighbours."""
LARGEST = 1e300
"""What is farther from 0 is drawn at the edge: sums and differences of it would overflow."""
MIDDLE, WIDE, NARROW = 540, 1124, 380
"""Widths in CSS pixels: of one column, of the page, and of a telephone."""

_ROUND_SECONDS = (
    *(10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200),
    *(86400 * 2**n for n in range(40)),
)

Range = tuple[float, float]


class Chart(NamedTuple):
    """A finished chart."""

    title: str
    svg: str
    narrow: str
    """The same for a narrow window, where the other would be too small to read."""
    hint: str
    legend: Sequence[tuple[str, str, str]] = ()
    """Label, name of the colour and kind (line, dash, box, mark)."""
    values: Sequence[Sequence[str]] = ()
    """The numbers as a table, its heads first; empty for many points."""
    is_wide: bool = False


class Line(NamedTuple):
    """One curve, or one layer of stacked bars."""

    label: str
    color: str
    points: Mapping[int, float]
    """Iteration to value, iterations increasing."""
    is_secondary: bool = False


class Mark(NamedTuple):
    """One measured point with its standard error, drawn as a diamond."""

    label: str
    color: str
    x: int
    y: float
    error: float = 0.0


class Span(NamedTuple):
    """One bar of the timeline, in seconds since its beginning."""

    row: str
    color: str
    start: float
    length: float
    tip: str


@dataclass
class _Plot:
    """A drawing under construction: values from `x` and `y` fill the box inside the margins."""

    width: int
    x: Range
    y: Range
    height: int = 236
    left: int = 52
    right: int = 14
    top: int = 30
    bottom: int = 44
    is_log: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def ends(self) -> Range:
        return self.left, self.width - self.right

    def across(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / (high - low) * (self.ends[1] - self.left)

    def down(self, y: float) -> float:
        scale = math.log if self.is_log else float
        low, high, y = map(scale, (*self.y, min(max(y, self.y[0]), self.y[1])))
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

    def rule(self, x: Range, y: Range, color: str, **more: str) -> None:
        self.add("line", x1=x[0], x2=x[1], y1=y[0], y2=y[1], stroke=f"var(--{color})", **more)

    def bar(self, x: Range, y: Range, color: str, tip: str) -> None:
        left, top = self.across(x[0]), self.down(y[1])
        self.add(
            "rect", x=left, width=self.across(x[1]) - left, y=top, height=self.down(y[0]) - top,
            fill=f"var(--{color})", stroke="var(--surface)", stroke_width="0.75", tip=tip,
        )  # fmt: skip

    def axes(self, panel: Panel, first: float, last: float) -> None:
        """Draw heights in the unit of the panel, and the iterations from `first` to `last`."""
        self.write(panel.y_label, 2, self.top - 14)
        low, high = self.y
        if self.is_log:
            powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
            heights = [10.0**power for power in powers][:: -(-len(powers) // 6) or 1]
        else:
            heights = _ticks(low, high, 5, is_time=panel.unit == "seconds")
        for height in heights:
            at = self.down(height)
            self.rule(self.ends, (at, at), "grid")
            self.write(FORMATS[panel.unit](height), self.left - 7, at + 4, "end")
        ticks = _ticks(first, max(last, first + 1), 10, factors=(1, 2, 5, 10), least=1.0)
        self.x_axis("iteration", [(tick, f"{tick:.0f}") for tick in ticks if tick <= last])

    def x_axis(self, label: str, ticks: Iterable[tuple[float, str]]) -> None:
        base = self.height - self.bottom
        self.rule(self.ends, (base, base), "grid")
        for tick, text in ticks:
            self.write(text, self.across(tick), base + 18, "middle")
        self.write(label, sum(self.ends) / 2, self.height - 8, "middle")

    def svg(self, name: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(name)}" style="max-width: {self.width}px; '
            f'aspect-ratio: {self.width} / {self.height}; font-size: 12px">'
            f"{''.join(self.parts)}</svg>"
        )


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _ticks(
    low: float,
    high: float,
    most: int,
    *,
    factors: Sequence[float] = (1, 2, 2.5, 5, 10),
    least: float = 0.0,
    is_time: bool = False,
) -> list[float]:
    """Return the multiples of the smallest round step of which at most `most` fit."""
    size = (high - low) / most
    steps = [max(least, factor * 10.0 ** math.floor(math.log10(size))) for factor in factors]
    if is_time and high >= 30:
        steps = [*_ROUND_SECONDS]
    step = next(step for step in steps if step * (1 + 1e-9) >= size)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * count for count in range(first, last + 1)]


def _values(panel: Panel, lines: Sequence[Line], most: int) -> list[list[str]]:
    """Return a row of heads and one for each iteration; none where a line has too many points."""
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
    """Draw curves over iterations, at least one unless there is a mark.

    `limit` is label and height of a dotted line across the chart; `bands` are the first and the
    last iteration of each stretch of value pretraining, which is shaded.
    """
    heights = [max(panel.floor, y) for line in lines for y in line.points.values()]
    heights += [mark.y + sign * mark.error for mark in marks for sign in (-1, 1)]
    heights += [limit[1]] if limit else []
    heights = [min(max(y, -LARGEST), LARGEST) for y in heights]
    # A curve that begins later keeps the axis of the other charts.
    xs = [x for line in lines for x in line.points] + [mark.x for mark in marks]
    xs += [x for band in bands for x in band]
    first, last, low, high = min(xs), max(xs), min(heights), max(heights)
    is_log = panel.is_log and low > 0
    room = 0.09 * (high - low or abs(high)) or 0.5
    bottom = min(0.0, low) if panel.from_zero else low - room
    y_range = (low / 2, high * 2) if is_log else (bottom, high + room)
    pad = max(0.35, (last - first) * 0.03)

    def draw(width: int) -> str:
        plot = _Plot(width, (first - pad, last + pad), y_range, is_log=is_log)
        for begin, end in bands:
            left = plot.across(max(plot.x[0], begin - 0.5))
            plot.add(
                "rect", x=left, width=plot.across(min(plot.x[1], end + 0.5)) - left, y=plot.top,
                height=plot.height - plot.top - plot.bottom, fill="var(--line)", opacity="0.6",
            )  # fmt: skip
        plot.axes(panel, first, last)
        if limit:
            at = (plot.down(limit[1]),) * 2
            plot.rule(plot.ends, at, "slate", stroke_width="1.25", stroke_dasharray="2.5 2.5")
        for line in lines:
            _draw_line(plot, line, panel)
        for mark in marks:
            _draw_mark(plot, mark, FORMATS[panel.unit])
        if limit:
            halo = {"stroke": "var(--surface)", "stroke_width": "4", "paint_order": "stroke"}
            plot.write(limit[0], plot.ends[1], at[0] - 5, "end", **halo)
        return plot.svg(panel.title)

    is_named = len(lines) > 1 or len(panel.curves) != 1
    keys = [(line.label, line.color, "dash" if line.is_secondary else "line") for line in lines]
    keys = (keys if is_named else []) + [("value pretraining", "line", "box")] * bool(bands)
    keys += [("held out", marks[0].color, "mark")] if marks else []
    values = _values(panel, lines, MAX_MARKED_POINTS)
    return Chart(panel.title, draw(MIDDLE), draw(NARROW), hint or panel.hint, keys, values)


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
    plot.add("polyline", points=path, fill="none", stroke=color, **style)
    for x, y, right, down in points if len(points) <= MAX_MARKED_POINTS else ():
        plot.add(
            "circle", cx=right, cy=down, r=2.75 if line.is_secondary else 3.5, fill=color,
            stroke="var(--surface)", stroke_width="1.25",
            tip=f"{line.label}, iteration {x}: {FORMATS[panel.unit](y)}",
        )  # fmt: skip


def _draw_mark(plot: _Plot, mark: Mark, write: Callable[[float], str]) -> None:
    right, down = plot.across(mark.x), plot.down(mark.y)
    tip = f"{mark.label}: {write(mark.y)}"
    if mark.error:
        tip += f" +- {write(mark.error)}"
        low, high = (plot.down(mark.y + sign * mark.error) for sign in (-1, 1))
        plot.rule((right, right), (low, high), mark.color, stroke_width="1.5")
        for end in (low, high):
            plot.rule((right - 4, right + 4), (end, end), mark.color, stroke_width="1.5")
    plot.add(
        "path", d=f"M{right:.2f},{down - 6:.2f}l6,6l-6,6l-6,-6z", fill=f"var(--{mark.color})",
        stroke="var(--surface)", stroke_width="1.5", tip=tip,
    )  # fmt: skip


def bar_chart(panel: Panel, layers: Sequence[Line], *, is_wide: bool = False) -> Chart:
    """Draw a stacked bar for each iteration; neighbours are averaged beyond `MAX_BARS`.

    `layers` go from the bottom up and have the same iterations; `is_wide` takes both columns of
    the page.
    """
    stride = -(-len(layers[0].points) // MAX_BARS)

    def average(values: Iterable[float]) -> list[float]:
        each = list(values)
        return [fmean(each[i : i + stride]) for i in range(0, len(each), stride)]

    at = average(layers[0].points)
    tops = [average(layer.points.values()) for layer in layers]
    bar = 0.68 * stride
    # Few bars would be as broad as the page.
    room = bar / 2 + max(0.0, 5 - len(at)) * 0.5 * stride
    pad = max(0.35, (at[-1] - at[0]) * 0.03) + room
    highest = max(min(max(map(sum, zip(*tops, strict=True))), LARGEST) * 1.06, 1e-9)

    def draw(width: int) -> str:
        plot = _Plot(width, (at[0] - pad, at[-1] + pad), (0.0, highest))
        plot.axes(panel, at[0], at[-1])
        base = [0.0] * len(at)
        for layer, heights in zip(layers, tops, strict=True):
            for place, (x, height) in enumerate(zip(at, heights, strict=True)):
                tip = f"{layer.label}, iteration {x:g}: {FORMATS[panel.unit](height)}"
                top = base[place] + height
                plot.bar((x - bar / 2, x + bar / 2), (base[place], top), layer.color, tip)
                base[place] = top
        return plot.svg(panel.title)

    broad = draw(WIDE if is_wide else MIDDLE)
    keys = [(layer.label, layer.color, "box") for layer in layers]
    values = _values(panel, layers, MAX_BARS)
    return Chart(panel.title, broad, draw(NARROW), panel.hint, keys, values, is_wide)


def timeline(
    panel: Panel, rows: Sequence[str], spans: Sequence[Span], since: str = "the run began"
) -> Chart:
    """Draw when each task ran, in a wide chart.

    `rows` are labels from top to bottom, one of which each span names; `since` says what happened
    at second 0.
    """
    end = max(span.start + span.length for span in spans) or 1.0
    shown = _merge(spans, end) if len(spans) > MAX_SPANS else spans

    def draw(width: int) -> str:
        y_range, height = (-0.6, len(rows) - 0.4), 52 + 26 * len(rows)
        plot = _Plot(width, (0.0, end), y_range, height=height, left=96, right=34, top=6)
        ticks = _ticks(0.0, end, width // 120, is_time=True)
        for tick in ticks:
            plot.rule((plot.across(tick),) * 2, (plot.top, height - plot.bottom), "grid")
        plot.x_axis(f"time since {since}", [(tick, seconds(tick)) for tick in ticks])
        for place, label in enumerate(reversed(rows)):
            plot.write(label, plot.left - 7, plot.down(place) + 4, "end")
        for span in shown:
            y = len(rows) - 1 - rows.index(span.row)
            stop = span.start + max(span.length, end * 0.0012)
            plot.bar((span.start, stop), (y - 0.32, y + 0.32), span.color, span.tip)
        return plot.svg(panel.title)

    return Chart(panel.title, draw(WIDE), draw(NARROW), panel.hint, is_wide=True)


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
