"""The lock of a root: it names the run that uses the root, and is free once its holder ends.

Each holder creates one small object with the next number. The store creates an object only once, so
only one of two simultaneous runs succeeds. A lock is free if its holder has ended, or has recorded
that the following run is submitted. The lock prevents two runs on one root; it does not order the
tasks of one run.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from planish import store
from planish.base.errors import ObjectExists, RecordError, RootInUse
from planish.records import layout
from planish.store.processes import process_line, process_space, process_start

logger = logging.getLogger(__name__)

STALE_SECONDS = 600.0
"""Seconds without heartbeat after which a lock is free, if its holder cannot be checked."""


@dataclass(frozen=True)
class Holder:
    """Holder of a lock: a run of the cluster, or a process of one machine."""

    kind: Literal["local", "cluster"]
    """`cluster` if the task knows its run id."""
    run_id: str = ""
    host: str = ""
    space: str = ""
    """Id of the machine's boot and of the process-id namespace in which `pid` is valid."""
    pid: int = 0
    started: int = 0
    """Start of that process in clock ticks since boot: a later process with its id has another
    start."""

    def describe(self) -> str:
        """Return a description for an error message."""
        if self.kind == "cluster":
            return f"run {self.run_id} of the cluster"
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Lock:
    """One generation of the lock of a root."""

    generation: int
    """1, 2, ...; 0 if the lock never had a holder."""
    holder: Holder | None
    """None if the lock never had a holder."""
    heartbeat_seconds: float


def _is_stage_process(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return False
    if any("kfp.dsl.executor_main" in word for word in words):
        return True
    return any(
        first == "-m" and second.startswith(("planish.", "pipelines.warm"))
        for first, second in itertools.pairwise(words)
    )


def current_holder() -> Holder:
    """Return the holder for which this process works.

    In a cluster it is the run. On one machine it is the process that runs the pipeline: the nearest
    ancestor that is neither a stage nor the shell by which the local runner starts a stage.
    """
    run_id = os.environ.get("RUN_ID", "")
    if run_id:
        return Holder("cluster", run_id=run_id)
    pid = os.getpid()
    while _is_stage_process(pid):
        parent = int((process_line(pid) or ["", "0"])[1])
        if parent <= 1:
            break
        pid = parent
    return Holder(
        "local",
        host=platform.node(),
        space=process_space(),
        pid=pid,
        started=process_start(pid),
    )


def is_alive(holder: Holder) -> bool | None:
    """Return whether a local holder lives; None if this process cannot know."""
    if holder.kind != "local" or not holder.space or holder.space != process_space():
        return None
    return holder.started != 0 and process_start(holder.pid) == holder.started


def read_lock(root: str) -> Lock:
    """Return the newest generation of the lock; RecordError: another program wrote the object."""
    generations = store.list_uris(layout.locks(root))
    names = [uri.rpartition("/")[2].removesuffix(".json") for uri in generations]
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    if newest == 0:
        return Lock(0, None, 0.0)
    return _read_generation(root, newest)


def _read_generation(root: str, generation: int) -> Lock:
    uri = layout.lock_file(root, generation)
    data = store.read(uri)
    if not data:  # its writer died before it wrote its name, so it did no work
        return Lock(generation, None, 0.0)
    try:
        raw = json.loads(data)
        return Lock(generation, Holder(**raw["holder"]), float(raw["heartbeat_seconds"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"`{uri}` must name a holder and a heartbeat, got {data[:200]!r} ({error}); remove it "
            "when nothing runs on this root"
        ) from None


def _document(holder: Holder, now: float) -> bytes:
    document = {"holder": asdict(holder), "heartbeat_seconds": now}
    return json.dumps(document, sort_keys=True).encode()


def check_free(
    root: str,
    me: Holder,
    *,
    alive: Callable[[Holder], bool | None] = is_alive,
    now: float | None = None,
) -> Lock:
    """Return the newest generation of a lock that `me` may take or keep, else raise RootInUse."""
    lock = read_lock(root)
    if lock.holder is None or lock.holder == me or is_handed_over(root, lock):
        return lock
    # A heartbeat in the future counts like an old one, and NaN counts as no heartbeat.
    silent_seconds = abs((time.time() if now is None else now) - lock.heartbeat_seconds)
    lives = alive(lock.holder)
    if lives is False or (lives is None and not silent_seconds < STALE_SECONDS):
        return lock
    wait = "wait for its end"
    if lives is None:
        left = STALE_SECONDS - silent_seconds
        wait = f"nothing here tells whether it still lives: wait {left:.0f} s without a heartbeat"
    raise RootInUse(
        f"`{root}` must be used by one run at a time, but {_words(lock.holder)} holds its lock "
        f"(last heartbeat {silent_seconds:.0f} s ago); {wait}, or choose another root"
    )


def refuse_stranger(root: str, me: Holder) -> None:
    """Refuse a run that never had the lock of a root which another run uses (RootInUse).

    A run of a cluster is refused even if the other runs have ended: the records belong to them.
    """
    lock = read_lock(root)
    generations = range(lock.generation, 0, -1)
    if lock.holder is None or any(_read_generation(root, n).holder == me for n in generations):
        return
    if me.kind == "cluster":
        raise RootInUse(f"`{root}` must be that of this run, but is that of {_words(lock.holder)}")
    check_free(root, me)


def acquire(
    root: str,
    me: Holder,
    *,
    alive: Callable[[Holder], bool | None] = is_alive,
    now: float | None = None,
) -> Lock:
    """Take the lock of a root, or keep it, and return the current generation.

    Raises:
        RootInUse: another run has it, or took it at this moment.
    """
    now = time.time() if now is None else now
    lock = check_free(root, me, alive=alive, now=now)
    if lock.holder == me:
        store.write(layout.lock_file(root, lock.generation), _document(me, now))
        return Lock(lock.generation, me, now)
    if lock.holder is not None:
        logger.info(
            "took over lock root=%s holder=%s generation=%d",
            root,
            lock.holder.describe().replace(" ", "_"),
            lock.generation + 1,
        )
    try:
        store.create(layout.lock_file(root, lock.generation + 1), _document(me, now))
    except ObjectExists:
        winner = read_lock(root).holder
        raise RootInUse(
            f"`{root}` must be used by one run at a time, but {_words(winner)} has just taken it; "
            "wait for its end or choose another root"
        ) from None
    return Lock(lock.generation + 1, me, now)


def _words(holder: Holder | None) -> str:
    return holder.describe() if holder else "another run"


def hand_over(root: str, me: Holder) -> bool:
    """Let the next run take the lock before this run has ended; return whether it had the lock.

    Only the last tasks of a run may call it: afterwards no task of the run may write training data.
    """
    lock = read_lock(root)
    if lock.holder != me:
        return False
    uri = layout.handover_file(root, lock.generation)
    store.write(uri, json.dumps({"run_id": me.run_id}).encode())
    return True


def is_handed_over(root: str, lock: Lock) -> bool:
    """Return whether the holder of this generation has handed the lock over."""
    return store.exists(layout.handover_file(root, lock.generation))


def beat(root: str, me: Holder) -> bool:
    """Renew the heartbeat of the lock of `me`; return whether `me` still has it."""
    lock = read_lock(root)
    if lock.holder != me:
        return False
    document = _document(me, time.time())
    store.write(layout.lock_file(root, lock.generation), document)
    return True
