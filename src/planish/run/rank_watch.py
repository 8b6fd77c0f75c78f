"""Find slow ranks of a task, and the ranks for which all others wait.

Every few seconds a thread of each rank writes the rank's work to the launcher's store; a collective
would wait for the slow rank. The first rank compares them and reports in its metrics, in the log
and under the root of the run. A rank without progress for 90 % of the time-out of collectives
writes torch's flight record into the run's logs, and names the ranks that are behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from planish.base import telemetry
from planish.base.parallel import launcher_store
from planish.records import layout
from planish.run import layer_clock, stage_metrics
from planish.run.events import write_aside
from planish.run.slow_ranks import Slow, SlowRanks, Work

logger = logging.getLogger(__name__)

TICK_SECONDS = 5.0
"""Seconds between two reports of a rank."""
PATIENCE = 0.9
"""Fraction of the time-out of collectives after which a rank without progress reports it."""
METRICS = {
    "training": "planish_train_rank_compute_seconds_total",
    "sampling": "planish_rollout_step_seconds",
}
"""Kind of work to the metric with its seconds."""

Words = Mapping[str, Any]
"""Report of a rank: counter `beat`, `stage`, `node`, last `step`, and its work of each kind."""


class WatchedTask(NamedTuple):
    """The task whose ranks are watched."""

    root: str
    """URI of the run."""
    iteration: int
    """First iteration of the task."""
    behind_file: str
    """URI of the message that names the ranks for which all others wait."""
    timeout_seconds: float
    """Time-out of collectives."""
    num_trainers: Callable[[int], int]
    """Function from the number of ranks to the number that train; the others sample."""
    num_stages: int
    """Number of pipeline stages; only ranks of one stage do the same work."""


@contextlib.contextmanager
def watched_ranks(task: WatchedTask) -> Iterator[None]:
    """Watch from a thread during the block; a failure of the thread does not fail the task.

    Without a launcher it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    # Groups of only some ranks change RANK in the environment later.
    stage_metrics.own_rank = os.environ["RANK"]
    board, ended = _Board(task), threading.Event()
    thread = threading.Thread(target=_watch, args=(task, board, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # The thread may wait for a store that does not exist any more.
        thread.join(TICK_SECONDS)


def _watch(task: WatchedTask, board: _Board, ended: threading.Event) -> None:
    tick = min(TICK_SECONDS, task.timeout_seconds / 40)
    try:
        comparison = _Comparison(task) if board.ranks.is_first else None
        passes, since, has_told = 0, time.monotonic(), False
        while not ended.wait(tick):
            board.tell()
            if comparison is not None and len(words := board.read()) == board.ranks.size:
                comparison.look(words)
            if passes != layer_clock.own.passes or stage_metrics.phase != "training":
                passes, since, has_told = layer_clock.own.passes, time.monotonic(), False
            elif not has_told and time.monotonic() - since > PATIENCE * task.timeout_seconds:
                has_told = True
                record = layout.flight_record(task.root, task.iteration, board.ranks.rank)
                write_aside(record, flight_record())
                before = board.read()
                ended.wait(3 * tick)
                board.tell()
                message = f"{behind(before, board.read())}; last collectives: `{record}`"
                logger.error("no progress seconds=%.0f: %s", time.monotonic() - since, message)
                write_aside(task.behind_file, {"message": message})
    except Exception as error:
        # Without the launcher all ranks end, and other messages give the reason.
        logger.info("ranks are not watched any more error=%s", error)


class _Board:
    """Reports of a task's ranks in the launcher's store."""

    def __init__(self, task: WatchedTask) -> None:
        self._store, self.ranks = launcher_store(task.timeout_seconds)
        self._keys = [f"rank-watch/{rank}" for rank in range(self.ranks.size)]
        trainers = task.num_trainers(self.ranks.size)
        stage = self.ranks.rank % trainers * task.num_stages // trainers
        node = os.environ.get("NODE_NAME") or platform.node()
        self._words: dict[str, Any] = {"beat": 0, "stage": stage, "node": node}

    def tell(self) -> None:
        """Write the report of this rank."""
        seconds, steps = telemetry.totals("planish_rollout_step_seconds")
        self._words["beat"] += 1
        self._words["step"] = layer_clock.last_step
        self._words["training"] = layer_clock.own
        self._words["sampling"] = (
            seconds, steps, telemetry.totals("planish_rollout_tokens_total")[0],
        )  # fmt: skip
        self._store.set(self._keys[self.ranks.rank], json.dumps(self._words))

    def read(self) -> dict[int, Words]:
        """Return the last report of each rank that has written one."""
        keys = self._keys
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        told = zip(keys, self._store.multi_get(keys), strict=True)
        return {int(key.rpartition("/")[2]): json.loads(words) for key, words in told}


class _Comparison:
    """Comparison of all ranks by the first rank."""

    def __init__(self, task: WatchedTask) -> None:
        self._task = task
        self._judges = {kind: SlowRanks() for kind in METRICS}
        self._alerts: dict[tuple[str, int], tuple[str, dict[str, str | float]]] = {}

    def look(self, words: Mapping[int, Words]) -> None:
        """Publish the work of the other ranks, and report slow ranks."""
        for rank, each in words.items():
            if rank:
                layer_clock.show_work(str(rank), Work(*each["training"]))
                telemetry.set_level("planish_train_rank_last_step", each["step"], rank=str(rank))
        telemetry.forget("planish_rank_slowness_ratio")
        stages = {rank: each["stage"] for rank, each in words.items()}
        for kind, judge in self._judges.items():
            judge.look({rank: Work(*each[kind]) for rank, each in words.items()}, stages)
            for slow in judge.slow:
                facts = {"node": words[slow.rank]["node"], "metric": METRICS[kind]}
                facts["rank"] = str(slow.rank)
                telemetry.set_level("planish_rank_slowness_ratio", slow.times, **facts)
                if (kind, slow.rank) not in self._alerts:
                    self._alerts[kind, slow.rank] = self._begin(slow, **facts)
            ranks = {slow.rank for slow in judge.slow}
            for key in [key for key in self._alerts if key[0] == kind and key[1] not in ranks]:
                uri, alert = self._alerts.pop(key)
                write_aside(uri, alert | {"state": "resolved", "last_second": time.time()})

    def _begin(
        self, slow: Slow, rank: str, node: str, metric: str
    ) -> tuple[str, dict[str, str | float]]:
        """Report a slow rank; return the URI of the alert and the alert."""
        root, now = self._task.root, time.time()
        logger.warning(
            "slow rank=%s node=%s metric=%s run=%s times_of_others=%.2f times_of_own_past=%.2f",
            rank, node, metric, root, *slow[1:],
        )  # fmt: skip
        uri = f"{layout.alerts(root)}/{int(now)}-{metric}-{rank}.json"
        alert: dict[str, str | float] = {
            "machine": node,
            "kind": "slow_rank",
            "metric": f"{metric} of rank {rank}",
            "score": slow.times,
            "first_second": now,
            "last_second": now,
            "iteration": self._task.iteration,
            "action": "",
        }
        write_aside(uri, alert)
        return uri, alert


def behind(before: Mapping[int, Words], now: Mapping[int, Words]) -> str:
    """Return a text that names the ranks for which all wait, from two readings of the reports.

    They are the ranks whose report has not changed, because the whole process hangs. If there are
    none, they are the ranks with the least finished work.
    """
    late = {rank for rank, each in now.items() if each == before.get(rank)}
    what = "tells nothing any more"
    if not late:
        got = {rank: (each["step"], each["training"][1]) for rank, each in now.items()}
        late = {rank for rank in got if got[rank] == min(got.values())}
        what = "has computed least"
    if len(late) == len(now):
        return "no rank is behind the others"
    names = ", ".join(f"rank {rank} on {now[rank]['node']}" for rank in sorted(late)[:8])
    ends = ", ".join(f"{rank}: {each['step']}" for rank, each in sorted(now.items())[:64])
    return f"the others wait for {names}, which {what}; last step of each rank: {ends}"


def flight_record() -> dict[str, Any]:
    """Return torch's record of the last collectives of this process."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    found: dict[str, Any] = json.loads(c10d._dump_fr_trace_json(True, False))
    return found
