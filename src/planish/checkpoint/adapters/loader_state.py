"""Data-loader state: the shard of each reader, and its redistribution to another number of ranks.

Redistribution neither loses nor repeats a sample: for every source, the consumed, the buffered and
the remaining samples form the same multiset before and after. The loader alone knows which sample
an index stands for (permutation, tokenizer, packing).

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (replicated and sharded loader state, buffers
split and merged); readers, uneven numbers of ranks and the rule for cursors are ours.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from planish.base.errors import CheckpointCorrupt, LayoutMismatch
from planish.checkpoint.format.strict_json import Fields, are_counts

CONSUMED = "consumed"
"""Key in `LoaderState.common` of the consumed sets by source."""


class Loader(Protocol):
    """Interface of a data loader whose position is part of a train state."""

    dp_rank: int
    """Data-parallel rank of this process, 0 .. dp_size - 1."""
    dp_size: int
    num_readers: int
    """Number of readers (worker processes) per data-parallel rank."""

    def ckpt_common(self) -> Fields:
        """Return the values that all ranks share: sources, sampling ratios, seed, `consumed`."""

    def ckpt_shards(self) -> list[LoaderShard]:
        """Return the state of this rank's readers."""

    def ckpt_restore(self, common: Fields, shards: list[LoaderShard]) -> None:
        """Continue from this state; `shards` are those of this rank's readers."""


@dataclass
class Consumed:
    """Set of the taken indices of a source: all below `count`, and those in `ahead`."""

    count: int = 0
    """First index that is not taken."""
    ahead: tuple[int, ...] = ()
    """Taken indices above `count`, rising."""

    def has(self, index: int) -> bool:
        """Return whether an index has been taken."""
        return index < self.count or index in self.ahead

    def to_data(self) -> Fields:
        """Return the plain values that `from_data` reads."""
        return {"count": self.count, "ahead": list(self.ahead)}

    @classmethod
    def from_data(cls, raw: object) -> Consumed:
        """Undo `to_data`; raises `CheckpointCorrupt` if `raw` is not a consumed set."""
        fields: Any = raw if isinstance(raw, Mapping) else {}
        count, ahead = fields.get("count"), fields.get("ahead")
        if isinstance(ahead, (list, tuple)):
            numbers = [count, *ahead]
            if are_counts(numbers) and all(map(operator.lt, numbers, ahead)):
                return cls(numbers[0], tuple(ahead))
        raise CheckpointCorrupt(
            "a consumed set must be {count, ahead} with `ahead` rising above `count`, got "
            f"{str(raw)[:200]}; load an earlier checkpoint"
        )

    @classmethod
    def of(cls, indices: Iterable[int]) -> Consumed:
        """Return the set of the given indices.

        Example:
            >>> Consumed.of([4, 0, 1])
            Consumed(count=2, ahead=(4,))
        """
        taken = sorted(set(indices))
        count = next((k for k, index in enumerate(taken) if k != index), len(taken))
        return cls(count, tuple(taken[count:]))

    def after(self, positions: Sequence[int]) -> Consumed:
        """Return the set after every worker has advanced to its position.

        Args:
            positions: [workers], first index that worker k has not taken. It takes, in rising
                order, the indices i with `i % workers == k` that this set lacks.

        Example:
            >>> Consumed().after([4, 1])   # worker 0 took 0 and 2, worker 1 took nothing
            Consumed(count=1, ahead=(2,))
        """
        workers = len(positions)
        low = min([self.count, *positions])
        taken = set(self.ahead).union(range(low, self.count))
        for worker, position in enumerate(positions):
            first = low + (worker - low) % workers
            taken.update(range(first, position, workers))
        above = sorted(taken)
        count = low + next((k for k, i in enumerate(above) if i != low + k), len(above))
        return Consumed(count, tuple(i for i in above if i > count))

    def left(self, worker: int, num_workers: int) -> Iterator[int]:
        """Return an endless iterator of the indices that one worker takes next, rising."""
        skip = set(self.ahead)
        first = self.count + (worker - self.count) % num_workers
        return (i for i in itertools.count(first, num_workers) if i not in skip)


