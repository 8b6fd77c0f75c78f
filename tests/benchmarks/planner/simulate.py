"""Plans a save and a load of a made-up layout with the coordinator's code, and times each step."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import Columns
from planish.checkpoint.format.metafile import BLOCK, Metadata
from planish.checkpoint.plan.files import GlobalPlan, RankPlan
from planish.checkpoint.plan.match import ShardIndex, match
from planish.checkpoint.plan.save import SPLIT_BYTES, decode_all, plan_save
from planish.checkpoint.plan.share import share_reads
from planish.checkpoint.ranks.control import plan_tree
from planish.checkpoint.save.agree import plan_key
from tests.benchmarks.planner.layouts import Layout
from tests.unit.checkpoint.plan.pieces import unique_bytes

Result = TypeVar("Result")


@dataclass
class Watch:
    """Seconds of named steps: by the clock, and of this process alone."""

    wall: dict[str, float] = field(default_factory=dict)
    """Step to seconds by the clock; other work of the machine counts."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Step to seconds of processor time of this process."""
    _last: tuple[float, float] = field(default_factory=lambda: _now())

    def lap(self, step: str) -> None:
        """Book the time since the last call under `step`."""
        now = _now()
        self.wall[step] = self.wall.get(step, 0.0) + now[0] - self._last[0]
        self.cpu[step] = self.cpu.get(step, 0.0) + now[1] - self._last[1]
        self._last = now

    def timed(self, step: str, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, its time booked under `step` alone."""
        self._last = _now()
        result = call()
        self.lap(step)
        return result


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Simulated:
    """What planning cost, and what it yielded."""

    watch: Watch
    """Seconds of each step."""
    counts: dict[str, float]
    """Ranks, items, bytes and the like."""

    def plan_seconds(self, clock: dict[str, float]) -> float:
        """Return the coordinator's seconds from encoded columns to encoded plans."""
        return sum(clock[step] for step in PLAN_STEPS)

    @property
    def summary(self) -> dict[str, float | dict[str, float]]:
        """All figures, rounded, JSON-able."""
        items = self.counts["items"]
        cpu, wall = self.plan_seconds(self.watch.cpu), self.plan_seconds(self.watch.wall)
        return {
            **self.counts,
            "plan_wall_s": round(wall, 4),
            "plan_cpu_s": round(cpu, 4),
            "plan_cpu_us_per_item": round(1e6 * cpu / items, 3),
            "wall_s": {step: round(value, 4) for step, value in self.watch.wall.items()},
            "cpu_s": {step: round(value, 4) for step, value in self.watch.cpu.items()},
        }


PLAN_STEPS = ("decode", "gather", "dedup", "validate", "balance", "offsets", "scatter")
"""What the coordinator does between receiving the columns and sending the plans."""


def simulate(layout: Layout, *, load: bool = True) -> Simulated:
    """Plan a save of `layout`, and a load by the same layout.

    Args:
        layout: Who holds what.
        load: Also plan a load.

    Returns:
        Times and sizes; peak memory is that of this process so far, so simulate one layout in a
        process to learn its own.
    """
    watch, counts = Watch(), {"ranks": float(layout.ranks)}
    wires = watch.timed("build", lambda: [columns.encode() for columns in layout.columns()])
    counts |= _messages(layout, wires)
    plan = _plan(layout, wires, watch, counts)
    _cached(layout, wires, plan, watch)
    metadata = watch.timed("metadata", lambda: plan.metadata({"step": 1}))
    counts["shards"] = metadata.shards.num_shards
    counts["files"] = len(metadata.files)
    _checksums(metadata)
    data = watch.timed("encode_metadata", lambda: metafile.encode(metadata))
    decoded = watch.timed(
        "decode_metadata", lambda: metafile.decode(data, max_bytes=metafile_bound(data))
    )
    counts["metadata_bytes"] = len(data)
    counts["checksum_bytes"] = 4 * sum(len(crcs) for crcs in metadata.files.crcs)
    if load:
        _load(layout, wires, decoded, watch, counts)
    counts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Simulated(watch, counts)


def metafile_bound(data: bytes) -> int:
    """Return how much memory the metadata of a simulation may take once decoded."""
    return max(1 << 30, 64 * len(data))


def _plan(
    layout: Layout, wires: Sequence[bytes], watch: Watch, counts: dict[str, float]
) -> GlobalPlan:
    """Decode, plan and encode as the coordinator of a save does."""
    items = boxes = 0

    def decoded() -> Iterator[Columns]:
        nonlocal items, boxes
        one_by_one = decode_all(wires)
        while True:
            watch.lap("gather")
            columns = next(one_by_one, None)
            watch.lap("decode")
            if columns is None:
                return
            items += len(columns.item_tensor)
            boxes += len(columns.offsets)
            yield columns

    watch.lap("other")
    plan = plan_save(decoded(), hosts=layout.hosts, lap=watch.lap)
    replies = watch.timed("scatter", lambda: [plan.wire(rank) for rank in range(plan.ranks)])
    counts |= {"items": float(items), "boxes": float(boxes)}
    counts["plan_bytes_per_rank"] = sum(map(len, replies)) / len(replies)
    loads = plan.loads()
    counts["written_max_over_mean"] = float(loads.max() / loads.mean())
    counts["written_bytes"] = float(loads.sum())
    columns = Columns.decode(wires[0])
    watch.timed("read_plan_of_one_rank", lambda: RankPlan.decode(replies[0], columns))
    return plan


def _cached(layout: Layout, wires: Sequence[bytes], plan: GlobalPlan, watch: Watch) -> None:
    """Look an earlier plan up as the coordinator does once it has all signatures."""
    signatures = [columns.signature() for columns in decode_all(wires)]
    key = plan_key(signatures, split_bytes=SPLIT_BYTES, hosts=layout.hosts)
    cache = {key: plan}

    def look_up() -> GlobalPlan | None:
        return cache.get(plan_key(signatures, split_bytes=SPLIT_BYTES, hosts=layout.hosts))

    assert watch.timed("cached_plan", look_up) is plan


def _checksums(metadata: Metadata) -> None:
    """Fill in checksums as incompressible as real ones."""
    rng = np.random.default_rng(0)
    blocks = [-(-size // BLOCK) for size in metadata.files.sizes]
    metadata.files.crcs[:] = [rng.integers(0, 1 << 32, count, np.uint32) for count in blocks]


def _load(
    layout: Layout,
    wires: Sequence[bytes],
    metadata: Metadata,
    watch: Watch,
    counts: dict[str, float],
) -> None:
    index = watch.timed("index", lambda: ShardIndex(metadata))
    first = Columns.decode(wires[0])
    watch.timed("match_one_rank", lambda: match(metadata, first, index=index))
    reads = watch.timed(
        "match_all_ranks",
        lambda: [match(metadata, columns, index=index) for columns in decode_all(wires)],
    )
    shared = watch.timed("share", lambda: share_reads(metadata, reads, hosts=layout.hosts))
    watch.timed("assemble_one_rank", lambda: shared.rank(metadata, 0, reads[0]))
    held = shared.requests.stop - shared.requests.start
    loads = np.bincount(shared.reader, held, layout.ranks)
    unique = unique_bytes(metadata, shared.wanted)
    counts["pieces"] = float(sum(map(len, reads)))
    counts["requests"] = float(len(shared.requests))
    counts["read_over_unique_bytes"] = shared.bytes_from_store / unique
    counts["wanted_over_unique_bytes"] = shared.wanted_bytes / unique
    counts["read_max_over_mean"] = float(loads.max() / loads.mean())


def _messages(layout: Layout, wires: Sequence[bytes]) -> dict[str, float]:
    """Return what travels up the tree when all ranks send their columns."""
    tree = plan_tree(layout.hosts)
    size = [len(wire) for wire in wires]
    for rank in range(len(wires) - 1, 0, -1):
        size[tree.parents[rank]] += size[rank]
    return {
        "column_bytes_per_rank": sum(map(len, wires)) / len(wires),
        "tree_depth": float(tree.depth),
        "tree_widest": float(max(map(len, tree.children))),
        "largest_message_bytes": float(max(size[1:], default=0)),
    }
