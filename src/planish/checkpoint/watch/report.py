"""Report of the time that each rank and each stage of a save or load took, as text.

Source: ByteCheckpoint, arXiv 2407.20143, section 5 (heat map of ranks, timeline of one rank).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from planish.base.text import bytes_text, printable, rate_text, seconds_text
from planish.checkpoint.watch.monitor import (
    LOAD_STAGES,
    SAVE_STAGES,
    Straggler,
    Timeline,
    Timing,
    host_of,
    rank_seconds,
    stragglers,
)

SHADES = "\u2581\u2582\u2583\u2584\u2585\u2586\u2588"
"""Blocks of growing height, from the fastest rank to the slowest."""
_RANKS_PER_ROW = 8
"""Ranks in a row of the heat map if the records name no machine."""
_NUMBERED_RANKS = 64
"""Up to this number of ranks, the seconds stand beside the blocks."""
_BAR_CHARACTERS = 44


def text_report(timeline: Timeline, *, title: str, rank: int | None = None) -> str:
    """Return a heat map of the ranks, a table of the stages and the timeline of one rank.

    The timeline is that of `rank`, or of the slowest; `title` is the place of the checkpoint.
    """
    records = timeline.records
    heading = f"{records[0].op if records else 'save'} of {printable(title, limit=300)}"
    if not records:
        return f"{heading}: no records\n"
    spans, slow, hosts = rank_seconds(timeline), stragglers(timeline), host_of(records)
    slowest = max(sorted(spans), key=lambda one: spans[one])
    machines = len(set(hosts.values()))
    where = f" on {machines} machine{'s' * (machines != 1)}" if machines else ""
    summary = _facts(
        f"{len(spans)} rank{'s' * (len(spans) != 1)}{where}",
        seconds_text(timeline.wall_seconds),
        f"slowest rank {seconds_text(max(spans.values()))}",
        f"median {seconds_text(statistics.median(spans.values()))}",
        *_moved([r for r in records if r.stage in {"upload", "read"}], timeline.wall_seconds),
    )
    lines = [
        f"{heading}: {', '.join(summary)}",
        *(f"! straggler: {printable(str(one), limit=200)}" for one in slow[:20]),
        "",
        *_heat_map(hosts, spans, slow),
        "",
        *_stages(records, hosts),
        "",
        *_timeline_of(slowest if rank is None else rank, records),
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _facts(*texts: str) -> list[str]:
    return [text for text in texts if text]


def _moved(records: Sequence[Timing], seconds: float) -> tuple[str, str]:
    """Return the bytes and the bandwidth as texts, empty if there are no bytes."""
    moved = sum(record.num_bytes for record in records)
    return bytes_text(moved) if moved else "", rate_text(moved, seconds)


def _heat_map(
    hosts: Mapping[int, str], spans: Mapping[int, float], slow: list[Straggler]
) -> Iterator[str]:
    """Yield one line for each machine, with a block for each of its ranks."""
    named = {one.rank for one in slow}
    others = [seconds for rank, seconds in spans.items() if rank not in named]
    # The scale leaves out stragglers, so that other differences stay visible. It spans at least
    # half of the fastest time, so that noise does not look like a difference.
    low, high = min(others, default=0.0), max(others, default=0.0)
    high = max(high, low * 1.5, low + 1e-3)
    rows: dict[str, list[int]] = {}
    for rank in spans:
        first = rank - rank % _RANKS_PER_ROW
        name = hosts.get(rank) or f"ranks {first} to {first + _RANKS_PER_ROW - 1}"
        rows.setdefault(name, []).append(rank)
    scale = f"{SHADES[0]} {seconds_text(low)} .. {SHADES[-1]} {seconds_text(high)}"
    mark = "   ! straggler, beyond the scale" if slow else ""
    yield f"time of each rank   {scale}{mark}"
    width = min(32, max(map(len, rows)))
    for host, ranks in rows.items():
        levels = [int((spans[rank] - low) / (high - low) * len(SHADES)) for rank in ranks]
        blocks = "".join(SHADES[min(max(level, 0), len(SHADES) - 1)] for level in levels)
        if len(spans) <= _NUMBERED_RANKS:
            notes = [f"{seconds_text(spans[r])}{'!' * (r in named)}" for r in ranks]
        else:
            notes = [f"!{r}" for r in ranks if r in named]
        yield f"  {printable(host, limit=width):<{width}}  {blocks}  {' '.join(notes)}"


def _stages(records: Sequence[Timing], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield one line for each stage, over all ranks."""
    yield f"{'stage':<10}{'median':>9}{'slowest':>9}  {'of rank':<24}{'bytes':>10}  bandwidth"
    groups = defaultdict[str, list[Timing]](list)
    for record in records:
        groups[record.stage].append(record)
    for stage in sorted(groups, key=_stage_number):
        spans = Timeline(groups[stage]).end_to_end()
        rank = max(spans, key=lambda one: spans[one])
        who = f"{rank} on {printable(hosts[rank], limit=16)}" if rank in hosts else f"{rank}"
        moved, rate = _moved(groups[stage], spans[rank])
        yield (
            f"{printable(stage, limit=10):<10}"
            f"{seconds_text(statistics.median(spans.values())):>9}"
            f"{seconds_text(spans[rank]):>9}  {who:<24}{moved:>10}  {rate}"
        )


def _stage_number(stage: str) -> int:
    """Return the position of a stage in the order of execution; unknown stages are last."""
    order = (*SAVE_STAGES, *LOAD_STAGES)
    return order.index(stage) if stage in order else len(order)


def _timeline_of(rank: int, records: Sequence[Timing]) -> Iterator[str]:
    """Yield one line for each state and stage of a rank, with a bar over the time axis."""
    begin = min(record.start for record in records)
    lanes = defaultdict[tuple[str, str], list[Timing]](list)
    for record in sorted(records, key=lambda r: (r.start, r.end)):
        if record.rank == rank:
            lanes[record.state or "all", record.stage].append(record)
    if not lanes:
        yield f"rank {rank} has no records"
        return
    end = max(1e-9, max(r.end for lane in lanes.values() for r in lane) - begin)
    order = sorted(lanes, key=lambda key: (lanes[key][0].start, _stage_number(key[1]), key[0]))
    names = [printable(f"{state} {stage}", limit=32) for state, stage in order]
    width = max(map(len, names))
    yield f"timeline of rank {rank}, 0 to {seconds_text(end)}"

    def cell(moment: float) -> int:
        return min(_BAR_CHARACTERS - 1, int((moment - begin) / end * _BAR_CHARACTERS))

    for name, key in zip(names, order, strict=True):
        bar, busy, reached = [" "] * _BAR_CHARACTERS, 0.0, begin
        for record in lanes[key]:
            stop = max(record.start, record.end)
            first, last = cell(record.start), cell(stop)
            bar[first : last + 1] = "\u2588" * (last - first + 1)
            # Objects move in parallel; a second in which several move counts once.
            busy += max(0.0, stop - max(record.start, reached))
            reached = max(reached, stop)
        retries = sum(record.retries for record in lanes[key])
        repeated = f"{retries} retries" if retries else ""
        facts = _facts(seconds_text(busy), *_moved(lanes[key], busy), repeated)
        yield f"  {name:<{width}} |{''.join(bar)}| {'  '.join(facts)}"
