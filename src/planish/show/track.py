"""The command `planish track`: writes the curves of a run to TensorBoard, MLflow or Weights &
Biases.

A follower reads the records that stages write in any case: update reports, evaluations and stage
logs. It runs during a run or after it. It slows no stage, and its failures never affect the run.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planish import store
from planish.base.answers import bounded
from planish.base.errors import EXIT_TRANSIENT, BackendUnavailable, PlanishError, exit_code
from planish.base.telemetry import redact
from planish.records import EvalReport, UpdateReport, layout, read_report
from planish.records.reports import evaluations
from planish.run.signals import on_signal
from planish.show.trackers import Point, Tracker, open_tracker
from planish.store import normal_uri
from planish.store.documents import read_json, write_json

logger = logging.getLogger(__name__)

SCHEMA = "tracker/1"
TRACKER_SECONDS = 600.0
"""Seconds that a slow tracker may take; the other trackers wait for it."""
SHARDED = "rollout"
"""The stage whose shards have separate curves."""
WITHOUT_CURVES = ("prepare", "evaluate", "next", "report")
"""Stages whose log entries have no curves; evaluations have their own reports."""
_TOLD = {"stage", "state", "iteration", "start_seconds", "seconds"}
_FOREIGN = re.compile(r"[^A-Za-z0-9_./ -]")
"""Pattern of characters that a name in MLflow must not have."""


@dataclass(frozen=True)
class Source:
    """A record with values of curves."""

    root: str
    key: str
    """Path below the root, with a part that changes if the record is written again."""
    uri: str
    seconds: float
    """Unix time at which the record was complete."""
    entry: Mapping[str, Any]
    """Entry of the stage log; empty for an evaluation."""

    def points(self) -> Iterator[Point]:
        """Return the values of the record."""
        if place := layout.parse_evaluation(self.root, self.uri):
            name, version = place
            evaluation = read_report(EvalReport, self.uri)
            group = f"evaluate_{name}" if name else "evaluate"
            yield from self._of(group, evaluation.scalars, version)
            for source, scalars in evaluation.sources.items():
                yield from self._of(f"{group}/{source}", scalars, version)
            return
        stage, iteration = self.entry["stage"], self.entry["iteration"]
        metrics = dict(self.entry.get("metrics", {}))
        if self.uri == layout.update(self.root, iteration):
            update = read_report(UpdateReport, self.uri)
            metrics |= update.scalars
            first = int(update.attributes["step"]) - len(update.minibatches) + 1
            for step, scalars in enumerate(update.minibatches, first):
                yield from self._of("train_step", scalars, step)
        group = f"{stage}_{self.entry['shard']:02d}" if stage == SHARDED else stage
        yield from self._of(group, metrics, iteration)

    def _of(self, group: str, scalars: Mapping[str, float], step: int) -> Iterator[Point]:
        for metric, value in scalars.items():
            name = _FOREIGN.sub("_", f"{group}/{metric.replace('@', '_at_')}")
            yield Point(name, step, float(value), self.seconds)


class RunReader:
    """Finds the records of a run; reads each log entry until its task has ended."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._ended: dict[str, Mapping[str, Any]] = {}
        self.has_ended = self.has_failed = False
        """True, after the last `look`, if the report is written, or if a task has failed
        permanently."""

    def config(self) -> dict[str, Any]:
        """Return the settings of the run by dotted name.

        Raises:
            ObjectMissing: no run has begun.
        """
        run = read_json(layout.run_file(self.root))
        return {
            f"{section}.{key}": value
            for section, values in sorted(run["config"].items())
            for key, value in sorted(values.items())
        }

    def look(self) -> list[Source]:
        """Return all existing records, ordered by the time of their end."""
        entries = dict(self._ended)
        for uri in store.list_uris(f"{layout.logs(self.root)}/"):
            if uri.endswith(".json") and uri not in entries:
                found = read_json(uri)
                if found.keys() >= _TOLD:  # else another release wrote it
                    entries[uri] = found
                    if found["state"] == "done":
                        self._ended[uri] = found
        ends = {(e["stage"], e["state"]) for e in entries.values()}
        self.has_ended = ("report", "done") in ends
        self.has_failed = any(state == "failed" for _, state in ends)
        sources = []
        for uri, entry in entries.items():
            end = entry["start_seconds"] + entry["seconds"]
            key = f"{uri.removeprefix(self.root)} {entry['start_seconds']:.3f}"
            if entry["state"] == "running" or entry["stage"] in WITHOUT_CURVES:
                continue
            if entry["stage"] == "train" and entry["state"] == "done":
                uri = layout.update(self.root, int(entry["iteration"]))
                key = uri.removeprefix(self.root)
            elif not entry.get("metrics"):
                continue
            sources.append(Source(self.root, key, uri, end, entry))
        sources += self.evaluations(entries.values())
        return sorted(sources, key=lambda source: source.seconds)

    def evaluations(self, entries: Iterable[Mapping[str, Any]]) -> Iterator[Source]:
        """Yield the evaluations, each with the end time of its task, if known."""
        ends: dict[float, float] = {}
        for entry in entries:
            if entry["stage"] == "evaluate" and entry["state"] == "done":
                # The task at the end of a run measures the policies that no iteration has measured.
                version = entry["metrics"].get("policy_version", -1)
                ends[version] = entry["start_seconds"] + entry["seconds"]
        last = ends.get(-1, time.time())
        for _, version, uri in evaluations(self.root):
            key, end = uri.removeprefix(self.root), ends.get(version, last)
            yield Source(self.root, key, uri, end, {})


