"""The timing records of a save or load as one HTML page: heat map, timeline, table of stages.

The page needs no network, no scripts and no other file. Names in the records are untrusted: they
are escaped, cut and freed of control characters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from planish.checkpoint.watch.heatmap import (
    LEVELS,
    HeatMap,
    Lane,
    Row,
    bytes_text,
    heat_map,
    lanes,
    rate_text,
    seconds_text,
    slowest_rank,
    stage_number,
    stage_rows,
)
from planish.checkpoint.watch.monitor import rank_seconds
from planish.checkpoint.watch.report_text import printable, total_bytes, wall_seconds
from planish.checkpoint.watch.timings import Timeline

_CHART_WIDTH = 1128.0
_LANE_HEIGHT = 24
_TOP = 26
_RIGHT = 290.0
_NUM_COLORS = 7
_MAX_LANES = 60
_MAX_BARS = 400
_MAX_LISTED = 20


@dataclass
class Card:
    """One key number."""

    title: str
    """What it is."""
    value: str
    """The number."""
    note: str = ""
    """Small print."""


@dataclass
class Page:
    """Everything that the template prints."""

    title: str
    """Place of the checkpoint."""
    op: str
    """save or load."""
    state: str
    """Words of the badge."""
    cards: list[Card]
    """Key numbers."""
    stragglers: list[str]
    """One sentence each."""
    straggler_title: str
    """Heading above them."""
    map_title: str
    """Heading of the heat map."""
    map_lead: str
    """How to read it."""
    scale: tuple[str, str]
    """Ends of the colour scale."""
    rows: list[dict[str, Any]]
    """Machines with their cells."""
    cell_px: int
    """Width of a cell."""
    tall_px: int
    """Height of a cell."""
    name_px: int
    """Width of the column of names."""
    num_columns: int
    """Machines side by side."""
    charts: list[dict[str, Any]]
    """Timelines."""
    stages: list[dict[str, Any]]
    """Rows of the table."""
    num_records: int
    """Records behind the page."""
    num_ranks: int
    """Ranks behind the page."""
    levels: range = field(default=range(LEVELS))
    """Shades."""


def html_report(timeline: Timeline, *, title: str, rank: int | None = None) -> str:
    """Return the page.

    Args:
        timeline: records of all ranks.
        title: place of the checkpoint.
        rank: whose timeline to draw; None for the slowest, and the median one beside it.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("planish.checkpoint.watch"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (files("planish.checkpoint.watch") / "templates" / "timings.css").read_text("utf-8")
    page = _page(timeline, title, rank)
    # The style sheet is ours; escaping it would spoil its quotation marks.
    return environment.get_template("timings.html.j2").render(
        page=page, css=environment.filters["safe"](css)
    )


def _page(timeline: Timeline, title: str, rank: int | None) -> Page:
    grid = heat_map(timeline)
    op = timeline.records[0].op if timeline.records else "save"
    name_px = min(240, 12 + 8 * max((len(row.host) for row in grid.rows), default=0))
    sizes = _cell_sizes(grid, name_px)
    slow = [str(one) for one in grid.stragglers[:_MAX_LISTED]]
    what = "One cell is a machine, by its slowest rank"
    what = what if grid.is_by_host else "One row is a machine, one cell a rank"
    chosen = _chosen_ranks(timeline, rank)
    return Page(
        title=printable(title, limit=300),
        op=op,
        state=_count(len(grid.stragglers), "straggler") if slow else "no stragglers",
        cards=_cards(timeline, grid),
        stragglers=[printable(line, limit=300) for line in slow],
        straggler_title=f"{_count(len(grid.stragglers), 'rank')} held up the others",
        map_title="Ranks by time",
        map_lead=(
            f"{what}: from the start to the end of its own work, without waiting for others."
        ),
        scale=(seconds_text(grid.bounds[0]), seconds_text(grid.bounds[-1])),
        rows=[_row(row, is_numbered=sizes[0] >= 44) for row in grid.rows],
        cell_px=sizes[0],
        tall_px=sizes[1],
        name_px=name_px,
        num_columns=sizes[2],
        charts=_charts(timeline, chosen),
        stages=[_stage(row) for row in stage_rows(timeline)],
        num_records=len(timeline.records),
        num_ranks=grid.num_ranks,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cards(timeline: Timeline, grid: HeatMap) -> list[Card]:
    seconds, moved = wall_seconds(timeline), total_bytes(timeline)
    machines = len({record.host for record in timeline.records if record.host})
    retries = sum(record.retries for record in timeline.records)
    return [
        Card("End to end", seconds_text(seconds), "first start to last end"),
        Card(
            "Slowest rank",
            seconds_text(grid.max_seconds),
            f"median {seconds_text(grid.median_seconds)}",
        ),
        Card("Moved", bytes_text(moved), f"{rate_text(moved, seconds) or 'nothing'} in all"),
        Card("Ranks", f"{grid.num_ranks:,}", f"{machines:,} machines" if machines else ""),
        Card("Repeated requests", f"{retries:,}", "retries of the store client"),
    ]


def _cell_sizes(grid: HeatMap, name_px: int) -> tuple[int, int, int]:
    """Return (cell width, cell height, machines side by side) for a page of 1,280 pixels."""
    widest = max((len(row.cells) for row in grid.rows), default=1)
    room = int(_CHART_WIDTH) - name_px - 12
    if grid.num_ranks <= 128 and widest <= 16:
        return min(124, room // widest - 3), 26, 1
    side = 14
    one = name_px + 12 + widest * (side + 3) + 34
    columns = max(1, min((int(_CHART_WIDTH) + 34) // one, -(-len(grid.rows) // 8)))
    return side, side, columns


def _row(row: Row, *, is_numbered: bool) -> dict[str, Any]:
    cells = [
        {
            "level": cell.level,
            "is_slow": cell.is_straggler,
            "title": f"rank {cell.rank}: {seconds_text(cell.seconds)}",
            "text": seconds_text(cell.seconds) if is_numbered else "",
        }
        for cell in row.cells
    ]
    return {"host": printable(row.host, limit=60), "cells": cells}


def _chosen_ranks(timeline: Timeline, rank: int | None) -> list[int]:
    if rank is not None:
        return [rank]
    spans = rank_seconds(timeline)
    if not spans:
        return []
    by_time = sorted(spans, key=lambda r: (spans[r], r))
    return list(dict.fromkeys([slowest_rank(timeline), by_time[(len(by_time) - 1) // 2]]))


def _charts(timeline: Timeline, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Draw ranks on one scale of time, so that they can be compared."""
    found = [lanes(timeline, rank) for rank in ranks]
    end = max((lane.end for some in found for lane in some), default=0.0) or 1e-3
    return [_chart(timeline, rank, some, end) for rank, some in zip(ranks, found, strict=True)]


def _chart(timeline: Timeline, rank: int, found: list[Lane], end: float) -> dict[str, Any]:
    shown = found[:_MAX_LANES]
    longest = max((len(lane.state) + len(lane.stage) for lane in shown), default=0)
    left = min(330.0, 40 + 7.0 * longest)
    scale = (_CHART_WIDTH - _RIGHT - left) / end
    host = next((r.host for r in timeline.records if r.rank == rank and r.host), "")
    seconds = rank_seconds(timeline).get(rank, 0.0)
    note = f"{seconds_text(seconds)}" if found else "no records"
    hidden = len(found) - len(shown)
    return {
        "title": f"Rank {rank}" + (f" on {printable(host, limit=60)}" if host else ""),
        "note": note + (f", {hidden} more lanes" if hidden else ""),
        "left": left,
        "height": _TOP + _LANE_HEIGHT * len(shown) + 8,
        "ticks": _ticks(end, left, scale),
        "lanes": [_lane(lane, number, left, scale) for number, lane in enumerate(shown)],
    }


def _lane(lane: Lane, number: int, left: float, scale: float) -> dict[str, Any]:
    facts = [seconds_text(lane.busy_seconds)]
    facts += [bytes_text(lane.num_bytes)] if lane.num_bytes else []
    facts += [rate_text(lane.num_bytes, lane.busy_seconds)]
    facts += [_count(lane.retries, "retry").replace("retrys", "retries")] if lane.retries else []
    text = "  \u00b7  ".join(fact for fact in facts if fact)
    stop = left + lane.end * scale
    room = 6.2 * len(text) + 16
    is_left = stop + room > _CHART_WIDTH
    start = left + lane.start * scale
    # Where neither side has room, the text goes to the start of the lane, above the bar's end.
    place = start - 8 if start - room > left else stop - 8
    return {
        "state": "" if lane.state == "all" else printable(lane.state, limit=26),
        "stage": printable(lane.stage, limit=16),
        "color": stage_number(lane.stage) % _NUM_COLORS,
        "y": _TOP + _LANE_HEIGHT * number,
        "text": text,
        "is_left": is_left,
        "text_x": round(place if is_left else stop + 8, 1),
        "bars": [_bar(lane, index, left, scale) for index in range(min(len(lane.bars), _MAX_BARS))],
    }


def _bar(lane: Lane, index: int, left: float, scale: float) -> dict[str, Any]:
    bar = lane.bars[index]
    width = max(2.0, bar.seconds * scale)
    facts = [
        printable(bar.object, limit=120),
        f"{seconds_text(bar.start)} + {seconds_text(bar.seconds)}",
        bytes_text(bar.num_bytes) if bar.num_bytes else "",
        rate_text(bar.num_bytes, bar.seconds),
    ]
    return {
        "x": round(left + bar.start * scale, 2),
        "width": round(width, 2),
        "radius": 3 if width >= 8 else 1,
        "title": ", ".join(fact for fact in facts if fact),
    }


def _ticks(end: float, left: float, scale: float) -> Sequence[dict[str, Any]]:
    raw = end / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    count = int(end / step + 1e-9)
    return [
        {"x": round(left + number * step * scale, 1), "text": _tick_text(number * step, step)}
        for number in range(count + 1)
    ]


def _tick_text(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if step < 0.1:
        return f"{1000 * value:.{0 if step >= 1e-3 else 2}f} ms"
    return f"{value:.{0 if step >= 1 else 1}f} s"


def _stage(row: Any) -> dict[str, Any]:
    host = f" on {printable(row.host, limit=60)}" if row.host else ""
    return {
        "stage": printable(row.stage, limit=40),
        "color": stage_number(row.stage) % _NUM_COLORS,
        "median": seconds_text(row.median_seconds),
        "slowest": seconds_text(row.max_seconds),
        "who": f"{row.rank}{host}",
        "size": bytes_text(row.num_bytes) if row.num_bytes else "",
        "rate": rate_text(row.num_bytes, row.max_seconds),
    }
