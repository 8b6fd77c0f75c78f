"""The ranks of one task watch themselves: who is slow, and who is behind when all wait.

Each rank tells its work to the launcher's store every few seconds, from a thread: no collective,
which would wait for the slow one. The first rank compares and shows all of it, in its metrics, in
the log and under the root of the run. A rank that has got no further for nearly the time after
which a collective fails writes torch's flight recorder into the run's logs, and says who is behind.
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
"""Between two words of a rank."""
PATIENCE = 0.9
"""Share of the time-out of collectives after which a rank that gets no further says so."""
METRICS = {
    "training": "planish_train_rank_compute_seconds_total",
    "sampling": "planish_rollout_step_seconds",
}
"""Kind of work to the metric of its seconds."""

Words = Mapping[str, Any]
"""What a rank tells: `beat` counts, `stage`, `node`, `step`, and its work of each kind."""


class WatchedTask(NamedTuple):
    """The task whose ranks are watched."""

    root: str
    """URI of the run."""
    iteration: int
    """First one of the task."""
    behind_file: str
    """URI of what is said when all ranks wait for one."""
    timeout_seconds: float
    """Of collectives."""
    num_trainers: Callable[[int], int]
    """Returns how many of so many ranks train; the others sample."""
    num_stages: int
    """Of the pipeline; only ranks of one stage do the same work."""


@contextlib.contextmanager
def watched_ranks(task: WatchedTask) -> Iterator[None]:
    """Watch from a thread while the block lasts; nothing that fails there fails the task.

    A process without a launcher has nobody to watch.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    # Groups of some ranks alone change what the environment says.
    stage_metrics.own_rank = os.environ["RANK"]
    board, ended = _Board(task), threading.Event()
    thread = threading.Thread(target=_watch, args=(task, board, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # It may be in a request to a store that is gone.
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
        # Without the launcher all ranks end; why, others say better.
        logger.info("ranks are not watched any more error=%s", error)


class _Board:
    """Where the ranks of a task leave their words."""

    def __init__(self, task: WatchedTask) -> None:
        self._store, self.ranks = launcher_store(task.timeout_seconds)
        self._keys = [f"rank-watch/{rank}" for rank in range(self.ranks.size)]
        trainers = task.num_trainers(self.ranks.size)
        stage = self.ranks.rank % trainers * task.num_stages // trainers
        node = os.environ.get("NODE_NAME") or platform.node()
        self._words: dict[str, Any] = {"beat": 0, "stage": stage, "node": node}

    def tell(self) -> None:
        """Leave what this rank has done so far."""
        seconds, steps = telemetry.totals("planish_rollout_step_seconds")
        self._words["beat"] += 1
        self._words["step"] = layer_clock.last_step
        self._words["training"] = layer_clock.own
        self._words["sampling"] = (
            seconds, steps, telemetry.totals("planish_rollout_tokens_total")[0],
        )  # fmt: skip
        self._store.set(self._keys[self.ranks.rank], json.dumps(self._words))

    def read(self) -> dict[int, Words]:
        """Return the last words of each rank that has told any."""
        keys = self._keys
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        told = zip(keys, self._store.multi_get(keys), strict=True)
        return {int(key.rpartition("/")[2]): json.loads(words) for key, words in told}


class _Comparison:
    """What the first rank makes of the words of all."""

    def __init__(self, task: WatchedTask) -> None:
        self._task = task
        self._judges = {kind: SlowRanks() for kind in METRICS}
        self._alerts: dict[tuple[str, int], tuple[str, dict[str, str | float]]] = {}

    def look(self, words: Mapping[int, Words]) -> None:
        """Show the work of the other ranks, and which rank is slow."""
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
        """Say that a rank is slow; returns the alert and where it stands."""
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
    """Return for whom all wait, from two readings of what the ranks have told.

    A rank that tells nothing any more has stopped as a whole; else it is the one that has computed
    least.
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