@dataclass
class LoaderShard:
    """The state of one reader."""

    dp_rank: int
    reader: int
    """Number of the reader within its rank."""
    order_key: Any = 0
    """Sort key of a reader's shards, if it has several (int, str or tuple of them)."""
    buffer: list[Any] = field(default_factory=list)
    """Samples taken from a source but not yet delivered, in order."""
    cursor: dict[str, int] = field(default_factory=dict)
    """Source -> first index that this reader has not taken."""
    opaque: Any = None
    """`state_dict` of a loader without the `ckpt_*` methods; it fits only the same layout."""
    num_samples: int = -1
    """Length of a `buffer` that has not been read; -1 if `buffer` is complete."""

    def index(self) -> Fields:
        """Return the fields that the metadata list: all except samples and opaque state."""
        return {
            "dp_rank": self.dp_rank,
            "reader": self.reader,
            "order_key": self.order_key,
            "cursor": dict(self.cursor),
            "num_samples": len(self.buffer) if self.num_samples < 0 else self.num_samples,
        }

    def to_data(self) -> Fields:
        """Return the values that `from_data` reads, with the samples unchanged."""
        return {**self.index(), "buffer": list(self.buffer), "opaque": self.opaque}

    @classmethod
    def from_data(cls, raw: object) -> LoaderShard:
        """Undo `to_data`, or `index` if `raw` has no `buffer`; raises `CheckpointCorrupt`."""
        fields: Any = raw if isinstance(raw, Mapping) else {}
        cursor = fields.get("cursor")
        dp_rank, reader, num_samples = map(fields.get, ("dp_rank", "reader", "num_samples"))
        is_shard = isinstance(cursor, Mapping) and all(isinstance(name, str) for name in cursor)
        if not is_shard or not are_counts([dp_rank, reader, num_samples, *cursor.values()]):
            raise CheckpointCorrupt(
                "a loader shard must be {dp_rank, reader, order_key, cursor, num_samples, buffer}, "
                f"got {str(raw)[:200]}; load an earlier checkpoint"
            )
        order = fields.get("order_key", 0)
        order = tuple(order) if isinstance(order, list) else order  # as JSON gives it back
        shard = cls(dp_rank, reader, order, cursor=dict(cursor), num_samples=num_samples)
        if "buffer" not in fields:
            return shard
        buffer = fields["buffer"]
        if not isinstance(buffer, list) or len(buffer) != num_samples:
            raise CheckpointCorrupt(
                f"loader shard {dp_rank}-{reader} must hold {num_samples} "
                "samples, got another number; load an earlier checkpoint"
            )
        return replace(shard, buffer=list(buffer), opaque=fields.get("opaque"), num_samples=-1)


@dataclass
class LoaderState:
    """Loader state of one rank (save), of all ranks (as read) or wanted by one rank (load)."""

    common: Fields = field(default_factory=dict)
    """Values that all ranks share; `consumed` maps a source to its set at the last restore."""
    shards: list[LoaderShard] = field(default_factory=list)
    """Save: shards of this rank, [] unless its index is 0 on every axis but dp. Read: all."""
    dp_rank: int = 0
    dp_size: int = 1
    """Number of data-parallel ranks: of the saved shards, or (load) of the wanted layout."""
    num_readers: int = 1

    def common_data(self) -> Fields:
        """Return the part that all ranks share; each role stores it as one object."""
        return {"common": self.common, "dp_size": self.dp_size, "num_readers": self.num_readers}

    @classmethod
    def from_data(cls, common: object, shards: Iterable[object]) -> LoaderState:
        """Build the state from `common_data()` and shards, which may lack their `buffer`."""
        fields: Any = common if isinstance(common, Mapping) else {}
        values, sizes = fields.get("common"), [fields.get("dp_size"), fields.get("num_readers")]
        if not isinstance(values, Mapping) or not are_counts(sizes) or not all(sizes):
            raise CheckpointCorrupt(
                "the common loader state must be {common, dp_size, num_readers}, got "
                f"{str(common)[:200]}; load an earlier checkpoint"
            )
        read = sorted(
            map(LoaderShard.from_data, shards),
            key=lambda shard: (shard.dp_rank, shard.reader, shard.order_key),
        )
        state = cls(dict(values), read, 0, *sizes)
        seen = {(shard.dp_rank, shard.reader) for shard in state.shards}
        full = set(itertools.product(range(state.dp_size), range(state.num_readers)))
        if state.shards and seen != full:
            raise CheckpointCorrupt(
                f"loader state of {state.dp_size} ranks with {state.num_readers} readers must "
                f"hold a shard of each, got {sorted(seen ^ full)[:8]} missing or too many; load "
                "an earlier checkpoint"
            )
        return state


def sources(saved_dp_size: int, dp_rank: int, dp_size: int) -> range:
    """Return the saved data-parallel ranks whose buffers one rank of the new layout needs."""
    if dp_size % saved_dp_size == 0:
        first = dp_rank * saved_dp_size // dp_size
        return range(first, first + 1)
    if saved_dp_size % dp_size == 0:
        share = saved_dp_size // dp_size
        return range(dp_rank * share, (dp_rank + 1) * share)
    return range(saved_dp_size)