class Follower:
    """Writes a run to one tracker; its progress is stored below the run's root."""

    def __init__(self, reader: RunReader, target: str, tracker: Tracker) -> None:
        """Read the stored progress of earlier followers of `target`; a digest of `target` names
        it.
        """
        self._reader, self._tracker = reader, tracker
        digest = hashlib.sha256(target.encode()).hexdigest()[:12]
        self._uri = f"{layout.trackers(reader.root)}/{digest}.json"
        self.kind = target.partition("=")[0]
        """Kind of the tracker, without its address, which may contain a password."""
        self._is_open = False
        self._run_id, self._batch, self._written = "", 0, set[str]()
        if store.exists(self._uri):
            state = read_json(self._uri)
            self._run_id, self._batch = state["run"], state["batch"]
            self._written = set(state["written"])

    def advance(self) -> int:
        """Write new values; return their number.

        If the tracker's package raises, a later call repeats the write.
        """
        new = [source for source in self._reader.look() if source.key not in self._written]
        if not new:
            return 0
        if not self._is_open:
            self._tracker.open(self._run_id, self._reader.config())
            self._is_open = True
        points: list[Point] = []
        for source in new:
            try:
                points.extend(source.points())
            except (LookupError, ValueError) as error:
                logger.warning("record left out uri=%s error=%s", source.uri, error)
        self._tracker.write(points, self._batch)
        self._written |= {source.key for source in new}
        self._batch += 1
        self._run_id = self._tracker.run_id
        state = {"run": self._run_id, "batch": self._batch, "written": sorted(self._written)}
        write_json(self._uri, {"schema": SCHEMA, "tracker": self.kind, **state})
        return len(points)

    def close(self) -> None:
        """Close the tracker."""
        if self._is_open:
            reader = self._reader
            self._tracker.close(has_ended=reader.has_ended, has_failed=reader.has_failed)


def _passes(error: BaseException | None) -> bool:
    """Return whether an exception of a tracker comes from a server or a network."""
    while error is not None and not isinstance(error, (OSError, PlanishError)):
        error = error.__cause__ or error.__context__
    is_ours = isinstance(error, PlanishError)
    return error is not None and (not is_ours or exit_code(error) == EXIT_TRANSIENT)


def track(options: argparse.Namespace) -> str:
    """Follow a run with the options of the command line; return one line with the result.

    Raises:
        ObjectMissing: no run has begun at the root, and the command does not wait for one.
        BackendUnavailable: a tracker did not answer; the same command continues.
    """
    root = normal_uri(options.root)
    reader = RunReader(root)
    if not options.follow:
        reader.config()
    followers = []
    for target in options.to:
        tracker = open_tracker(target, root, experiment=options.experiment, name=options.name)
        followers.append(Follower(reader, target, tracker))
    stop = threading.Event()
    written = 0
    problems: dict[Follower, str] = {}
    may_pass = False
    with on_signal(lambda _: stop.set()):
        while True:
            is_last = not options.follow or stop.wait(options.every)
            for follower in followers:
                try:
                    with bounded(TRACKER_SECONDS):
                        written += follower.advance()
                    problems.pop(follower, None)
                    if is_last:
                        follower.close()
                except Exception as error:
                    # An exception of one tracker's package does not stop the other trackers.
                    text = redact(" ".join(f"{type(error).__name__}: {error}".split()))
                    if follower not in problems:
                        logger.warning("tracker=%s error=%s", follower.kind, text)
                    problems[follower] = text
                    may_pass |= _passes(error)
            if is_last:
                break
    if problems:
        told = "; ".join(f"{follower.kind}: {text}" for follower, text in problems.items())
        message = (
            f"each tracker must take the run, got {told}; the same command goes on where it stopped"
        )
        raise BackendUnavailable(message, code="unknown") if may_pass else PlanishError(message)
    return f"{written} values written to {', '.join(follower.kind for follower in followers)}"
