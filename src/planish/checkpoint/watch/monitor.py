"""Timings of each stage of a save or load on each rank: records, metrics, stragglers, files.

A save writes its records beside its data, as JSON lines, after the commit; a load does so with
`LoadOptions.store_timings`. The checkpoint is complete without the records. An error in writing
them never fails a save or load.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import numpy as np

from planish.base import telemetry
from planish.base.errors import CheckpointNotFound, ObjectMissing, RecordError
from planish.checkpoint.commit.journal import attempt_folder, join
from planish.store import Store, open_store

logger = logging.getLogger(__name__)

Operation = Literal["save", "load"]
SAVE_STAGES = ("plan", "stage", "serialise", "upload", "meta", "commit", "barrier")
LOAD_STAGES = ("meta", "plan", "read", "verify", "copy", "exchange", "barrier")
VERSION = 1
RETRY = "retry "
"""Prefix of `Timing.object` in a record that only counts repeated requests."""
TIMINGS = "timings.jsonl"
"""File of a save's records, in the folder of its attempt."""
LOAD_TIMINGS = "load-timings.jsonl"
"""File of the records of the last load with `store_timings`, in the same folder."""
MAX_TIMINGS_BYTES = 256 << 20
STRAGGLER_RATIO = 2.0
"""A rank whose own work takes more than this many times the median is a straggler ..."""
STRAGGLER_SECONDS = 1.0
"""... if it also takes more than this many seconds."""
_TRANSFER = {"save": "upload", "load": "read"}
_WAITS = {"save": ("barrier", "meta", "commit"), "load": ("barrier",)}
"""Stages that are not the rank's own work: it waits for others, or it is the coordinator and works
after all others. If they counted, every rank would seem as slow as the slowest."""


@dataclass(frozen=True)
class Timing:
    """One stage of one state on one rank."""

    rank: int
    op: Operation
    state: str
    """Role and kind (`main.model`), empty for a stage of all states together."""
    stage: str
    """One of SAVE_STAGES or LOAD_STAGES."""
    start: float
    end: float
    num_bytes: int = 0
    object: str = ""
    """Key of the object inside the checkpoint, or `retry <reason>`; empty for several."""
    retries: int = 0
    host: str = ""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass
class Timeline:
    """All records of one save or load, of one rank or of all."""

    records: list[Timing] = field(default_factory=list)
    """Records rank by rank, in the order in which the stages ended."""

    def encode(self) -> bytes:
        """Return JSON lines: a header, then one array per record."""
        header = {"version": VERSION, "columns": [f.name for f in fields(Timing)]}
        rows = [list(vars(record).values()) for record in self.records]
        return "\n".join(json.dumps(line) for line in (header, *rows)).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Timeline:
        """Undo `encode`; raises `ValueError` if the bytes are not a timeline."""
        try:
            header, *rows = map(json.loads, data.decode().splitlines())
            known = {f.name for f in fields(Timing)}
            places = [(i, name) for i, name in enumerate(header["columns"]) if name in known]
            records = [Timing(**{name: row[i] for i, name in places}) for row in rows]
            if any(not isinstance(record.seconds, float) for record in records):
                raise TypeError("times must be numbers")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"a timeline must be JSON lines of records, got {error}") from error
        return cls(records)

    def end_to_end(self) -> dict[int, float]:
        """Return rank -> seconds from its first start to its last end."""
        spans: dict[int, tuple[float, float]] = {}
        for record in self.records:
            first, last = spans.get(record.rank, (record.start, record.end))
            spans[record.rank] = min(first, record.start), max(last, record.end)
        return {rank: last - first for rank, (first, last) in sorted(spans.items())}

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first start to the last end of all ranks; 0 without records."""
        if not self.records:
            return 0.0
        return max(r.end for r in self.records) - min(r.start for r in self.records)


class Recorder:
    """Collects the records of one rank; any thread may add."""

    def __init__(self, rank: int, op: Operation, host: str = "") -> None:
        self.rank, self.op, self.host = rank, op, host
        self._records: list[Timing] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def stage(self, stage: str, state: str = "", num_bytes: int = 0) -> Iterator[None]:
        """Record the body as one stage, also when it raises."""
        start = time.time()
        began = time.perf_counter()
        try:
            yield
        finally:
            end = start + time.perf_counter() - began
            self.add(Timing(self.rank, self.op, state, stage, start, end, num_bytes))

    def add(self, record: Timing) -> None:
        """Add one record, with this rank, operation and host."""
        with self._lock:
            self._records.append(replace(record, rank=self.rank, op=self.op, host=self.host))

    def retried(self, stage: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Record store requests that were repeated since `before`: one record per reason."""
        now = time.time()
        for reason, count in sorted(after.items()):
            again = count - before.get(reason, 0)
            if again > 0:
                note = f"{RETRY}{reason}"
                self.add(Timing(0, self.op, "", stage, now, now, object=note, retries=again))

    def extend(self, records: Iterable[Timing]) -> None:
        """Add records that another process measured for this rank."""
        for record in records:
            self.add(record)

    def timeline(self) -> Timeline:
        """Return the records so far."""
        with self._lock:
            return Timeline(list(self._records))