def runs(count: int, parts: int, first: int = 0) -> list[slice]:
    """Cut `count` samples into consecutive runs whose lengths differ by at most one.

    The longer runs begin at part `first`, modulo `parts`.
    """
    small, longer = divmod(count, parts)
    lengths = (small + ((part - first) % parts < longer) for part in range(parts))
    return [slice(a, b) for a, b in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


def reshard(saved: LoaderState, wanted: LoaderState, *, policy: str = "exact") -> LoaderState:
    """Return the part of a saved loader state for one rank, of the same or another layout.

    Args:
        saved: state of all ranks; buffers outside `sources(...)` may be unread.
        wanted: `dp_rank`, `dp_size` and `num_readers` of the wanted rank.
        policy: "exact", or "restart": a loader that cannot be resharded begins anew, without
            shards.

    Raises:
        LayoutMismatch: the saved state is opaque and the layout has changed.
    """
    rank, size, readers = wanted.dp_rank, wanted.dp_size, wanted.num_readers
    if (saved.dp_size, saved.num_readers) == (size, readers):
        mine = [shard for shard in saved.shards if shard.dp_rank == rank]
        return replace(wanted, common=dict(saved.common), shards=mine)
    if any(shard.opaque is not None for shard in saved.shards):
        if policy == "restart":
            return replace(wanted, common=dict(saved.common), shards=[])
        raise LayoutMismatch(
            f"a loader whose state is opaque must be loaded by {saved.dp_size} data-parallel "
            f"ranks with {saved.num_readers} readers as saved, got {size} with {readers}; load "
            "with the saved layout, or pass loader_policy='restart' to begin its data anew"
        )
    common, consumed = _merged(saved)
    buffers = _buffers(saved, wanted)
    shards = []
    for reader in range(readers):
        worker = rank * readers + reader
        cursor = {
            source: next(taken.left(worker, size * readers)) for source, taken in consumed.items()
        }
        shards.append(LoaderShard(rank, reader, buffer=buffers[reader], cursor=cursor))
    return replace(wanted, common=common, shards=shards)


def _merged(saved: LoaderState) -> tuple[Fields, dict[str, Consumed]]:
    """Return the updated common part, and the consumed set of each source."""
    before = saved.common.get(CONSUMED, {})
    names = sorted({*before, *(source for shard in saved.shards for source in shard.cursor)})
    consumed = {}
    for source in names:
        base = Consumed.from_data(before[source]) if source in before else Consumed()
        first = [next(base.left(worker, len(saved.shards))) for worker in range(len(saved.shards))]
        positions = [
            shard.cursor.get(source, first[worker]) for worker, shard in enumerate(saved.shards)
        ]
        consumed[source] = base.after(positions)
    common = dict(saved.common)
    if consumed:
        kept = {source: dict(before.get(source, {})) for source in names}
        common[CONSUMED] = {s: {**kept[s], **consumed[s].to_data()} for s in names}
    return common, consumed


def _buffers(saved: LoaderState, wanted: LoaderState) -> list[list[Any]]:
    """Return the samples of each reader of the wanted rank."""
    rank, size, readers = wanted.dp_rank, wanted.dp_size, wanted.num_readers
    block = sources(saved.dp_size, rank, size)
    # `spread` new ranks share the samples of one block of saved ranks.
    spread = max(1, size // saved.dp_size) if len(block) == 1 else size if _odd(saved, size) else 1
    place = rank % spread
    chosen = [shard for shard in saved.shards if shard.dp_rank in block]
    if any(shard.num_samples > len(shard.buffer) for shard in chosen):
        raise AssertionError("buffers that a rank needs must have been read")
    if saved.num_readers == readers and not _odd(saved, size):
        found, before = [], 0
        for reader in range(readers):
            stream = [x for shard in chosen if shard.reader == reader for x in shard.buffer]
            # Longer runs begin where those of the last reader end, so that shares are equal.
            found.append(stream[runs(len(stream), spread, before)[place]])
            before += len(stream)
        return found
    flat = [x for shard in chosen for x in shard.buffer]
    mine = flat[runs(len(flat), spread)[place]]
    return [mine[cut] for cut in runs(len(mine), readers)]


def _odd(saved: LoaderState, size: int) -> bool:
    """Return whether neither number of ranks divides the other."""
    return bool(size % saved.dp_size and saved.dp_size % size)
