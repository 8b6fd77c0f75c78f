"""The commit protocol, stopped, failed, paused and raced at every single store request."""

import pytest

from planish.base.errors import CheckpointExists, StoreError, StoreUnavailable
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import Commit
from tests import thin
from tests.stores.faulty import FaultyStore, Stopped, once_at, stop_at
from tests.stores.memory import MemoryStore
from tests.unit.checkpoint.small_saves import (
    check_all,
    files_of,
    load,
    outcome,
    path_of,
    save,
    stray,
)

NEW, OVERWRITE = "new", "overwrite"
KINDS = pytest.mark.parametrize("kind", [NEW, OVERWRITE])


def prepared():
    """A store with the checkpoint of step 1."""
    storage = MemoryStore()
    save(storage, 1)
    return storage


def write(storage, kind, **options):
    """Save step 2 at its own path, or over step 1."""
    if kind == NEW:
        return save(storage, 2, **options)
    return save(storage, 2, path=path_of(1), overwrite=True, **options)


def old_and_new(kind):
    return ([1], [1, 2]) if kind == NEW else ([1], [2])


def num_requests(kind):
    """How many requests a save makes that nothing disturbs."""
    storage = FaultyStore(prepared())
    write(storage, kind)
    assert check_all(storage.inner) == old_and_new(kind)[1]
    return storage.requests


def assert_is_clean(storage):
    """Nothing is left but what commits name, and no upload is open."""
    assert stray(storage) == []
    assert storage._uploads == {}


def test_a_save_is_sixteen_requests_and_its_three_objects():
    assert num_requests(NEW) <= 16 + len(files_of(2))
    assert num_requests(OVERWRITE) == num_requests(NEW) + 1


@pytest.mark.slow
@KINDS
def test_a_save_that_dies_anywhere_leaves_old_or_new_and_nothing_else(kind):
    old, new = old_and_new(kind)
    seen = []
    for request in range(1, num_requests(kind) + 1):
        for after in (False, True):
            storage = prepared()
            with pytest.raises(Stopped):
                write(FaultyStore(storage, stop_at(request, after=after)), kind)
            seen.append(check_all(storage))
            assert seen[-1] in (old, new)
            catalog.gc(storage, "run", grace_s=0)
            assert check_all(storage) == seen[-1]
            assert_is_clean(storage)
            # The next save is not in the way of what was left.
            assert save(storage, 3).step == 3
            assert check_all(storage) == [*seen[-1], 3]
            if seen[-1] == [1] and kind == NEW:
                assert save(storage, 2).step == 2
    # The switch happens once: never back to old.
    assert seen == sorted(seen)
    assert seen[0] == old
    assert seen[-1] == new


@KINDS
@pytest.mark.parametrize("fault", ["fail", "lost"])
def test_a_request_that_fails_or_whose_answer_is_lost_never_lies(kind, fault):
    old, new = old_and_new(kind)
    for request in range(1, num_requests(kind) + 1):
        storage = prepared()
        faulty = FaultyStore(storage, once_at(request, fault))
        result = outcome(lambda faulty=faulty: write(faulty, kind), StoreUnavailable)
        assert check_all(storage) == (new if isinstance(result, Commit) else old)
        catalog.gc(storage, "run", grace_s=0)
        assert check_all(storage) == (new if isinstance(result, Commit) else old)
        assert_is_clean(storage)


@KINDS
def test_a_commit_whose_outcome_can_not_be_asked_is_neither_claimed_nor_cleared(kind):
    storage = prepared()
    lost = []

    def fault(number, what, key):
        if (what, key[-6:]) == ("complete", "COMMIT"):
            lost.append(number)
            return "lost"
        return "fail" if lost else ""

    with pytest.raises(StoreUnavailable):
        write(FaultyStore(storage, fault), kind)
    assert check_all(storage) == old_and_new(kind)[1]
    catalog.gc(storage, "run", grace_s=0)
    assert check_all(storage) == old_and_new(kind)[1]


def paused_at(storage, request, act):
    """A storage that calls `act` just before that request."""

    def fault(number, _kind, _key):
        if number == request:
            act()
        return ""

    return FaultyStore(storage, fault)


