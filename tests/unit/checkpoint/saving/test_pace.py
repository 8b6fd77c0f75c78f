"""An upload that is spread over a long time goes on at once when its process is asked to end."""

import contextlib
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from planish.base.errors import SaveFailed
from planish.checkpoint.saving import uploader
from planish.checkpoint.saving.staging import SharedBuffer
from planish.checkpoint.saving.upload import FileUpload, UploadJob
from planish.checkpoint.saving.uploader import Uploader
from planish.run import signals
from planish.run.signals import Terminated, stops_with
from planish.stages.train.ranks import boundaries
from planish.stages.train.ranks.boundaries import Sigterm
from tests.stores.memory import MemoryStore

YEAR = 3e7
"""A pace that no test waits for."""
FILES = [FileUpload(f"state/a-1/{number}", 8, "policy", 8 * number) for number in range(4)]


@pytest.fixture
def ending(monkeypatch):
    event = threading.Event()
    for module in (signals, uploader, boundaries):
        monkeypatch.setattr(module, "ENDING", event)
    return event


def upload(check, storage, threads=1):
    job = UploadJob(0, "memory://state", "state", "1", FILES, num_threads=threads, pace_s=YEAR)
    worker, buffer = Uploader(), SharedBuffer(32)
    buffer.view[:] = bytes(range(32))
    try:
        return worker.upload(job, buffer, storage, check)
    except SaveFailed:
        worker.give_up()
        raise


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("after", [0, 1])
def test_a_signal_ends_the_pace_and_all_is_written(ending, threads, after):
    storage = MemoryStore()
    looks = iter(range(100))

    def check():
        if next(looks) >= after:
            ending.set()

    answer = upload(check, storage, threads)
    assert [row[0] for row in answer["files"]] == [file.key for file in FILES]
    for file in FILES:
        assert storage.get(file.key, 8)[0] == bytes(range(file.start, file.start + 8))


def test_an_upload_that_begins_after_the_signal_has_no_pace(ending):
    ending.set()
    assert len(upload(lambda: None, MemoryStore())["files"]) == 4


def test_giving_up_ends_what_waits_for_its_pace(ending):
    storage = MemoryStore()

    def check():
        raise SaveFailed("the save was cancelled")

    with pytest.raises(SaveFailed, match="cancelled"):
        upload(check, storage)
    assert FILES[-1].key not in storage._objects


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_the_handler_of_a_stage_lifts_the_pace(ending, number, monkeypatch):
    # Its limit would end this process later.
    limit = SimpleNamespace(start=lambda: None)
    here = threading.current_thread()
    fake = SimpleNamespace(
        Thread=lambda **_: limit, current_thread=lambda: here, main_thread=lambda: here
    )
    monkeypatch.setattr(signals, "threading", fake)
    # A signal that `nohup` ignores would stay ignored.
    previous = signal.signal(number, signal.SIG_DFL)
    try:
        with stops_with(75) as told:
            with contextlib.suppress(Terminated):
                os.kill(os.getpid(), number)
                threading.Event().wait(60)
            assert told
    finally:
        signal.signal(number, previous)
    assert ending.is_set()


def test_a_rank_that_leaves_at_its_next_step_lifts_the_pace_at_once(ending):
    previous = signal.getsignal(signal.SIGTERM)
    asked = Sigterm()
    try:
        assert not asked.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(60)
        assert ending.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous)
