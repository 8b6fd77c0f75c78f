"""Loader state under any number of ranks and readers: no sample lost, none twice."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointCorrupt, LayoutMismatch
from planish.checkpoint.adapters.base import apply, collect
from planish.checkpoint.adapters.loader_state import (
    Consumed,
    LoaderShard,
    LoaderState,
    reshard,
    sources,
)
from tests.thin import examples

SOURCES = ("web", "code")


class Readers:
    """All readers of one data-parallel rank; samples are (source, index)."""

    def __init__(self, dp_rank, dp_size, num_readers):
        self.dp_rank, self.dp_size, self.num_readers = dp_rank, dp_size, num_readers
        self.restore({"seed": 5, "consumed": {}}, self.fresh())

    def fresh(self):
        first = {
            r: dict.fromkeys(SOURCES, self.dp_rank * self.num_readers + r)
            for r in range(self.num_readers)
        }
        return [LoaderShard(self.dp_rank, r, cursor=first[r]) for r in range(self.num_readers)]

    def restore(self, common, shards):
        self.common, self.buffers = common, {s.reader: list(s.buffer) for s in shards}
        self.cursors = {s.reader: dict(s.cursor) for s in shards}
        assert sorted(self.buffers) == list(range(self.num_readers))

    ckpt_restore = restore

    def ckpt_common(self):
        return self.common

    def ckpt_shards(self):
        return [
            LoaderShard(self.dp_rank, r, buffer=self.buffers[r], cursor=self.cursors[r])
            for r in range(self.num_readers)
        ]

    def read(self, reader, source):
        """Take the next index of this reader into its buffer."""
        index = self.cursors[reader][source]
        taken = Consumed.from_data(self.common["consumed"].get(source, {"count": 0, "ahead": []}))
        worker = self.dp_rank * self.num_readers + reader
        stream = taken.left(worker, self.dp_size * self.num_readers)
        assert index in itertools.takewhile(lambda k: k <= index, stream)
        later = taken.left(worker, self.dp_size * self.num_readers)
        self.cursors[reader][source] = next(k for k in later if k > index)
        self.buffers[reader].append((source, index))

    def hand_out(self, reader):
        return self.buffers[reader].pop(0) if self.buffers[reader] else None


def start(dp_size, num_readers):
    return [Readers(d, dp_size, num_readers) for d in range(dp_size)]


def moved(ranks, dp_size, num_readers):
    """Save all ranks' loaders and restore them under another layout, as a load does."""
    found = [collect("main", {"dataloader": r}, "plain", for_load=False).loader for r in ranks]
    data = [shard.to_data() for state in found for shard in state.shards]
    target = start(dp_size, num_readers)
    for rank in target:
        near = sources(len(ranks), rank.dp_rank, dp_size)
        # Buffers of ranks that are not needed stay unread.
        read = [d if d["dp_rank"] in near else {k: d[k] for k in d if k != "buffer"} for d in data]
        saved = LoaderState.from_data(found[0].common_data(), read)
        wanted = collect("main", {"dataloader": rank}, "plain", for_load=True)
        apply({"dataloader": rank}, wanted, {}, saved)
    return target


layouts = st.tuples(st.integers(1, 6), st.integers(1, 3))
actions = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(SOURCES), st.booleans()),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.lists(st.tuples(layouts, actions), min_size=2, max_size=4))
def test_no_sample_is_lost_or_comes_twice_under_any_layouts(phases):
    (dp_size, num_readers), _ = phases[0]
    ranks = start(dp_size, num_readers)
    trained = Counter()
    for (size, readers), todo in phases:
        ranks = moved(ranks, size, readers)
        for rank, reader, source, hand_out in todo:
            one = ranks[rank % size]
            if hand_out:
                sample = one.hand_out(reader % readers)
                trained.update([sample] if sample else [])
            else:
                one.read(reader % readers, source)
    held = Counter(x for rank in ranks for buffer in rank.buffers.values() for x in buffer)
    # Finish the first indices of every source: all of them, once each.
    limit = 30
    for rank in ranks:
        for reader, source in itertools.product(range(rank.num_readers), SOURCES):
            while rank.cursors[reader][source] < limit:
                before = len(rank.buffers[reader])
                rank.read(reader, source)
                held.update(rank.buffers[reader][before:])
    everything = trained + held
    assert max(everything.values()) == 1
    wanted = {(source, index) for source in SOURCES for index in range(limit)}
    assert wanted <= set(everything)


