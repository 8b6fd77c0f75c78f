"""Two writers of one place, the first paused before each of its requests while the second runs."""

import itertools
import threading

import pytest
import torch

from planish import store
from planish.base.errors import CheckpointError, ObjectMissing, RecordError
from planish.checkpoint import train_state
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import read_commit
from planish.records.files import fetch_files, write_files
from planish.store.base import STORES
from tests.stores.faulty import FaultyStore
from tests.stores.memory import MemoryStore

ROOT = "pausing://x/run"
STEP = f"{ROOT}/states/step-00000003"
WHERE = {}


def connect(_bucket, *, timeout_s=0.0):
    return WHERE["store"]


@pytest.fixture
def pausing(monkeypatch):
    """Return what runs `first`, and `second` in the middle of it before a request of its own."""
    monkeypatch.setitem(STORES, "pausing", f"{__name__}:connect")

    def run(first, second, request):
        inner = MemoryStore()
        WHERE["store"] = opened = FaultyStore(inner)
        first(0)
        state = {"ran": False}
        numbers = itertools.count(1)

        def fault(_number, _kind, _key):
            # A save writes on a thread behind training; what follows its commit is on this one.
            is_own = threading.current_thread() is threading.main_thread()
            if is_own and not state["ran"] and next(numbers) == request:
                state["ran"] = True
                WHERE["store"] = inner
                state["second"] = outcome(second)
                WHERE["store"] = opened
            return ""

        opened.fault = fault
        state["first"] = outcome(lambda _: first(1))
        return state

    return run


def outcome(act):
    try:
        return act(2)
    except (CheckpointError, RecordError, ObjectMissing) as error:
        return error


def save(number):
    state = {"model": {"w": torch.full((3,), float(number))}}
    return train_state.save(STEP, state, parents={}, attributes={"step": 3})


def every_request(run, first, second):
    for request in itertools.count(1):
        found = run(first, second, request)
        if not found["ran"]:
            assert request > 3
            return
        yield found


def test_a_paused_save_never_hides_one_that_came_after_it(pausing):
    for found in every_request(pausing, save, save):
        newest = train_state.latest(ROOT)
        assert newest is not None
        told = [found[who] for who in ("first", "second") if not isinstance(found[who], Exception)]
        assert newest in told
        train_state.read_record(newest.pin())
        assert read_commit(WHERE["store"], "run/states/step-00000003") is not None


def test_a_removal_takes_no_commit_that_came_after_it_looked(pausing):
    path = "run/states/step-00000003"

    def remove(number):
        return save(0) if number == 0 else catalog.delete(WHERE["store"], path)

    for number, found in enumerate(every_request(pausing, remove, save)):
        came_after = number > 0  # before its first request the removal has not looked yet
        catalog.gc(WHERE["store"], "run", grace_s=0.0)
        newest = train_state.latest(ROOT)
        assert newest == (found["second"] if came_after else None)


def test_two_writers_of_a_set_leave_one_that_is_whole(pausing):
    def write(number):
        files = {f"f{n}": f"{number} {n}".encode() for n in range(3)}
        return write_files(f"{ROOT}/set", "policy/1", files, parents={}, attributes={"n": number})

    for found in every_request(pausing, write, write):
        told = [found[who] for who in ("first", "second")]
        whole = [ref for ref in told if not isinstance(ref, Exception)]
        assert whole
        standing = [ref for ref in whole if store.exists(f"{ROOT}/set/manifest.json")]
        assert standing
        folder = fetch_files(f"{ROOT}/set")
        assert len({path.read_text()[0] for path in folder.glob("f*")}) == 1


def test_equal_bytes_of_two_writers_are_no_fault(pausing):
    def write(_):
        return write_files(f"{ROOT}/set", "policy/1", {"a": b"1"}, parents={}, attributes={})

    for found in every_request(pausing, write, write):
        assert found["first"] == found["second"]
