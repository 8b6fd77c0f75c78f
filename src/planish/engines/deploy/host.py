"""`planish rollout rank`: process of a pod that waits for a coordinator and runs a rank for it.

A rank serves one coordinator and ends with it, so no state passes to the next instance; the host
stays and waits. The host listens on three consecutive ports: for coordinators, for hidden states of
other ranks, and for the probes of Kubernetes. It refuses callers without the token, and serves one
coordinator at a time.

The page /readyz is 200 while the rank has the weights that its coordinator wants, else 503; the
page shows the pins of both. /healthz is 200 as long as the host works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from typing import Any

from planish.base import telemetry
from planish.base.child import start_child
from planish.base.errors import ConfigError
from planish.base.pages import PageServer, StatusPage
from planish.engines.deploy.connections import answer_coordinator, ranks_token

logger = logging.getLogger(__name__)

PORTS = 3
"""Number of consecutive ports: for coordinators, for hidden states, and for probes."""
_TURN_S = 1.0
_SICK_S = 30.0
"""Seconds without a pass of the loop after which the host counts as hung."""
_END_S = 5.0
"""Seconds in which a rank may end by itself after its coordinator is gone."""
_NO_WEIGHTS: dict[str, Any] = {"wanted": "", "held": "", "version": None}


class HostedRank:
    """A rank process for one coordinator, and the weights that it reports."""

    def __init__(self, caller: socket.socket, host: str, port: int, device: str) -> None:
        """Start the rank on the connection of a coordinator; it listens for hidden states at
        `port`.
        """
        self.connection = caller
        rows, control = {"host": host, "port": port}, caller.fileno()
        settings = json.dumps({"rows": rows, "control": control, "device": device})
        self.child = start_child(
            [sys.executable, "-m", "planish.engines.disagg.rank", settings],
            is_trusted=True,
            files=[control],
        )
        self.end_by = float("inf")
        """Time at which a rank without a coordinator is killed."""
        self.state = _NO_WEIGHTS

    def listen(self) -> None:
        """Read the rank's report of its weights."""
        with contextlib.suppress(ConnectionError):
            while self.child.channel.has_message():
                self.state = self.child.channel.receive()
                logger.info(
                    "weights wanted=%(wanted)r held=%(held)r version=%(version)s", self.state
                )

    def close(self) -> int | None:
        """Kill the rank if it still runs, and return its exit code."""
        code = self.child.close()
        self.connection.close()
        return code


class RankHost:
    """Runs ranks one after another, each for one coordinator."""

    def __init__(self, host: str, port: int, token: str, device: str) -> None:
        """Listen on three ports from `port` on, for coordinators that know the token."""
        self._host, self._port, self._token, self._device = host, port, token, device
        self._rank: HostedRank | None = None
        self._turn_s = time.monotonic()
        pages = {"/healthz": self.health, "/readyz": self.readiness}
        try:
            self._listener = socket.create_server((host, port))
            self._pages = PageServer(host, port + 2, pages)
        except OSError as error:
            raise ConfigError(
                f"`--host` must be an address of this machine and `--port` the first of {PORTS} "
                f"free ports, got {host}:{port}: {error}"
            ) from None

    def close(self) -> None:
        """End the rank and stop listening."""
        self._pages.close()
        self._listener.close()
        if self._rank is not None:
            self._rank.close()
            self._rank = None

    def turn(self) -> None:
        """Wait for at most a second, and handle events."""
        self._turn_s = time.monotonic()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        rank = self._rank
        if rank is not None:
            poll.register(rank.child.channel, select.POLLIN)
            if rank.end_by == float("inf"):
                # Only the rank reads the coordinator's messages; the host only detects that it has
                # left.
                poll.register(rank.connection, select.POLLRDHUP)
        ready = {number for number, _ in poll.poll(1000 * _TURN_S)}
        if rank is not None:
            if rank.child.channel.fileno() in ready:
                rank.listen()
            if rank.connection.fileno() in ready:
                rank.end_by = time.monotonic() + _END_S
            if rank.child.code() is not None or time.monotonic() > rank.end_by:
                # The page says that the host is idle only once the rank is gone.
                code = rank.close()
                self._rank = None
                logger.info("ended exit_code=%s", code)
        if self._listener.fileno() in ready:
            self.take_call()

    def take_call(self) -> None:
        """Start a rank for a caller that knows the token, unless a rank runs."""
        caller, (address, *_) = self._listener.accept()
        is_busy = self._rank is not None
        reason = "another coordinator has the rank"
        try:
            answer_coordinator(caller, self._token, is_busy=is_busy)
        except (AuthenticationError, OSError) as error:
            is_busy, reason = True, str(error)
        if is_busy:
            logger.warning("refused caller=%s reason=%r", address, reason)
            caller.close()
            return
        self._rank = HostedRank(caller, self._host, self._port + 1, self._device)
        logger.info("started coordinator=%s pid=%d", address, self._rank.child.pid)

    def health(self, _: Mapping[str, str]) -> StatusPage:
        """Return the page that says whether the loop runs."""
        silent = time.monotonic() - self._turn_s
        return StatusPage(200, b"ok\n") if silent < _SICK_S else StatusPage(503, b"hung\n")

    def readiness(self, _: Mapping[str, str]) -> StatusPage:
        """Return the page that says whether the rank has the wanted weights."""
        state = _NO_WEIGHTS if self._rank is None else self._rank.state
        is_ready = bool(state["held"]) and state["held"] == state["wanted"]
        body = json.dumps({"ready": is_ready, **state}).encode() + b"\n"
        return StatusPage(200 if is_ready else 503, body, "application/json")


def host(options: argparse.Namespace, _: object) -> Iterator[str]:
    """Run ranks until SIGTERM or SIGINT.

    Raises:
        ConfigError: the token is missing, or ports are in use.
    """
    telemetry.configure_logging(logging.INFO)
    rank_host = RankHost(options.host, options.port, ranks_token(), options.device)
    with contextlib.closing(rank_host):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        last = options.port + PORTS - 1
        yield f"waits for a coordinator at {options.host}:{options.port}, probes at port {last}"
        with contextlib.suppress(SystemExit):
            while True:
                rank_host.turn()
