"""Trees of any size, and collectives of many ranks as threads around one real store."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import (
    CheckpointCorrupt,
    LayoutMismatch,
    PeerLost,
    PlanMismatch,
    SaveFailed,
    ShapeMismatch,
    StoreUnavailable,
)
from planish.checkpoint.ranks.control import Control, plan_tree
from planish.checkpoint.ranks.messages import (
    Line,
    connect,
    decode_errors,
    encode_errors,
    here_at,
    joined_error,
    listen,
)
from tests.integration.waiting import wait_for


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(2, 8))
def test_every_rank_hangs_from_rank_zero_and_no_group_is_over_the_fan_in(hosts, fan_in):
    numbers = list(dict.fromkeys(hosts))
    tree = plan_tree([numbers.index(host) for host in hosts], fan_in)
    assert tree.below(0) == set(range(len(hosts)))
    assert tree.parents[0] == -1
    assert all(tree.parents[rank] < rank for rank in range(1, len(hosts)))
    local = max(hosts.count(host) for host in hosts)
    levels = 1 + max(depth(tree, rank) for rank in range(len(hosts)))
    assert max(map(len, tree.children)) <= (fan_in - 1) * levels + local


def depth(tree, rank):
    return 0 if rank == 0 else 1 + depth(tree, tree.parents[rank])


def test_a_tree_of_8960_ranks_has_few_levels_and_few_neighbours():
    tree = plan_tree([rank // 8 for rank in range(8960)])
    assert max(depth(tree, rank) for rank in range(8960)) == 5
    assert len(tree.children[0]) == 7 + 7 * 3 + 2
    assert sum(map(len, tree.children)) == 8959


def test_errors_keep_their_kind_and_facts_on_the_way():
    found = {
        3: CheckpointCorrupt("flipped", file="a", block=7),
        1: SaveFailed("disk full", per_rank={1: "disk full"}),
        2: TypeError("key `x` is sparse"),
        4: KeyError("strange"),
    }
    back = decode_errors(encode_errors(found))
    assert (type(back[3]), back[3].file, back[3].block) == (CheckpointCorrupt, "a", 7)
    assert back[1].per_rank == {1: "disk full"}
    assert (type(back[2]), str(back[2])) == (TypeError, "key `x` is sparse")
    assert type(back[4]) is SaveFailed
    assert "KeyError" in str(back[4])


def test_many_errors_become_one_with_every_message_once_and_by_rank():
    found = {r: LayoutMismatch("hole in `w`") for r in (0, 2, 5)}
    joined = joined_error({**found, 3: StoreUnavailable("down")}, 6)
    assert str(joined) == "ranks 0, 2, 5: hole in `w`; rank 3: down"
    assert type(joined) is LayoutMismatch
    assert joined.per_rank == {0: "hole in `w`", 2: "hole in `w`", 3: "down", 5: "hole in `w`"}


def test_one_process_answers_itself_without_a_store():
    control = Control.single().call("save", 1.0)
    assert control.gather(b"a", "t") == [b"a"]
    assert control.broadcast(b"b", "t") == b"b"
    assert control.scatter([b"c"], "t") == b"c"
    assert control.deal(lambda: [b"d"], "t") == b"d"
    control.check()
    with pytest.raises(LayoutMismatch, match="hole"), control.settled("t"):
        raise LayoutMismatch("hole")


@pytest.mark.parametrize("other", ["0.0.9", "1.0", ""])
def test_ranks_of_two_releases_do_not_begin(monkeypatch, other):
    def gather(peers, own, group):
        peers[:] = [own._replace(version=other), own]

    facts = {"is_initialized": True, "get_rank": 1, "get_world_size": 2}
    for name, value in facts.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(PlanMismatch, match=f"one version of planish, got {{0: '{other}', 1: "):
        Control.join()


LIMIT = 120.0
"""Seconds after which a test that hangs ends."""


def wait_for_key(control, ending):
    """Wait until another rank has left a message in the store."""
    store = control.rendezvous()
    wait_for(lambda: any(key.endswith(ending) for key in store.list_keys()), LIMIT)


def in_ranks(hosts, scenario):
    """Run `scenario(control)` for every rank in a thread; returns values or raised errors."""
    server = listen()
    tree = plan_tree(hosts)
    results = [None] * len(hosts)
    peers = [here_at(server.port) for _ in hosts]
    controls = [
        Control(Line(connect("127.0.0.1", server.port), peers, r), r, tree)
        for r in range(len(hosts))
    ]

    def run(rank):
        try:
            results[rank] = scenario(controls[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    left = [key for key in server.list_keys() if key[:1].isdigit()]
    for control in controls:
        control.close()
    return results, left


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 1, 1, 2], list(range(12))])
def test_collectives_deliver_every_ranks_bytes_and_leave_nothing_in_the_store(hosts):
    def scenario(control):
        seen = []
        for number in range(3):
            call = control.call(f"save {number}", LIMIT)
            mine = bytes([call.rank]) * (1 + call.rank)
            gathered = call.gather(mine, "plan")
            reply = [part * 2 for part in gathered] if gathered else None
            seen.append(call.scatter(reply, "parts"))
            seen.append(call.broadcast(b"all" if call.rank == 0 else None, "word"))
            call.settle(None, "end")
            behind = call.twin(missing=SaveFailed)
            behind.settle(None, "end")
        return seen

    results, left = in_ranks(hosts, scenario)
    for rank, seen in enumerate(results):
        assert seen == [bytes([rank]) * 2 * (1 + rank), b"all"] * 3
    assert left == []


def test_an_error_of_one_rank_is_raised_on_all():
    def scenario(control):
        with control.call("load", LIMIT).settled("shapes"):
            if control.rank == 2:
                raise ShapeMismatch("`w` is [2] here")

    results, _ = in_ranks([0] * 4, scenario)
    assert [type(result) for result in results] == [ShapeMismatch] * 4
    assert {str(result) for result in results} == {"rank 2: `w` is [2] here"}
    assert [result.per_rank for result in results] == [{2: "`w` is [2] here"}] * 4


@pytest.mark.parametrize("tag", ["decide", "deal"])
def test_what_rank_zero_can_not_make_is_raised_on_all(tag):
    def make():
        raise ShapeMismatch("`w` is [2]")

    def scenario(control):
        getattr(control.call("load", LIMIT), tag)(make, tag)

    results, _ = in_ranks([0, 0, 1], scenario)
    assert {(type(result), str(result)) for result in results} == {(ShapeMismatch, "`w` is [2]")}


def test_an_abort_ends_the_wait_of_the_others_long_before_the_time_limit():
    def scenario(control):
        call = control.call("save", 10 * LIMIT)
        if call.rank == 1:
            call.abort(SaveFailed("rank 1: disk full", per_rank={1: "disk full"}))
            return None
        call.settle(None, "plan")
        return None

    results, _ = in_ranks([0] * 3, scenario)
    assert [getattr(results[rank], "per_rank", None) for rank in (0, 2)] == [{1: "disk full"}] * 2


def test_a_rank_that_stays_away_is_named_with_its_last_stage_and_catches_up_later():
    def scenario(control):
        raised = None
        for step in (1, 2, 3):
            if step == 2 and control.rank == 2:
                wait_for_key(control, "given_up")
                continue
            is_impatient = step == 2 and control.rank == 0
            if is_impatient:
                wait_for_key(control, "/plan#0/1")
            call = control.call(f"save step-{step}", 0.1 if is_impatient else LIMIT)
            try:
                call.settle(None, "plan")
            except PlanMismatch as error:
                raised = str(error)
        return raised

    results, _ = in_ranks([0] * 3, scenario)
    assert results[2] is None
    for message in results[:2]:
        assert "rank 2 must answer in `save step-2`" in message
        assert "its last stage was `began save step-1`" in message


def test_a_late_rank_learns_that_its_operation_was_given_up():
    def scenario(control):
        if control.rank == 1:
            wait_for_key(control, "given_up")
        call = control.call("save step-1", LIMIT if control.rank else 0.1)
        call.settle(None, "plan")

    results, _ = in_ranks([0, 0], scenario)
    assert [type(result) for result in results] == [PlanMismatch] * 2
    assert "rank 1 must answer" in str(results[1])
    assert [list(result.per_rank) for result in results] == [[1], [1]]


def test_the_end_of_the_store_is_an_error_that_says_so():
    server = listen()
    line = Line(connect("127.0.0.1", server.port), [here_at(server.port)] * 2, 1)
    del server
    with pytest.raises(PeerLost, match=r"rank 0 at .* must keep its store open"):
        line.take("1/x", "1", 0, time.monotonic() + LIMIT, {})
