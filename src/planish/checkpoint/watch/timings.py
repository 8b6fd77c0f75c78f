"""What each stage of a save or load cost on each rank: records, a recorder, their bytes.

Nothing here prints or publishes; `report` and the metrics read these records.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Operation = Literal["save", "load"]
SAVE_STAGES = ("plan", "stage", "serialise", "upload", "meta", "commit", "barrier")
LOAD_STAGES = ("meta", "plan", "read", "verify", "copy", "exchange", "barrier")
VERSION = 1
RETRY = "retry "
"""Begins the `object` of a record that only counts repeated requests."""


@dataclass(frozen=True)
class Timing:
    """One stage of one state on one rank.

    Example:
        >>> Timing(0, "save", "main.model", "upload", 10.0, 12.5, num_bytes=5).seconds
        2.5
    """

    rank: int
    """Global rank."""
    op: Operation
    """Whether a save or a load."""
    state: str
    """Role and kind (`main.model`), empty for what concerns all of them."""
    stage: str
    """One of SAVE_STAGES or LOAD_STAGES."""
    start: float
    """Seconds since 1970."""
    end: float
    """Seconds since 1970, not before `start`."""
    num_bytes: int = 0
    """Bytes moved."""
    object: str = ""
    """Key of the object inside the checkpoint, or `retry <reason>`; empty for several."""
    retries: int = 0
    """Store requests that had to be repeated."""
    host: str = ""
    """Name of the machine of the rank."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass
class Timeline:
    """All records of one save or load, of one rank or of all.

    Example:
        >>> line = Timeline([Timing(1, "load", "", "plan", 0.0, 1.0)])
        >>> Timeline.decode(line.encode()) == line
        True
    """

    records: list[Timing] = field(default_factory=list)
    """In the order in which they ended, rank by rank."""

    def encode(self) -> bytes:
        """Return JSON lines: a header, then one array per record."""
        header = {"version": VERSION, "columns": [f.name for f in fields(Timing)]}
        rows = [[getattr(record, name) for name in header["columns"]] for record in self.records]  # type: ignore[attr-defined]
        return "\n".join(json.dumps(line) for line in (header, *rows)).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Timeline:
        """Undo `encode`.

        Raises:
            ValueError: the bytes are no timeline.
        """
        try:
            header, *rows = map(json.loads, data.decode().splitlines())
            known = {f.name for f in fields(Timing)}
            places = [(i, name) for i, name in enumerate(header["columns"]) if name in known]
            records = [Timing(**{name: row[i] for i, name in places}) for row in rows]
            if any(not isinstance(record.end - record.start, float) for record in records):
                raise TypeError("times must be numbers")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"a timeline must be JSON lines of records, got {error}") from error
        return cls(records)

    def seconds(self, stage: str, rank: int | None = None) -> float:
        """Return the summed duration of one stage, of one rank or of all."""
        return sum(
            record.seconds
            for record in self.records
            if record.stage == stage and rank in (None, record.rank)
        )

    def end_to_end(self) -> dict[int, float]:
        """Return per rank the seconds from its first start to its last end."""
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
    """Collects the records of one rank; any thread may add.

    Example:
        >>> recorder = Recorder(0, "save")
        >>> with recorder.stage("plan"):
        ...     pass
        >>> [record.stage for record in recorder.timeline().records]
        ['plan']
    """

    def __init__(self, rank: int, op: Operation, host: str = "") -> None:
        """Start without records."""
        self.rank, self.op, self.host = rank, op, host
        self._records: list[Timing] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def stage(
        self, stage: str, state: str = "", num_bytes: int = 0, object: str = ""
    ) -> Iterator[None]:
        """Record the body as one stage, also when it raises."""
        start = time.time()
        began = time.perf_counter()
        try:
            yield
        finally:
            end = start + time.perf_counter() - began
            self.add(Timing(self.rank, self.op, state, stage, start, end, num_bytes, object, 0))

    def add(self, record: Timing) -> None:
        """Add one record as this rank's."""
        with self._lock:
            self._records.append(replace(record, rank=self.rank, op=self.op, host=self.host))

    def retried(self, stage: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Record store requests that were repeated: one record per reason, without a duration.

        Args:
            stage: what the requests were for.
            before: reason to count, at the start.
            after: the same now.
        """
        now = time.time()
        for reason, count in sorted(after.items()):
            repeated = count - before.get(reason, 0)
            if repeated > 0:
                note = f"{RETRY}{reason}"
                self.add(
                    Timing(self.rank, self.op, "", stage, now, now, object=note, retries=repeated)
                )

    def extend(self, records: Iterable[Timing]) -> None:
        """Add records that another process measured for this rank."""
        for record in records:
            self.add(record)

    def timeline(self) -> Timeline:
        """Return what has been recorded so far."""
        with self._lock:
            return Timeline(list(self._records))


@dataclass(frozen=True)
class CheckpointInfo:
    """What a save has made visible, or a load has read.

    Example:
        >>> CheckpointInfo("file:///r/step-1", 1, "01J", "ab", 8).pin
        'file:///r/step-1#sha256=ab'
    """

    uri: str
    """Place of the checkpoint."""
    step: int
    """Training step that the saver named."""
    attempt: str
    """Id of the save that was committed."""
    sha256: str
    """Digest of the global metadata, in hexadecimal: the identity of the state."""
    num_bytes: int
    """Bytes of all objects of the checkpoint (save), or read from the store by this rank (load)."""
    layout: str = ""
    """Layout that the saver named, for information."""
    roles: tuple[str, ...] = ()
    """Roles that were committed together."""
    timings: Timeline = field(default_factory=Timeline, compare=False)
    """This rank's records; on rank 0 of a save those of every rank."""
    facts: dict[str, object] = field(default_factory=dict, compare=False)
    """Further facts by name (`rng`: `restored` or `reseeded`, ...)."""

    @property
    def pin(self) -> str:
        """The place and the identity as one text."""
        return f"{self.uri}#sha256={self.sha256}"
