"""One reader for every byte, and everybody gets what it wants."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan import match as matching
from planish.checkpoint.plan import reads as planned_reads
from planish.checkpoint.plan import share
from planish.checkpoint.plan.match import ShardIndex, match
from planish.checkpoint.plan.reads import assemble
from planish.checkpoint.plan.save import plan_save
from planish.checkpoint.plan.share import share_reads
from tests.thin import examples
from tests.unit.checkpoint.planned import item_bytes, random_tensors, random_world, read, write

MIB = 1 << 20


def small_blocks(patch):
    """Shrink blocks and requests, so that small tensors cross many of them."""
    patch.setattr(planned_reads, "BLOCK", 64)
    patch.setattr(share, "BLOCK", 64)
    patch.setattr(share, "REQUEST_BYTES", 256)
    patch.setattr(share, "SHORT_BYTES", 128)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32), small=st.booleans())
def test_every_rank_gets_exactly_its_bytes_and_no_byte_is_read_twice(seed, small):
    rng = random.Random(seed)
    specs = random_tensors(rng, rng.randint(0, 6), side=9)
    source = random_world(rng, rng.randint(1, 6), specs)
    plan = plan_save(source.columns, split_bytes=rng.choice([40, 1000, 1 << 20]))
    files, metadata = write(source, plan), plan.metadata({})
    ranks = rng.randint(1, 6)
    target = random_world(rng, ranks, specs, source)
    for items in target.items:
        if items and rng.random() < 0.3:
            items.append(rng.choice(items))
    hosts = [rng.randrange(3) for _ in range(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "REQUEST_SECONDS", rng.choice([0.0, 1e-9, 1.0]))
        patch.setattr(share, "BYTES_PER_SECOND", rng.choice([1.0, 1e9]))
        patch.setattr(matching, "_CHUNK", rng.choice([1, 7, 1 << 20]))
        if small:
            small_blocks(patch)
        index = ShardIndex(metadata)
        reads = [match(metadata, items, index=index) for items in target.items]
        shared = share_reads(metadata, reads, hosts=hosts)
        got = read(metadata, files, shared, reads, target.items)
    for items, held in zip(target.items, got, strict=True):
        for item, boxes in zip(items, held, strict=True):
            assert b"".join(box.tobytes() for box in boxes) == item_bytes(target, item)
    check_requests(metadata, shared, 256 if small else 16 * MIB)


def bytes_from_store(shared):
    return int((shared.requests.stop - shared.requests.start).sum())


def check_requests(metadata, shared, limit):
    """Requests are disjoint, short, inside their files, and numbered within their reader."""
    sizes = np.array(metadata.files.sizes, np.int64)
    requests = shared.requests
    assert (requests.stop > requests.start).all()
    assert (requests.stop - requests.start <= limit).all()
    assert (requests.stop <= sizes[requests.file]).all()
    same = requests.file[1:] == requests.file[:-1]
    assert (requests.start[1:] >= requests.stop[:-1])[same].all()
    for rank in range(shared.ranks):
        assert shared.number[shared.reader == rank].tolist() == list(
            range(int((shared.reader == rank).sum()))
        )


def spec(fqn, shape, dtype="F32"):
    return TensorSpec("main", "model", fqn, dtype, shape)


def planned(items_of_ranks, targets, **more):
    """Save from some ranks, and share the reads of others; no data."""
    columns = [Columns.from_items(items) for items in items_of_ranks]
    metadata = plan_save(columns).metadata({})
    reads = [match(metadata, items) for items in targets]
    return metadata, reads, share_reads(metadata, reads, **more)


def replicas(one, ranks):
    return [[LocalItem(one, (whole(one.shape),))] for _ in range(ranks)]


def test_replicas_are_read_once_and_spread_over_the_readers():
    one = spec("w", (64 * MIB,))
    metadata, reads, shared = planned(replicas(one, 1), replicas(one, 4))
    assert bytes_from_store(shared) == metadata.files.sizes[0]
    load = np.bincount(shared.reader, shared.requests.stop - shared.requests.start)
    assert max(load) - min(load) <= 16 * MIB
    plan = assemble(metadata, shared.part(0), reads[0])
    assert int(plan.copies.nbytes.sum() + plan.asks.nbytes.sum()) == 256 * MIB
    assert sorted(set(plan.readers.tolist())) == [1, 2, 3]


def test_the_same_layout_needs_no_exchange():
    one = spec("w", (64 * MIB,))
    parts = [[LocalItem(one, (Box((rank * 16 * MIB,), (16 * MIB,)),))] for rank in range(4)]
    metadata, reads, shared = planned(parts, parts)
    for rank in range(4):
        plan = assemble(metadata, shared.part(rank), reads[rank])
        assert len(plan.asks) == 0
        assert int((plan.requests.stop - plan.requests.start).sum()) == metadata.files.sizes[rank]
    assert bytes_from_store(shared) == sum(metadata.files.sizes)


def test_two_to_four_ranks_share_only_the_blocks_at_the_seams():
    one = spec("w", (64 * MIB,))

    def parts(ranks):
        size = 64 * MIB // ranks
        return [[LocalItem(one, (Box((rank * size,), (size,)),))] for rank in range(ranks)]

    metadata, reads, shared = planned(parts(2), parts(4))
    sent = [int(assemble(metadata, shared.part(r), reads[r]).asks.nbytes.sum()) for r in range(4)]
    # In each file the middle lies inside one block, of which one reader sends the other's part.
    assert 0 < sum(sent) < 2 * MIB
    assert bytes_from_store(shared) == sum(metadata.files.sizes)


def test_short_runs_of_different_ranks_share_a_request_and_long_ones_do_not():
    sizes = [1, 1, 1, 8, 8]
    ends = np.cumsum([0, *sizes]) * MIB // 4
    one = spec("w", (19 * MIB // 4,))
    targets = [
        [LocalItem(one, (Box((int(low),), (int(high - low),)),))]
        for low, high in itertools.pairwise(ends)
    ]
    _, _, shared = planned(replicas(one, 1), targets)
    # The header moves every seam into a block that both neighbours need.
    assert (-(-shared.requests.stop // MIB)).tolist() == [4, 11, 12, 20]
    assert shared.reader.tolist()[1::2] == [3, 4]


def test_the_reader_sits_on_the_host_that_needs_most():
    one = spec("w", (MIB,))
    _, _, shared = planned(replicas(one, 1), replicas(one, 4), hosts=[0, 5, 5, 5])
    assert shared.reader.tolist() == [1]
    _, _, plain = planned(replicas(one, 1), replicas(one, 4))
    assert plain.reader.tolist() == [0]


def test_replication_is_how_many_ranks_need_a_block_on_average():
    one = spec("w", (4 * MIB,))
    half = [LocalItem(one, (Box((0,), (2 * MIB - 64,)),))]
    for targets, expected in ((1, 1.0), (4, 4.0)):
        assert planned(replicas(one, 1), replicas(one, targets))[2].replication == expected
    # 17 blocks with that of the header, of which the second rank needs the first eight.
    _, _, shared = planned(replicas(one, 1), [*replicas(one, 1), half])
    assert shared.replication == pytest.approx((17 + 8) / 17)
    nothing = [[] for _ in range(3)]
    assert planned(replicas(one, 1), nothing)[2].replication == 1.0


def test_a_column_is_fetched_in_runs_or_as_a_whole_by_what_it_costs(monkeypatch):
    one = spec("w", (8, MIB))
    target = [[LocalItem(one, (Box((0, 0), (8, 1024)),))]]
    bytes_read = {}
    for name, request_s, bytes_per_s in (("slow", 1e-6, 1e6), ("far", 1.0, 1e12)):
        monkeypatch.setattr(share, "REQUEST_SECONDS", request_s)
        monkeypatch.setattr(share, "BYTES_PER_SECOND", bytes_per_s)
        metadata, reads, shared = planned(replicas(one, 1), target)
        bytes_read[name] = bytes_from_store(shared)
        plan = assemble(metadata, shared.part(0), reads[0])
        assert int((plan.copies.lengths.prod(axis=1)).sum()) == 8 * 1024
    # Eight rows of 4 MiB: a block of each, or all but the last row's rest.
    assert bytes_read == {"slow": 8 * MIB, "far": 29 * MIB}


def test_elements_across_blocks_are_refused():
    one = spec("w", (8 * MIB,))
    metadata, _, _ = planned(replicas(one, 1), replicas(one, 1))
    metadata.shards.start[:] += 1
    metadata.files.sizes[0] += 1
    reads = [match(metadata, items) for items in replicas(one, 1)]
    with pytest.raises(CheckpointCorrupt, match="multiple of its element's size"):
        assemble(metadata, share_reads(metadata, reads).part(0), reads[0])
