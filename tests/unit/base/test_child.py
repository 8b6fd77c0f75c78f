"""Children that answer, hang, talk nonsense or leave copies, and messages that arrive whole."""

import os
import socket
import sys
import threading

import pytest

from planish.base.child import Channel, Child, start_child
from tests.integration.waiting import wait_for
from tests.processes import is_running

LIMIT = 120.0
HEAD = """
import json, os, sys, time
stream = os.fdopen(os.dup(0), "w")
def say(message):
    print(message if isinstance(message, str) else json.dumps(message), file=stream, flush=True)
"""
READY = HEAD + "say({'outcome': 'ready'})\n"


@pytest.fixture
def pair():
    return [Channel(end) for end in socket.socketpair()]


@pytest.fixture
def start():
    """A function that starts a program, and ends it with the test."""
    children = []

    def run(code, **options):
        children.append(start_child([sys.executable, "-c", code], **options))
        return children[-1]

    yield run
    for child in children:
        child.close()


def test_messages_arrive_whole_and_in_order_until_an_end_is_closed(pair):
    here, there = pair
    messages = [{"op": "a", "text": "x\n\ud800" * 500_000}, {"op": "b", "numbers": [1.5, -2]}]
    thread = threading.Thread(target=lambda: [here.send(message) for message in messages])
    thread.start()
    assert [there.receive(LIMIT), there.receive(LIMIT)] == messages
    thread.join()
    assert not there.has_message()
    here.close()
    here.close()
    with pytest.raises(ConnectionError, match="has closed the connection"):
        there.receive()
    with pytest.raises(ConnectionError):
        there.send({})


def test_two_messages_in_one_piece_are_two(pair):
    here, there = pair
    here.send({"n": 1})
    here.send({"n": 2})
    assert there.has_message(LIMIT)
    assert [there.receive(), there.receive()] == [{"n": 1}, {"n": 2}]


def test_no_wait_is_longer_than_its_limit(pair):
    here, there = pair
    os.write(there.fileno(), b'{"half": ')
    assert not here.has_message(0.1)
    with pytest.raises(TimeoutError, match=r"no message within 0\.1 s"):
        here.receive(0.1)
    with pytest.raises(TimeoutError, match=r"was not read within 0\.1 s"):
        here.send({"text": "x" * 5_000_000}, 0.1)


def test_a_close_wakes_the_thread_that_waits(pair):
    errors = []

    def wait():
        try:
            pair[0].receive()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair[0].close()
    thread.join(LIMIT)
    assert len(errors) == 1


def test_a_descriptor_arrives_with_its_message_and_only_where_it_is_wanted():
    ends = [Channel(end, max_files=1) for end in socket.socketpair()]
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    ends[0].send({"file": True}, files=[write])
    assert ends[1].receive(LIMIT) == {"file": True}
    (copy,) = ends[1].files
    os.write(copy, b"through")
    os.close(copy)
    assert os.read(read, 100) == b"through"
    closed = [Channel(end) for end in socket.socketpair()]
    closed[0].send({}, files=[write])
    assert closed[1].receive(LIMIT) == {}
    assert closed[1].files == []
    del ends, closed
    os.close(write)
    os.close(read)
    assert len(os.listdir("/proc/self/fd")) == before - 4


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "its process ended, exit code 3"),
        ("say('not json')", "must be JSON, got Expecting"),
        ("say('[]')", "must be an object"),
        ("say('[' * 60000)", "must be JSON"),
        ("say('x' * 200000)", "more than 65536 bytes"),
        ("while True: say('x' * 1000000)", "more than 65536 bytes"),
    ],
)
def test_a_child_that_dies_or_talks_nonsense_is_ended(start, code, reason):
    child = start(f"{READY}sys.stdin.readline()\n{code}", max_bytes=65536)
    assert child.wait_ready(LIMIT) == {"outcome": "ready"}
    with pytest.raises(OSError, match=reason):
        child.ask({}, LIMIT)
    assert not child.pid


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("time.sleep(600)", 0.1, "not ready within"),
        ("say({'error': 'no module'})", LIMIT, "no module"),
        ("sys.exit(4)", LIMIT, "its process ended, exit code 4"),
    ],
)
def test_a_child_that_is_not_ready_is_ended_for_a_reason(start, code, seconds, reason):
    child = start(HEAD + code)
    with pytest.raises(OSError, match=reason):
        child.wait_ready(seconds)
    assert not child.pid


@pytest.mark.parametrize(
    "code", ["time.sleep(600)", "while True: stream.write('x'), stream.flush()"]
)
def test_a_watch_ends_the_wait_for_a_silent_child_and_for_one_that_writes_on(start, code):
    child = start(READY + code, watch=lambda: "the disk is full" if child.pid else "")
    with pytest.raises(OSError, match="the disk is full"):
        child.ask(None, LIMIT) and child.ask(None, LIMIT)


def test_the_end_of_a_child_is_the_end_of_its_descendants(start):
    child = start(f"{HEAD}pid = os.fork()\nif pid: say({{'pid': pid}})\ntime.sleep(600)")
    pid = child.ask(None, LIMIT)["pid"]
    assert child.close() == -9
    wait_for(lambda: not is_running(pid), LIMIT)


def test_a_child_ends_by_itself_where_it_gets_the_time(start):
    child = start(f"{READY}sys.stdin.read()\nsys.exit(5)")
    child.wait_ready(LIMIT)
    assert child.code() is None
    assert child.close(LIMIT) == 5
    assert child.close() is None


TELL = f"{HEAD}say(dict(os.environ))\nsys.stderr.write('loud')\n"


def test_a_child_gets_credentials_and_standard_error_by_trust_only(start, monkeypatch, capfd):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    for is_trusted in (False, True):
        child = start(TELL, is_trusted=is_trusted, environment={"OWN": "1"})
        seen = child.ask(None, LIMIT)
        assert child.close(LIMIT) == 0
        assert (seen["OWN"], seen["PATH"]) == ("1", os.environ["PATH"])
        assert ("AWS_SECRET_ACCESS_KEY" in seen) is is_trusted
        assert capfd.readouterr() == ("", "loud" * is_trusted)


def test_a_channel_without_a_process_is_a_child_too(pair):
    child = Child(pair[0])
    pair[1].send({"n": 1})
    assert child.ask({"n": 0}, LIMIT) == {"n": 1}
    assert (child.pid, child.code(), child.close()) == (0, None, None)
