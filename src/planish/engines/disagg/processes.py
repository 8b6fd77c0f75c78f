"""The processes of an engine's ranks, for the coordinator: start, requests, watch, end.

Every wait ends: with an answer, with the end of a process, after `DEAD_S` seconds without a sign of
life (a stopped process), or with the time limit of the request.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from planish.base.child import Child, Message, start_child
from planish.engines.config import DEAD_S
from planish.engines.disagg.settings import RankSettings

PING_S = 1.0
"""Seconds between pings to a silent rank."""
SEND_S = 30.0
"""Seconds after which a rank that reads nothing counts as lost."""
_END_S = 5.0
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that limit a rank's threads, since ranks share the cores of a machine."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"

Launcher = Callable[[int], Child]
"""Function that starts a rank by its number."""


def launch(
    number: int,
    device: str = "cpu",
    command: tuple[str, ...] = ("-m", "planish.engines.disagg.rank"),
) -> Child:
    """Start a rank as a process of this machine.

    On accelerators the rank sees only the device with its number, as its first device. vLLM takes
    the first visible device, and page-locked memory would open a context there.
    """
    environment = dict(_THREADS)
    if device != "cpu":
        # Indices or names of devices, those of a Kubernetes device plugin among them.
        visible = os.environ.get(_VISIBLE)
        environment[_VISIBLE] = visible.split(",")[number] if visible else str(number)
    return start_child([sys.executable, *command], is_trusted=True, environment=environment)


@dataclass
class _Rank:
    child: Child
    asked_s: float = 0.0
    has_spoken: bool = False
    """False while the rank still imports its packages and cannot answer."""
    answers: dict[int, Message] = field(default_factory=dict)


@dataclass
class Answers:
    """Answers of ranks, with faults and losses."""

    given: dict[int, Message] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    """Map from rank to the reason why it could not carry out the request."""
    lost: dict[int, str] = field(default_factory=dict)
    """Map from rank to the reason why it died; each loss is reported once."""


class Processes:
    """The living ranks of one engine."""

    def __init__(self, timeout_s: float, launcher: Launcher) -> None:
        """Start no rank yet; `timeout_s` is the longest wait for an answer."""
        self.timeout_s, self._launch = timeout_s, launcher
        self._ranks: dict[int, _Rank] = {}
        self._number = 0
        self._lost: dict[int, str] = {}
        self._reported: list[Message] = []

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each living rank."""
        return {number: rank.child.pid for number, rank in self._ranks.items()}

    def start(self, settings: RankSettings) -> int:
        """Start a rank; return the number of the request that it answers once it is ready."""
        self._ranks[settings.rank] = _Rank(self._launch(settings.rank))
        return self.tell([settings.rank], {"op": "start", "settings": settings.plain()})

    def tell(self, ranks: Iterable[int], message: Mapping[str, Any]) -> int:
        """Send a message to living ranks; return the request number, which their answers repeat."""
        self._number += 1
        for number in [number for number in ranks if number in self._ranks]:
            try:
                self._ranks[number].child.channel.send({**message, "id": self._number}, SEND_S)
            except OSError as error:
                self.kill(number, f"took no message: {error}")
        return self._number

    def gather(self, numbers: Mapping[int, int]) -> Answers:
        """Wait until each rank has answered its request or is dead.

        It returns early if a rank reports a fault or is lost, so that the caller can inform the
        others; a rank without an answer is then in none of the tables. It pings a silent rank, and
        ends the rank if it does not answer.
        """
        answers = Answers()
        deadline = time.monotonic() + self.timeout_s
        for rank in self._ranks.values():
            # Nobody listened before, so silence until now says nothing.
            rank.child.channel.heard_s = rank.asked_s = time.monotonic()
        while True:
            looked_s = time.monotonic()
            self._sort_out(numbers, answers)
            waiting = set(numbers) & set(self._ranks) - set(answers.given)
            if answers.lost or answers.faults or not waiting:
                return answers
            places: dict[Any, int] = {
                rank.child.channel: number for number, rank in self._ranks.items()
            }
            for connection in wait(places, PING_S / 4):
                self._read(places[connection])
            deadline += self.watch(looked_s)
            if time.monotonic() > deadline:
                for number in waiting & set(self._ranks):
                    self.kill(number, f"did not answer within {self.timeout_s:g} s")

    def watch(self, looked_s: float) -> float:
        """Kill ranks that have exited or stay silent, and ping quiet ranks; return the seconds for
        which this process was stopped.

        It returns the seconds since the last check, at `looked_s`, for which this process itself
        was stopped: missing answers in that time say nothing about the ranks.
        """
        now = time.monotonic()
        was_stopped = now - looked_s > DEAD_S / 2
        for number, rank in list(self._ranks.items()):
            if was_stopped:
                rank.child.channel.heard_s = rank.asked_s = now
            heard_s, code = rank.child.channel.heard_s, rank.child.code()
            if code is not None:
                if not self._read(number):
                    self.kill(number, f"ended with exit code {code}")
            elif rank.has_spoken and now - heard_s > DEAD_S:
                self.kill(number, f"gave no sign of life for {DEAD_S:g} s")
            elif rank.has_spoken and now - max(heard_s, rank.asked_s) > PING_S:
                rank.asked_s = now
                self.tell([number], {"op": "ping"})
        return now - looked_s if was_stopped else 0.0

    def _sort_out(self, numbers: Mapping[int, int], answers: Answers) -> None:
        """Move received answers to their table, and kill ranks that other ranks have lost."""
        messages, self._reported = self._reported, []
        for number, question in numbers.items():
            rank = self._ranks.get(number)
            message = rank.answers.pop(question, None) if rank is not None else None
            if message is not None and "fault" not in message:
                answers.given[number] = message
            elif message is not None:
                messages.append({**message, "rank": number})
        for message in messages:
            for lost, reason in message["lost"].items():
                self.kill(int(lost), reason)
            if not message["lost"] or message["re"] is not None:
                answers.faults[message["rank"]] = message["fault"]
        answers.lost.update(self._lost)
        self._lost = {}

    def _read(self, number: int) -> bool:
        """Take what a rank has sent; return whether there was a message."""
        rank = self._ranks[number]
        has_spoken = False
        try:
            while rank.child.channel.has_message():
                message = rank.child.channel.receive()
                rank.has_spoken = has_spoken = True
                if message["re"] is not None:
                    rank.answers[message["re"]] = message
                else:
                    self._reported.append({**message, "rank": number})
        except OSError as error:
            code = rank.child.code()
            self.kill(number, str(error) if code is None else f"ended with exit code {code}")
        return has_spoken

    def kill(self, number: int, reason: str) -> None:
        """Kill a rank; the next `gather` reports it as lost."""
        rank = self._ranks.pop(number, None)
        if rank is None:
            return
        # The rank's own fault, e.g. why it could not start, explains more than its exit.
        told = [answer["fault"] for answer in rank.answers.values() if "fault" in answer]
        self._lost[number] = "; ".join([*told, reason])
        rank.child.close()

    def close(self) -> None:
        """End all ranks, first by a message; return when no process is left."""
        self.tell(self._ranks, {"op": "close"})
        ranks, self._ranks = list(self._ranks.values()), {}
        deadline = time.monotonic() + _END_S
        for rank in ranks:
            rank.child.close(max(0.0, deadline - time.monotonic()))
