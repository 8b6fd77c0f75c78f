"""The timing records of a save or load as text: heat map, stages, timeline of one rank."""

from __future__ import annotations

from planish.checkpoint.watch.heatmap import (
    HeatMap,
    Lane,
    bytes_text,
    heat_map,
    lanes,
    rate_text,
    seconds_text,
    slowest_rank,
    stage_rows,
)
from planish.checkpoint.watch.timings import Timeline

SHADES = "\u2581\u2582\u2583\u2584\u2585\u2586\u2588"
"""Blocks of growing height, one for each level of a heat map."""
BAR_CHARACTERS = 44
"""Width of a timeline."""
_NUMBERED_RANKS = 64
"""Up to as many ranks, each cell also shows its seconds."""
_CELLS_PER_LINE = 64


def text_report(timeline: Timeline, *, title: str, rank: int | None = None) -> str:
    """Return the whole report.

    Args:
        timeline: records of all ranks.
        title: place of the checkpoint.
        rank: whose timeline to draw; None for the slowest.
    """
    grid = heat_map(timeline)
    title = printable(title, limit=300)
    op = timeline.records[0].op if timeline.records else "save"
    if not grid.rows:
        return f"{op} of {title}: no records\n"
    chosen = slowest_rank(timeline) if rank is None else rank
    parts = [
        _summary(timeline, grid, f"{op} of {title}"),
        *(f"! straggler: {printable(str(one), limit=200)}" for one in grid.stragglers[:20]),
        "",
        *_grid_lines(grid),
        "",
        *_stage_lines(timeline),
        "",
        *_lane_lines(lanes(timeline, chosen), chosen),
    ]
    return "".join(f"{line.rstrip()}\n" for line in parts)


def _summary(timeline: Timeline, grid: HeatMap, title: str) -> str:
    moved = total_bytes(timeline)
    seconds = wall_seconds(timeline)
    machines = len({record.host for record in timeline.records if record.host})
    where = f" on {machines} machine{'s' * (machines != 1)}" if machines else ""
    facts = [
        f"{grid.num_ranks} rank{'s' * (grid.num_ranks != 1)}{where}",
        seconds_text(seconds),
        f"slowest rank {seconds_text(grid.max_seconds)}",
        f"median {seconds_text(grid.median_seconds)}",
        *([bytes_text(moved), rate_text(moved, seconds)] if moved else []),
    ]
    return f"{title}: {', '.join(fact for fact in facts if fact)}"


def total_bytes(timeline: Timeline) -> int:
    """Return the bytes that went to or came from the store, of all ranks."""
    return sum(r.num_bytes for r in timeline.records if r.stage in {"upload", "read"})


def wall_seconds(timeline: Timeline) -> float:
    """Return the seconds from the first start to the last end of all ranks."""
    if not timeline.records:
        return 0.0
    first = min(record.start for record in timeline.records)
    return max(record.end for record in timeline.records) - first


def _grid_lines(grid: HeatMap) -> list[str]:
    what = "machine by its slowest rank" if grid.is_by_host else "rank"
    scale = f"{SHADES[0]} {seconds_text(grid.bounds[0])} .. {SHADES[-1]} "
    scale += seconds_text(grid.bounds[-1])
    mark = "   ! straggler, beyond the scale" if grid.stragglers else ""
    lines = [f"time of each {what}   {scale}{mark}"]
    width = min(32, max(len(row.host) for row in grid.rows))
    numbered = grid.num_ranks <= _NUMBERED_RANKS
    for row in grid.rows:
        name = printable(row.host, limit=width).ljust(width)
        for start in range(0, len(row.cells), _CELLS_PER_LINE):
            cells = row.cells[start : start + _CELLS_PER_LINE]
            shades = "".join(SHADES[cell.level] for cell in cells)
            marks = " ".join(
                f"{seconds_text(cell.seconds)}{'!' * cell.is_straggler}" for cell in cells
            )
            slow = " ".join(f"!{cell.rank}" for cell in cells if cell.is_straggler)
            lines.append(f"  {name}  {shades}  {marks if numbered else slow}")
            name = " " * width
    return lines


def _stage_lines(timeline: Timeline) -> list[str]:
    lines = [f"{'stage':<10}{'median':>9}{'slowest':>9}  {'of rank':<24}{'bytes':>10}  bandwidth"]
    for row in stage_rows(timeline):
        who = f"{row.rank}" + (f" on {printable(row.host, limit=16)}" if row.host else "")
        size = bytes_text(row.num_bytes) if row.num_bytes else ""
        lines.append(
            f"{printable(row.stage, limit=10):<10}{seconds_text(row.median_seconds):>9}"
            f"{seconds_text(row.max_seconds):>9}  {who:<24}{size:>10}  "
            f"{rate_text(row.num_bytes, row.max_seconds)}"
        )
    return lines


def _lane_lines(found: list[Lane], rank: int) -> list[str]:
    if not found:
        return [f"rank {rank} has no records"]
    end = max(lane.end for lane in found) or 1e-9
    names = [printable(f"{lane.state} {lane.stage}", limit=32) for lane in found]
    width = max(map(len, names))
    lines = [f"timeline of rank {rank}, 0 to {seconds_text(end)}"]
    for name, lane in zip(names, found, strict=True):
        facts = [seconds_text(lane.busy_seconds)]
        facts += [bytes_text(lane.num_bytes)] if lane.num_bytes else []
        facts += [rate_text(lane.num_bytes, lane.busy_seconds)]
        facts += [f"{lane.retries} retries"] if lane.retries else []
        lines.append(
            f"  {name:<{width}} |{_bar(lane, end)}| {'  '.join(fact for fact in facts if fact)}"
        )
    return lines


def _bar(lane: Lane, end: float) -> str:
    cells = [" "] * BAR_CHARACTERS
    for bar in lane.bars:
        first = min(BAR_CHARACTERS - 1, int(bar.start / end * BAR_CHARACTERS))
        last = min(BAR_CHARACTERS - 1, int((bar.start + bar.seconds) / end * BAR_CHARACTERS))
        cells[first : last + 1] = "\u2588" * (last - first + 1)
    return "".join(cells)


def printable(text: str, *, limit: int) -> str:
    """Return text as one line without control characters: records are untrusted."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}\u2026"
