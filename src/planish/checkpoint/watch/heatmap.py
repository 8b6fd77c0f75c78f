"""Timing records as pictures in numbers: a grid of ranks and the lanes of one rank.

Both the text and the page draw these; nothing here knows characters, colours or files.

Source: ByteCheckpoint, arXiv 2407.20143, section 5 (heat map of ranks, timeline of one rank).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from planish.checkpoint.watch.monitor import Straggler, host_of, rank_seconds, stragglers
from planish.checkpoint.watch.timings import LOAD_STAGES, SAVE_STAGES, Timeline, Timing

LEVELS = 7
"""Shades of a heat map."""
MAX_CELLS = 8192
"""With more ranks, a cell is a machine and shows its slowest rank."""
RANKS_PER_ROW = 8
"""Ranks of a row where the records name no machine."""


@dataclass(frozen=True)
class Cell:
    """One rank, or one machine when there are very many."""

    rank: int
    """Global rank; of a machine its slowest."""
    seconds: float
    """From the start to the end of its own work."""
    level: int
    """Shade, 0 (fastest) to LEVELS - 1 (slowest)."""
    is_straggler: bool = False
    """Whether the straggler rule names it."""


@dataclass(frozen=True)
class Row:
    """The ranks of one machine."""

    host: str
    """Name of the machine, or which ranks stand here."""
    cells: tuple[Cell, ...]
    """Ascending by rank."""


@dataclass(frozen=True)
class HeatMap:
    """All ranks of a save or load by the time of their own work.

    Example:
        >>> records = [Timing(r, "save", "", "upload", 0.0, 1.0 + r, host="a") for r in (0, 1)]
        >>> [cell.level for cell in heat_map(Timeline(records)).rows[0].cells]
        [0, 6]
    """

    rows: tuple[Row, ...]
    """Machines in the order of their lowest rank."""
    bounds: tuple[float, ...]
    """LEVELS + 1 ascending seconds: shade `i` reaches from `bounds[i]` to `bounds[i + 1]`.

    Stragglers beyond the last one have the last shade: they must not hide all other differences.
    """
    median_seconds: float
    """Of all ranks."""
    max_seconds: float
    """Of the slowest rank."""
    num_ranks: int
    """Ranks with records."""
    stragglers: tuple[Straggler, ...]
    """Slowest first."""
    is_by_host: bool = False
    """Cells are machines."""


@dataclass(frozen=True)
class Bar:
    """One record on a lane."""

    start: float
    """Seconds since the first start of the whole save or load."""
    seconds: float
    """Length."""
    num_bytes: int
    """Bytes moved."""
    object: str
    """Key of the object, empty for several."""
    retries: int
    """Repeated store requests."""


@dataclass(frozen=True)
class Lane:
    """One stage of one state on one rank."""

    state: str
    """Role and kind, `all` for what concerns all of them."""
    stage: str
    """Name of the stage."""
    bars: tuple[Bar, ...]
    """In the order of their start; they may overlap."""

    @property
    def start(self) -> float:
        """First start."""
        return self.bars[0].start

    @property
    def end(self) -> float:
        """Last end."""
        return max(bar.start + bar.seconds for bar in self.bars)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one bar goes on."""
        busy, reached = 0.0, -math.inf
        for bar in self.bars:
            stop = bar.start + bar.seconds
            busy += max(0.0, stop - max(bar.start, reached))
            reached = max(reached, stop)
        return busy

    @property
    def num_bytes(self) -> int:
        """Bytes of all bars."""
        return sum(bar.num_bytes for bar in self.bars)

    @property
    def retries(self) -> int:
        """Repeated store requests of all bars."""
        return sum(bar.retries for bar in self.bars)


@dataclass(frozen=True)
class StageRow:
    """One stage over all ranks."""

    stage: str
    """Name of the stage."""
    median_seconds: float
    """Of the ranks, from first start to last end in the stage."""
    max_seconds: float
    """Of the slowest rank."""
    rank: int
    """Slowest rank."""
    host: str
    """Its machine."""
    num_bytes: int
    """Bytes of all ranks."""