@dataclass(frozen=True)
class CheckpointInfo:
    """The checkpoint that a save has committed or a load has read."""

    uri: str
    step: int
    attempt: str
    sha256: str
    """Digest of the global metadata, in hexadecimal: the identity of the state."""
    num_bytes: int
    """Bytes of all objects of the checkpoint (save), or read from the store by this rank (load)."""
    layout: str = ""
    """Layout that the saver named, for information."""
    roles: tuple[str, ...] = ()
    timings: Timeline = field(default_factory=Timeline, compare=False)
    """This rank's records; on rank 0 of a save those of every rank."""
    facts: dict[str, object] = field(default_factory=dict, compare=False)
    """Further facts by name (`rng`: `exact` or `reseeded`, ...)."""

    @property
    def pin(self) -> str:
        """Pin: `<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.sha256}"


class Straggler(NamedTuple):
    """A rank that delays all others."""

    rank: int
    host: str
    """Name of its machine, empty where unknown."""
    stage: str
    """Stage in which it lost the most time against the median of all ranks."""
    seconds: float
    """Duration of its own work, from the first start to the last end."""
    median_seconds: float
    """Median of these durations over all ranks."""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{where} took {self.seconds:.1f} s "
            f"(median {self.median_seconds:.1f} s), most of it beyond the others in {self.stage}"
        )


def rank_seconds(timeline: Timeline) -> dict[int, float]:
    """Return rank -> seconds from the first start to the last end of its own work."""
    spans = Timeline(_own_work(timeline)).end_to_end()
    return {rank: spans.get(rank, 0.0) for rank in timeline.end_to_end()}


def _own_work(timeline: Timeline) -> list[Timing]:
    return [r for r in timeline.records if r.stage not in _WAITS[r.op]]


def stragglers(timeline: Timeline) -> list[Straggler]:
    """Return the ranks whose own work takes over twice the median and over 1 s, slowest first."""
    spans = rank_seconds(timeline)
    if len(spans) < 2:
        return []
    median = float(np.median(list(spans.values())))
    limit = max(STRAGGLER_RATIO * median, STRAGGLER_SECONDS)
    slow = sorted((-seconds, rank) for rank, seconds in spans.items() if seconds > limit)
    # A stage lasts from its first start to its last end: objects move in parallel, and a sum of
    # their durations would count the same second many times.
    stages: dict[str, list[Timing]] = {}
    for record in _own_work(timeline):
        stages.setdefault(record.stage, []).append(record)
    by_stage = {stage: Timeline(stages[stage]).end_to_end() for stage in sorted(stages)}
    medians = {
        stage: float(np.median([seconds.get(rank, 0.0) for rank in spans]))
        for stage, seconds in by_stage.items()
    }
    hosts = host_of(timeline.records)
    named = []
    for seconds, rank in slow:
        lost = {stage: by_stage[stage].get(rank, 0.0) - medians[stage] for stage in by_stage}
        worst = max(lost, key=lost.__getitem__)
        named.append(Straggler(rank, hosts.get(rank, ""), worst, -seconds, median))
    return named


def host_of(records: Sequence[Timing]) -> dict[int, str]:
    """Return rank -> machine, for ranks whose records name one."""
    return {record.rank: record.host for record in records if record.host}


def warn_of_stragglers(timeline: Timeline) -> None:
    """Log and count every straggler of a save or load; `timeline` has the records of all ranks."""
    for one in stragglers(timeline):
        op = timeline.records[0].op
        telemetry.count("planish_checkpoint_stragglers_total", op=op, stage=one.stage)
        logger.warning(telemetry.event("checkpoint_straggler", op=op, **one._asdict()))


def publish(timeline: Timeline, rank: int) -> None:
    """Add the records of one rank to the metrics of its process."""
    for record in timeline.records:
        if record.rank != rank:
            continue
        op, state = record.op, record.state or "all"
        if record.object.startswith(RETRY):
            code = record.object.removeprefix(RETRY)
            telemetry.count("planish_checkpoint_retries_total", record.retries, code=code)
            continue
        telemetry.observe(
            "planish_checkpoint_stage_seconds",
            max(record.seconds, 0.0),
            op=op,
            stage=record.stage,
            state=state,
        )
        if record.stage == _TRANSFER[op] and record.num_bytes:
            telemetry.count("planish_checkpoint_bytes_total", record.num_bytes, op=op, state=state)


def publish_commit(step: int, when: float) -> None:
    """Set the metrics of the last commit; `when` is in seconds since 1970."""
    telemetry.set_level("planish_checkpoint_last_committed_step", step)
    telemetry.set_level("planish_checkpoint_last_commit_timestamp_seconds", when)


def publish_failure(op: str, error: BaseException) -> None:
    """Count a save or load that failed, by the kind of its error."""
    telemetry.count("planish_checkpoint_failures_total", op=op, reason=type(error).__name__)


def timings_key(folder: str, attempt: str, op: Operation = "save") -> str:
    """Return the key of the records of an attempt at `folder`: of its save or of its last load."""
    return join(attempt_folder(folder, attempt), TIMINGS if op == "save" else LOAD_TIMINGS)


def store_timings(
    storage: Store, folder: str, attempt: str, timeline: Timeline, op: Operation = "save"
) -> None:
    """Write the records of a committed save, or of a load, beside the data of the checkpoint.

    A failed write is only logged, since a checkpoint may be loaded from a read-only place.
    """
    key = timings_key(folder, attempt, op)
    try:
        storage.put(key, timeline.encode())
    except OSError as error:
        logger.warning(telemetry.event("timings_not_written", uri=storage.uri(key), error=error))


def read_timings(uri: str, op: Operation = "save") -> Timeline:
    """Return the records of a save or load.

    `uri` is a checkpoint, or a JSON-lines file of records whose name ends in `.jsonl`.

    Raises:
        CheckpointNotFound: nothing is committed there, or there are no such records.
        RecordError: the file contains something else.
    """
    from planish.checkpoint.commit.commit import read_commit

    storage, key = open_store(uri.partition("#")[0])
    if not key.endswith(".jsonl"):
        commit = read_commit(storage, key)
        if commit is None:
            raise CheckpointNotFound(
                f"`{uri}` must be a committed checkpoint, but has no COMMIT; `planish checkpoint "
                "ls` shows those that are there"
            )
        key = timings_key(key, commit.attempt, op)
    try:
        data, _ = storage.get(key, MAX_TIMINGS_BYTES)
    except ObjectMissing:
        why = {
            "save": "the saver ended before it wrote them",
            "load": "no load was asked to keep them (`store_timings=True`), or it could not",
        }
        raise CheckpointNotFound(
            f"`{storage.uri(key)}` must hold the timing records of a {op}, but is not there; "
            f"{why[op]}"
        ) from None
    try:
        return Timeline.decode(data)
    except ValueError as error:
        raise RecordError(f"`{storage.uri(key)}` is damaged: {error}; remove it") from None