@given(layouts, layouts, st.integers(0, 50))
def test_buffers_are_dealt_in_order_and_evenly(old, new, count):
    (size, readers), (new_size, new_readers) = old, new
    shards = [
        LoaderShard(d, r, buffer=[(d, r, k) for k in range(count % (2 + d + r))])
        for d in range(size)
        for r in range(readers)
    ]
    saved = LoaderState({}, shards, dp_size=size, num_readers=readers)
    found = [
        reshard(saved, LoaderState(dp_rank=d, dp_size=new_size, num_readers=new_readers))
        for d in range(new_size)
    ]
    dealt = [s for state in found for s in state.shards]
    samples = Counter(x for shard in dealt for x in shard.buffer)
    assert samples == Counter(x for shard in shards for x in shard.buffer)
    for shard in dealt:
        for _, group in itertools.groupby(shard.buffer, key=lambda x: x[:2]):
            places = [x[2] for x in group]
            assert places == list(range(places[0], places[0] + len(places)))
    if new_size % size and size % new_size:
        lengths = [len(shard.buffer) for shard in dealt]
        assert max(lengths) - min(lengths) <= 1
    if (size, readers) == (new_size, new_readers):
        return
    totals = {}
    for d, state in enumerate(found):
        total = sum(len(shard.buffer) for shard in state.shards)
        totals.setdefault(sources(size, d, new_size), []).append(total)
    # Ranks that share the samples of the same saved ranks hold equally many.
    assert all(max(held) - min(held) <= 1 for held in totals.values())


def test_two_ranks_become_four_and_one_as_in_the_paper():
    shards = [LoaderShard(0, 0, buffer=[1, 2, 3]), LoaderShard(1, 0, buffer=[4, 5])]
    saved = LoaderState({}, shards, dp_size=2)
    four = [reshard(saved, LoaderState(dp_rank=d, dp_size=4)).shards[0].buffer for d in range(4)]
    assert four == [[1, 2], [3], [4], [5]]
    assert reshard(saved, LoaderState()).shards[0].buffer == [1, 2, 3, 4, 5]
    three = [reshard(saved, LoaderState(dp_rank=d, dp_size=3)).shards[0].buffer for d in range(3)]
    assert three == [[1, 2], [3, 4], [5]]


def test_positions_of_all_workers_make_one_consumed_set():
    # Two ranks over ten samples: rank 0 took 0, 2, 4; rank 1 took 1.
    saved = LoaderState(
        {"consumed": {"web": {"count": 0, "ahead": [], "epoch": 4}}},
        [LoaderShard(0, 0, cursor={"web": 6}), LoaderShard(1, 0, cursor={"web": 3})],
        dp_size=2,
    )
    found = [reshard(saved, LoaderState(dp_rank=d, dp_size=3)) for d in range(3)]
    assert found[0].common["consumed"] == {"web": {"count": 3, "ahead": [4], "epoch": 4}}
    assert [state.shards[0].cursor["web"] for state in found] == [3, 7, 5]


class Opaque:
    def __init__(self, dp_rank, dp_size):
        self.dp_rank, self.dp_size, self.state = dp_rank, dp_size, None

    def state_dict(self):
        return {"rank": self.dp_rank}

    def load_state_dict(self, state):
        self.state = state


def restored(saved, dp_rank, dp_size, **options):
    loader = Opaque(dp_rank, dp_size)
    found = collect("main", {"dataloader": loader}, "plain", for_load=True)
    report = apply({"dataloader": loader}, found, {}, saved, **options)
    return loader.state, report["loader"]


def test_an_opaque_loader_is_exact_or_refused_or_begun_anew_when_asked():
    states = [
        collect("main", {"dataloader": Opaque(d, 2)}, "plain", for_load=False).loader
        for d in range(2)
    ]
    shards = [shard.to_data() for state in states for shard in state.shards]
    saved = LoaderState.from_data(states[0].common_data(), shards)
    assert restored(saved, 1, 2) == ({"rank": 1}, "exact")
    with pytest.raises(LayoutMismatch, match="must be loaded by 2 data-parallel ranks"):
        restored(saved, 0, 4)
    assert restored(saved, 0, 4, loader_policy="restart") == (None, "restarted")


GOOD = LoaderShard(0, 0, buffer=[1], cursor={"web": 2}).to_data()


@pytest.mark.parametrize(
    "change",
    [
        {"dp_rank": -1}, {"reader": True}, {"num_samples": 2}, {"buffer": None},
        {"cursor": {"web": -1}}, {"cursor": {3: 1}}, {"cursor": []}, {"dp_rank": "0"},
    ],
)  # fmt: skip
def test_damaged_shards_are_refused(change):
    with pytest.raises(CheckpointCorrupt):
        LoaderShard.from_data({**GOOD, **change})


@pytest.mark.parametrize(
    ("common", "shards"),
    [
        ({}, []), ([], []), ({"common": {}, "dp_size": 0, "num_readers": 1}, []),
        ({"common": {}, "dp_size": 2, "num_readers": 1}, [GOOD]),
        ({"common": {}, "dp_size": 1, "num_readers": 1}, [{**GOOD, "dp_rank": 1}]),
    ],
)  # fmt: skip
def test_missing_and_misplaced_shards_are_refused(common, shards):
    with pytest.raises(CheckpointCorrupt):
        LoaderState.from_data(common, shards)


@pytest.mark.parametrize("raw", [{}, {"count": 2, "ahead": [1]}, {"count": 1, "ahead": [3, 3]}])
def test_damaged_consumed_sets_are_refused(raw):
    with pytest.raises(CheckpointCorrupt):
        Consumed.from_data(raw)