@KINDS
def test_a_collection_at_any_moment_makes_a_save_fail_but_never_wrong(kind):
    old, new = old_and_new(kind)
    results = []
    for request in range(1, num_requests(kind) + 1):
        storage = prepared()
        faulty = paused_at(storage, request, lambda s=storage: catalog.gc(s, "run", grace_s=0))
        result = outcome(lambda faulty=faulty: write(faulty, kind), StoreError)
        results.append(isinstance(result, Commit))
        assert check_all(storage) == (new if results[-1] else old)
        catalog.gc(storage, "run", grace_s=0)
        assert_is_clean(storage)
    # Before the journal there is nothing to collect, after the commit nothing that may be.
    assert results[0]
    assert results[-1]
    assert results.count(False) > 10


@KINDS
def test_a_collection_with_grace_disturbs_no_save(kind):
    for request in range(1, num_requests(kind) + 1):
        storage = prepared()
        faulty = paused_at(storage, request, lambda s=storage: catalog.gc(s, "run"))
        write(faulty, kind)
        assert check_all(storage) == old_and_new(kind)[1]


@pytest.mark.slow
def test_a_collection_that_stops_anywhere_under_a_paused_save_never_breaks_what_is_visible():
    for request in range(2, num_requests(NEW) + 1, 1 if thin.full else 3):
        for stop in range(1, 40):
            storage = prepared()
            done = []

            def collect(storage=storage, stop=stop, done=done):
                try:
                    catalog.gc(FaultyStore(storage, stop_at(stop)), "run", grace_s=0)
                    done.append(True)
                except Stopped:
                    pass

            result = outcome(
                lambda r=request, s=storage, c=collect: write(paused_at(s, r, c), NEW), StoreError
            )
            assert check_all(storage) == ([1, 2] if isinstance(result, Commit) else [1])
            catalog.gc(storage, "run", grace_s=0)
            assert_is_clean(storage)
            if done:
                break
        else:
            pytest.fail("a collection must end within 40 requests")


@KINDS
def test_of_two_saves_to_one_path_exactly_one_wins_wherever_the_other_comes_in(kind):
    for request in range(1, num_requests(kind) + 1):
        storage = prepared()
        path = path_of(2 if kind == NEW else 1)
        second = []

        def other(storage=storage, second=second, path=path):
            second.append(
                outcome(
                    lambda: save(storage, 9, path=path, overwrite=kind != NEW, salt="other"),
                    CheckpointExists,
                )
            )

        first = outcome(
            lambda r=request, s=storage, o=other: write(paused_at(s, r, o), kind), CheckpointExists
        )
        winner = load(storage, path)
        won = [result for result in (first, *second) if result == winner]
        # An overwrite that begins when the other has ended replaces it: both have won in turn.
        in_turn = kind == OVERWRITE and isinstance(first, Commit) and request == 1
        assert len(won) == 1
        if not in_turn:
            lost = [result for result in (first, *second) if result != winner]
            assert isinstance(lost[0], (CheckpointExists, Commit))
            if isinstance(lost[0], Commit):  # it was replaced by the later one, which named it
                assert (kind, lost[0]) == (OVERWRITE, first)
        catalog.gc(storage, "run", grace_s=0)
        assert load(storage, path) == winner
        assert_is_clean(storage)


@pytest.mark.parametrize("act", ["delete", "retain"])
def test_a_removal_that_stops_anywhere_shows_whole_checkpoints_only(act):
    def remove(storage):
        if act == "delete":
            catalog.delete(storage, path_of(1))
        else:
            catalog.retain(storage, "run", keep_last=1)

    for request in range(1, 40):
        storage = prepared()
        save(storage, 2)
        try:
            remove(FaultyStore(storage, stop_at(request)))
            ended = True
        except Stopped:
            ended = False
        assert check_all(storage) in ([1, 2], [2])
        catalog.gc(storage, "run", grace_s=0)
        assert_is_clean(storage)
        if ended:
            break
    assert ended
    assert request > 8
    assert check_all(storage) == [2]
