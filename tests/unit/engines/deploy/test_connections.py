"""Coordinators and hosts of ranks show each other that they know one token."""

import contextlib
import os
import socket
import threading
from multiprocessing import AuthenticationError

import pytest
from pydantic import ValidationError

from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError
from planish.engines.config import EngineConfig
from planish.engines.deploy import connections
from planish.engines.deploy.connections import (
    address_of,
    answer_coordinator,
    call_rank,
    proven,
    ranks_token,
)
from tests.integration.waiting import wait_for

TOKEN = "a token of this test"
PEERS = ["a0:9610", "a1:9610", "e0:9610"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that is busy holds up callers for longer than two seconds."""
    monkeypatch.setattr(connections, "HELLO_S", 60.0)


class Host:
    """Answers one caller after another in a thread."""

    def __init__(self, answer=None):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.answer = answer or (lambda caller: answer_coordinator(caller, TOKEN, is_busy=False))
        self.verdicts = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                caller, _ = self.listener.accept()
                with caller:
                    try:
                        self.verdicts.append(self.answer(caller))
                    except (AuthenticationError, OSError) as error:
                        self.verdicts.append(error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)


def test_one_token_opens_a_connection_whose_end_the_kernel_finds_out():
    with Host() as host:
        connection = call_rank(host.address, TOKEN, 60.0)
        with connection, socket.socket(fileno=os.dup(connection.fileno())) as end:
            assert end.getpeername() == host.address
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert host.verdicts == [None]


def test_another_token_is_told_to_both():
    with Host() as host, pytest.raises(ProtocolError, match="must have the token of this coord"):
        call_rank(host.address, "the token of another", 60.0)
    assert isinstance(host.verdicts[0], AuthenticationError)


def test_a_host_that_only_says_that_it_knows_the_token_is_refused():
    def play(caller):
        connection = connections.Connection(caller.detach())
        connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"0" * 16)
        with contextlib.suppress(EOFError):
            connection.recv_bytes()

    with Host(play) as host, pytest.raises(ProtocolError, match="must have the token"):
        call_rank(host.address, TOKEN, 60.0)


def test_another_release_is_named():
    def old(caller):
        with proven(caller, TOKEN, 60.0, is_caller=False) as connection:
            connection.send_bytes(b'{"release": "0.0.1", "busy": false}')

    with Host(old) as host, pytest.raises(ProtocolError, match=r"release .*, got 0\.0\.1; run one"):
        call_rank(host.address, TOKEN, 60.0)


def test_a_busy_rank_is_called_until_it_is_free():
    def busy(caller):
        answer_coordinator(caller, TOKEN, is_busy=len(host.verdicts) < 2)

    with Host(busy) as host:
        call_rank(host.address, TOKEN, 60.0).close()
    assert host.verdicts == [None] * 3
    with (
        Host(lambda caller: answer_coordinator(caller, TOKEN, is_busy=True)) as host,
        pytest.raises(EngineBusy, match="another coordinator has"),
    ):
        call_rank(host.address, TOKEN, 0.5)


def test_nobody_there_and_somebody_else_there_are_told():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(EngineError, match=f"must listen at 127.0.0.1:{port} within 0.3 s"):
            call_rank(bound.getsockname(), TOKEN, 0.3)
    with (
        Host(lambda caller: caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as host,
        pytest.raises(EngineError, match=r"and whether the port is that of `planish rollout rank`"),
    ):
        call_rank(host.address, TOKEN, 0.3)


@pytest.mark.parametrize("words", [b"", b"\0"])
def test_a_caller_that_says_nothing_or_too_little_is_left_for_the_next_one(words, monkeypatch):
    monkeypatch.setattr(connections, "HELLO_S", 0.1)
    with Host() as host:
        with socket.create_connection(host.address) as stranger:
            stranger.sendall(words)
            wait_for(lambda: host.verdicts, 60.0)
        assert isinstance(host.verdicts[0], OSError)
        monkeypatch.setattr(connections, "HELLO_S", 60.0)
        call_rank(host.address, TOKEN, 60.0).close()


def test_a_token_must_be_there_and_long(monkeypatch):
    monkeypatch.delenv(connections.TOKEN_ENV, raising=False)
    with pytest.raises(ConfigError, match="PLANISH_RANKS_TOKEN must hold a token of at least 16"):
        ranks_token()
    monkeypatch.setenv(connections.TOKEN_ENV, "short")
    with pytest.raises(ConfigError, match="got 5 characters"):
        ranks_token()
    monkeypatch.setenv(connections.TOKEN_ENV, TOKEN)
    assert ranks_token() == TOKEN


@pytest.mark.parametrize("text", ["ranks-0", "ranks-0:", ":9610", "ranks-0:0", "ranks-0:65536"])
def test_an_address_has_a_host_and_a_port(text):
    with pytest.raises(ConfigError, match="must read `host:port`, got "):
        address_of(text)


def test_peers_name_every_rank_once_and_leave_other_digests_alone():
    def config(**settings):
        return EngineConfig(**{"name": "disagg", "attention_ranks": 2, **settings})

    assert config(peers=PEERS).model_dump()["peers"] == tuple(PEERS)
    assert {"peers", "rank_timeout_seconds"}.isdisjoint(config().model_dump())
    for peers in (PEERS[:2], [*PEERS, "e1:9610"], [*PEERS[:2], "a0:9610"]):
        with pytest.raises(ValidationError, match="must name each of the 3 ranks once, got "):
            config(peers=peers)
    with pytest.raises(ValidationError, match="`peers` must be left out with the engine 'vllm'"):
        EngineConfig(name="vllm", peers=PEERS)
