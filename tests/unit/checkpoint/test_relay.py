"""Relays: every message arrives exactly once, by the network or from a relay of the machine."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.checkpoint.load.relay import DIRECT, agree, is_useful, propose
from planish.checkpoint.plan.reads import Messages, Pieces, RankReads, Requests

NONE = np.zeros(0, np.int64)


class Board:
    """Stands in for the network of all ranks."""

    def __init__(self, size):
        self.told = [{} for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=30.0)


class FakeMesh:
    """What relays need of a mesh."""

    def __init__(self, rank, hosts, board=None):
        self.rank, self.hosts, self.board = rank, tuple(hosts), board
        self.members = list(range(len(hosts)))

    def trade(self, found):
        self.board.told[self.rank] = found
        self.board.barrier.wait()
        return {p: self.board.told[p][self.rank] for p in self.members if p != self.rank}


def column(values):
    return np.array(values, np.int64)


def messages_of(rows):
    """Return messages of one piece each, of (peer, request, content)."""
    count = len(rows)
    sizes = [content[1] for _, _, content in rows]
    return Messages(
        column([peer for peer, _, _ in rows]),
        column([request for _, request, _ in rows]),
        np.arange(count),
        np.ones(count, np.int64),
        column(sizes),
    )


def reads_of(job, rank):
    """Return the messages that one rank sends and receives; `job` is (reader, request, peer) ->
    (first byte, number of bytes)."""
    keys = sorted(job, key=lambda key: (key[1], key[2], key[0]))
    sent = [(peer, q, job[r, q, peer]) for r, q, peer in keys if r == rank]
    keys = sorted(job, key=lambda key: (key[1], key[0]))
    got = [(r, q, job[r, q, peer]) for r, q, peer in keys if peer == rank]
    content = column([one for _, _, one in sent]).reshape(-1, 2)
    ones = np.ones((len(sent), 1), np.int64)
    pieces = Pieces(
        column([q for _, q, _ in sent]), ones[:, 0], ones[:, 0], content[:, 0],
        ones, content[:, 1:], ones, ones[:, 0],
    )  # fmt: skip
    empty = Pieces(*[NONE] * 8)
    return RankReads(
        Requests(NONE, NONE, NONE), empty, messages_of(sent), pieces, messages_of(got), empty
    )


def settled(job, hosts, turns, half_bytes):
    """Return proposals and agreement of every rank."""
    size, board = len(hosts), Board(len(hosts))
    reads = [reads_of(job, rank) for rank in range(size)]
    meshes = [FakeMesh(rank, hosts, board) for rank in range(size)]
    proposed = [propose(meshes[rank], reads[rank]) for rank in range(size)]
    offers = {
        (r, int(q), int(peer)): int(relay)
        for r in range(size)
        for q, peer, relay in zip(
            reads[r].sends.request, reads[r].sends.peer, proposed[r], strict=True
        )
    }
    found = [None] * size

    def run(rank):
        into = reads[rank].receives
        keys = list(zip(into.peer.tolist(), into.request.tolist(), strict=True))
        offered = column([offers[r, q, rank] for r, q in keys])
        when = column([turns[r, q] for r, q in keys])
        found[rank] = agree(
            meshes[rank], reads[rank], proposed[rank], offered, when, half_bytes[rank]
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return reads, found


def random_job(rng, hosts):
    job, turns = {}, {}
    for reader in range(len(hosts)):
        for request in range(rng.randint(0, 4)):
            contents = [(rng.randint(0, 9), rng.randint(1, 40)) for _ in range(2)]
            turns[reader, request] = rng.randint(0, 3)
            for peer in range(len(hosts)):
                if peer != reader and rng.random() < 0.8:
                    job[reader, request, peer] = rng.choice(contents)
    return job, turns


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_message_arrives_once_and_no_memory_is_used_twice(seed):
    rng = random.Random(seed)
    hosts = [rng.randrange(3) for _ in range(rng.randint(2, 7))]
    job, turns = random_job(rng, hosts)
    room = [rng.choice([0, 40, 10_000]) for _ in hosts]
    reads, found = settled(job, hosts, turns, room)
    used = defaultdict(list)
    for (reader, request, peer), (first, size) in job.items():
        sends, into = reads[reader].sends, reads[peer].receives
        sent = np.flatnonzero((sends.peer == peer) & (sends.request == request))
        got = np.flatnonzero((into.peer == reader) & (into.request == request))
        (out,), (message,) = sent.tolist(), got.tolist()
        assert (out in found[reader].skipped) == (message in found[peer].taken)
        if message in found[peer].taken:
            relay, place = found[peer].taken[message]
            assert hosts[relay] == hosts[peer] != hosts[reader]
            assert job[reader, request, relay] == (first, size)
            theirs = reads[relay].receives
            (row,) = np.flatnonzero((theirs.peer == reader) & (theirs.request == request)).tolist()
            assert found[relay].kept[row] == place
        if message in found[peer].kept:
            place = found[peer].kept[message]
            half = found[peer].num_bytes // 2
            assert half <= room[peer] + 16
            assert place // half == turns[reader, request] % 2
            assert place + size <= found[peer].num_bytes
            used[peer, turns[reader, request]].append((place, place + size))
    for spans in used.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_with_room_every_content_crosses_the_network_once_for_a_machine():
    hosts = [0, 1, 1, 1, 1]
    job = {(0, q, peer): (0, 8) for q in range(4) for peer in range(1, 5)}
    job[0, 3, 4] = (4, 4)  # another part of the same request
    reads, found = settled(job, hosts, dict.fromkeys([(0, q) for q in range(4)], 0), [99] * 5)
    assert len(reads[0].sends) - len(found[0].skipped) == 5
    # The ranks share the work: each is the relay of one request of the first four.
    assert [len(one.kept) for one in found[1:]] == [2, 1, 1, 0]
    assert [len(one.taken) for one in found[1:]] == [2, 3, 3, 3]
    _, found = settled(job, hosts, dict.fromkeys([(0, q) for q in range(4)], 0), [0] * 5)
    assert not any(one.skipped or one.taken or one.kept or one.num_bytes for one in found)


@pytest.mark.parametrize(
    ("hosts", "expected"), [([0, 0, 0], False), ([0, 1, 2], False), ([0, 0, 1], True)]
)
def test_relays_need_several_ranks_on_one_of_several_machines(hosts, expected):
    assert is_useful(FakeMesh(0, hosts)) == expected


def test_nothing_is_proposed_for_ranks_of_the_own_machine_or_for_single_receivers():
    job = {(0, 0, 1): (0, 8), (0, 0, 2): (0, 8), (0, 0, 3): (0, 8), (0, 1, 2): (0, 8)}
    assert propose(FakeMesh(0, [0, 0, 0, 1]), reads_of(job, 0)).tolist() == [DIRECT] * 4
    assert propose(FakeMesh(0, [0, 0, 1, 1]), reads_of(job, 0)).tolist() == [DIRECT, 2, 2, DIRECT]
