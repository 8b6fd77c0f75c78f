"""Coordinators and hosts of ranks show each other that they know one token."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError
from planish.engines.deploy import handshake
from planish.engines.deploy.dial import address_of
from planish.engines.deploy.handshake import answer_caller, call_host, ranks_token
from tests.integration.waiting import wait_for

TOKEN = "a token of this test"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that is busy holds up callers for longer than two seconds."""
    monkeypatch.setattr(handshake, "HELLO_S", 60.0)


class Host:
    """Answers one caller after another in a thread."""

    def __init__(self, token=TOKEN, busy_for=0):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.token, self.busy_for, self.verdicts = token, busy_for, []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            with caller:
                try:
                    is_busy = len(self.verdicts) < self.busy_for
                    self.verdicts.append(answer_caller(caller, self.token, is_busy=is_busy))
                except OSError as error:
                    self.verdicts.append(error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)


def test_one_token_opens_a_connection():
    with Host() as host, call_host(host.address, TOKEN, 60.0) as connection:
        assert connection.getpeername() == host.address
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert host.verdicts == [True]


def test_another_token_is_refused_by_both_sides():
    refused = pytest.raises(ProtocolError, match="must have the token of this coordinator")
    with Host(token="the token of another") as host, refused:
        call_host(host.address, TOKEN, 60.0)
    assert host.verdicts == [False]


def test_a_host_that_only_repeats_what_it_hears_is_no_rank():
    """Whoever records an exchange, or does not know the token, can not play the host."""
    listener = socket.create_server(("127.0.0.1", 0))

    def play():
        caller, _ = listener.accept()
        with caller:
            caller.sendall(handshake.MAGIC + b"\0" * 32)
            said = caller.recv(64)
            caller.sendall(b"\0" + said[32:])

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with listener, pytest.raises(ProtocolError, match="must have the token"):
        call_host(listener.getsockname(), TOKEN, 60.0)
    thread.join(60)


def test_the_token_is_never_on_the_wire(monkeypatch):
    heard = []
    receive = handshake._receive

    def record(connection, size, deadline):
        heard.append(receive(connection, size, deadline))
        return heard[-1]

    monkeypatch.setattr(handshake, "_receive", record)
    with Host() as host:
        call_host(host.address, TOKEN, 60.0).close()
        call_host(host.address, TOKEN, 60.0).close()
    assert len(heard) == 6
    assert len(set(heard)) == 6
    assert not [data for data in heard if TOKEN.encode() in data]


def test_a_busy_rank_is_called_until_it_is_free():
    with Host(busy_for=2) as host:
        call_host(host.address, TOKEN, 60.0).close()
    assert host.verdicts == [False, False, True]


def test_a_rank_that_stays_busy_is_told(monkeypatch):
    away = [0.0]

    def sleep(_):
        away[0] += 25.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + away[0], sleep=sleep)
    monkeypatch.setattr(handshake, "time", clock)
    with Host(busy_for=1000) as host, pytest.raises(EngineBusy, match="another coordinator has"):
        call_host(host.address, TOKEN, 60.0)
    assert set(host.verdicts) == {False}


def test_nobody_there_and_somebody_else_there_are_told():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(EngineError, match=f"must listen at 127.0.0.1:{port} within 0.3 s"):
            call_host(bound.getsockname(), TOKEN, 0.3)
    listener = socket.create_server(("127.0.0.1", 0))

    def greet():
        caller, _ = listener.accept()
        with caller:
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"." * 14)
            # A caller that leaves with something unread resets the connection.
            with contextlib.suppress(ConnectionResetError):
                caller.recv(1)

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    with listener, pytest.raises(ProtocolError, match=r"something that says b'HTTP/1\.1'"):
        call_host(listener.getsockname(), TOKEN, 60.0)
    thread.join(60)


def test_a_caller_that_says_nothing_is_left_for_the_next_one(monkeypatch):
    monkeypatch.setattr(handshake, "HELLO_S", 0.1)
    with Host() as host:
        with socket.create_connection(host.address):
            wait_for(lambda: host.verdicts, 60.0)
        assert isinstance(host.verdicts[0], TimeoutError)
        monkeypatch.setattr(handshake, "HELLO_S", 60.0)
        call_host(host.address, TOKEN, 60.0).close()


class Trickler:
    """A caller that says one byte every two seconds of its own clock."""

    def __init__(self):
        self.now, self.left = 0.0, 0.0

    def monotonic(self):
        return self.now

    def sendall(self, _):
        pass

    def settimeout(self, seconds):
        self.left = seconds

    def recv(self, _):
        if self.left <= 2.0:
            self.now += self.left
            raise TimeoutError
        self.now += 2.0
        return b"x"


def test_bytes_that_trickle_do_not_prolong_the_wait(monkeypatch):
    caller = Trickler()
    monkeypatch.setattr(handshake, "time", caller)
    with pytest.raises(TimeoutError):
        answer_caller(caller, TOKEN, is_busy=False)
    assert caller.now == handshake.HELLO_S


def test_a_token_must_be_there_and_long(monkeypatch):
    monkeypatch.delenv(handshake.TOKEN_ENV, raising=False)
    with pytest.raises(ConfigError, match="PLANISH_RANKS_TOKEN must hold a token of at least 16"):
        ranks_token()
    monkeypatch.setenv(handshake.TOKEN_ENV, "short")
    with pytest.raises(ConfigError, match="got 5 characters"):
        ranks_token()
    monkeypatch.setenv(handshake.TOKEN_ENV, TOKEN)
    assert ranks_token() == TOKEN


@pytest.mark.parametrize("text", ["ranks-0", "ranks-0:", ":9610", "ranks-0:0", "ranks-0:65536"])
def test_an_address_has_a_host_and_a_port(text):
    with pytest.raises(ConfigError, match="must read `host:port`, got "):
        address_of(text)