def heat_map(timeline: Timeline) -> HeatMap:
    """Return the grid of a timeline; one without records has no rows."""
    spans = rank_seconds(timeline)
    slow = stragglers(timeline)
    hosts = host_of(timeline.records)
    named = {one.rank for one in slow}
    bounds = _bounds([seconds for rank, seconds in spans.items() if rank not in named])
    groups: dict[str, list[Cell]] = {}
    for rank, seconds in spans.items():
        cell = Cell(rank, seconds, _level(seconds, bounds), rank in named)
        groups.setdefault(hosts.get(rank) or _place(rank), []).append(cell)
    is_by_host = len(spans) > MAX_CELLS
    if is_by_host:
        slowest = [max(cells, key=lambda cell: cell.seconds) for cells in groups.values()]
        groups = {}
        for number, cell in enumerate(slowest):
            first = number - number % 32
            groups.setdefault(f"machines {first} to {first + 31}", []).append(cell)
    return HeatMap(
        tuple(Row(host, tuple(cells)) for host, cells in groups.items()),
        bounds,
        statistics.median(spans.values()) if spans else 0.0,
        max(spans.values(), default=0.0),
        len(spans),
        tuple(slow),
        is_by_host,
    )


def _place(rank: int) -> str:
    first = rank - rank % RANKS_PER_ROW
    return f"ranks {first} to {first + RANKS_PER_ROW - 1}"


def _bounds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return equal steps from the fastest rank to the slowest.

    The scale spans at least half the fastest time: noise must not look like a finding.
    """
    low, high = min(seconds, default=0.0), max(seconds, default=0.0)
    high = max(high, low * 1.5, low + 1e-3)
    return tuple(low + (high - low) * step / LEVELS for step in range(LEVELS + 1))


def _level(seconds: float, bounds: Sequence[float]) -> int:
    share = (seconds - bounds[0]) / (bounds[-1] - bounds[0])
    return min(LEVELS - 1, max(0, int(share * LEVELS)))


def lanes(timeline: Timeline, rank: int) -> list[Lane]:
    """Return the lanes of one rank, earliest first; empty for a rank without records."""
    begin = min((record.start for record in timeline.records), default=0.0)
    groups: dict[tuple[str, str], list[Bar]] = {}
    for record in sorted(timeline.records, key=lambda r: (r.start, r.end)):
        if record.rank != rank:
            continue
        bar = Bar(
            record.start - begin,
            max(record.seconds, 0.0),
            *(record.num_bytes, record.object, record.retries),
        )
        groups.setdefault((record.state or "all", record.stage), []).append(bar)
    found = [Lane(state, stage, tuple(bars)) for (state, stage), bars in groups.items()]
    return sorted(found, key=lambda lane: (lane.start, stage_number(lane.stage), lane.state))


def stage_number(stage: str) -> int:
    """Return the place of a stage in the usual order; unknown ones come last."""
    order = [*SAVE_STAGES, *(s for s in LOAD_STAGES if s not in SAVE_STAGES)]
    return order.index(stage) if stage in order else len(order)


def stage_rows(timeline: Timeline) -> list[StageRow]:
    """Return each stage over all ranks, in the order of the stages."""
    hosts = host_of(timeline.records)
    groups: dict[str, list[Timing]] = {}
    for record in timeline.records:
        groups.setdefault(record.stage, []).append(record)
    rows = []
    for stage in sorted(groups, key=stage_number):
        spans = Timeline(groups[stage]).end_to_end()
        rank = max(spans, key=lambda r: spans[r])
        size = sum(record.num_bytes for record in groups[stage])
        median = statistics.median(spans.values())
        rows.append(StageRow(stage, median, spans[rank], rank, hosts.get(rank, ""), size))
    return rows


def slowest_rank(timeline: Timeline) -> int:
    """Return the rank with the longest time, the lowest of equals; 0 without records."""
    spans = rank_seconds(timeline)
    return max(sorted(spans), key=lambda rank: spans[rank], default=0)


def bytes_text(number: float) -> str:
    """Return a size for people.

    Example:
        >>> bytes_text(0), bytes_text(1536), bytes_text(5 << 30)
        ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Return a duration for people, three digits where they mean something.

    Example:
        >>> seconds_text(0.0004), seconds_text(0.25), seconds_text(61.3)
        ('0.4 ms', '0.25 s', '61 s')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def rate_text(num_bytes: int, seconds: float) -> str:
    """Return a bandwidth, empty where there is none."""
    return f"{bytes_text(num_bytes / seconds)}/s" if num_bytes and seconds > 1e-6 else ""
