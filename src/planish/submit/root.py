"""Objects below a run root that operators use: logs, the stop file, avoided nodes."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from planish import store
from planish.base.errors import ConfigError, ObjectMissing, PlanishError, RecordError
from planish.records import layout
from planish.run import avoid as nodes
from planish.store import normal_uri
from planish.store.documents import read_json

LOOK_SECONDS = 5.0

_LOG = re.compile(
    r"(?P<iteration>\d{5,})-(?P<stage>[a-z_]+)-(?P<shard>\d{2,})-(?P<attempt>\d+)\.txt"
)

_PARTS = {
    "iterate": ("rollout", "evaluate", "reward", "train", "checkpoint"),
    "next_run": ("next",),
}
"""Tasks whose logs have other names, each with the stages that write these logs."""


def stop(root: str, *, undo: bool = False) -> list[str]:
    """Make a run end after its present iteration, or undo that; return the action and its
    effect.
    """
    root = normal_uri(root)
    uri = layout.stop_file(root)
    if not store.exists(layout.run_file(root)):
        raise ConfigError(
            f"the root must hold a run, got no `{layout.run_file(root)}`; its first task writes it"
        )
    if not undo:
        store.write(uri, json.dumps({"reason": "operator"}).encode())
        return [
            f"written {uri}",
            "the run ends after the iteration in progress, and no other begins on this root before "
            f"`planish stop {root} --undo`",
        ]
    folder = layout.iteration(root, 0).rpartition("/")[0]
    marks = [mark for mark in store.list_uris(folder) if mark.endswith("/stopped.json")]
    present = [mark for mark in (uri, *marks) if store.exists(mark)]
    for mark in present:
        store.delete(mark)
    return [f"deleted {mark}" for mark in present] or [f"nothing to undo: no {uri}"]


def avoid(root: str, node: str, *, undo: bool = False) -> list[str]:
    """Make the following runs avoid a node, or undo that; return the action."""
    root = normal_uri(root)
    uri = layout.avoided_node(root, node)
    if not undo:
        is_new = nodes.avoid(root, nodes.AvoidedNode(node, "operator"))
        return [f"written {uri}" if is_new else f"named before: {uri}", nodes.WHICH_RUNS]
    if not nodes.is_node_name(node) or not store.exists(uri):
        return [f"nothing to undo: no {uri}"]
    store.delete(uri)
    return [f"deleted {uri}"]


class _Attempt(NamedTuple):
    start_seconds: float
    uri: str
    state: str

    @property
    def head(self) -> str:
        return f"== {self.uri.rpartition('/')[2]} {self.state}".rstrip()

    def lines(self) -> list[str]:
        return store.read(self.uri).decode("utf-8", "replace").splitlines()


def _logs(folder: str) -> Iterator[tuple[str, re.Match[str]]]:
    for uri in store.list_uris(folder):
        if found := _LOG.fullmatch(uri.rpartition("/")[2]):
            yield uri, found


def _is_asked(found: re.Match[str], stage: str, iteration: int) -> bool:
    """Return whether a log belongs to a stage and an iteration, with the meanings of `logs`."""
    word = stage.replace("-", "_")
    is_stage = not word or found["stage"] in _PARTS.get(word, (word,))
    return is_stage and iteration in (-1, int(found["iteration"]))


def _attempts(folder: str, stage: str, iteration: int) -> list[_Attempt]:
    """Return the attempts of a stage and an iteration, as in `logs`, ordered by their start."""
    attempts = []
    for uri, found in _logs(folder):
        if _is_asked(found, stage, iteration):
            known = f"{uri.rpartition('-')[0]}.json"
            entry = read_json(known) if store.exists(known) else {}
            start, state = float(entry.get("start_seconds", 0)), str(entry.get("state", ""))
            attempts.append(_Attempt(start, uri, state))
    return sorted(attempts)


def _silent(folder: str, stage: str, iteration: int) -> Iterator[str]:
    """Yield a line for each ended task of a stage and an iteration that has written no log."""
    for uri in store.list_uris(folder):
        name = uri.rpartition("/")[2].removesuffix(".json")
        found = _LOG.fullmatch(f"{name}-0.txt")
        if found and _is_asked(found, stage, iteration):
            state = str(read_json(uri).get("state", ""))
            if state in ("done", "failed"):
                yield f"== {name} {state}, and wrote no line"


def _checked_folder(root: str, num_lines: int) -> str:
    if num_lines < 1:
        raise ConfigError(f"`--lines` must be at least 1, got {num_lines}")
    return layout.logs(normal_uri(root))


def logs(root: str, *, stage: str = "", iteration: int = -1, num_lines: int = 40) -> Iterator[str]:
    """Yield the last lines of task attempts, each after a line that names the attempt.

    Args:
        root: URI or path of the run.
        stage: only this stage, or the stages of this task (`iterate`); empty for all.
        iteration: only this iteration, 0 for stages that run once; -1 for all. Without stage and
            iteration, failed attempts and the newest attempt are shown.
        num_lines: number of lines of each attempt.

    Raises:
        ObjectMissing: no such attempt has written anything yet.
    """
    folder = _checked_folder(root, num_lines)
    attempts = _attempts(folder, stage, iteration)
    if not attempts:
        if silent := list(_silent(folder, stage, iteration)):
            yield from silent
            return
        others = ", ".join(sorted({found["stage"] for _, found in _logs(folder)}))
        raise ObjectMissing(
            f"`{folder}` must hold a log of {stage or 'a stage'}, got {others or 'none'}; lines "
            "arrive a minute after a task began"
        )
    if not stage and iteration < 0:
        attempts = [a for a in attempts[:-1] if a.state == "failed"] + attempts[-1:]
    for attempt in attempts:
        yield attempt.head
        yield from attempt.lines()[-num_lines:]


def running(root: str) -> Iterator[str]:
    """Yield the last line of each running task; nothing if the root cannot be read."""
    try:
        attempts = _attempts(layout.logs(normal_uri(root)), "", -1)
        newest = {attempt.uri.rpartition("-")[0]: attempt for attempt in attempts}
        for attempt in newest.values():
            if attempt.state == "running":
                yield f"{attempt.head}: {''.join(attempt.lines()[-1:])}"
        yield from open_alerts(normal_uri(root)).values()
    except (PlanishError, KeyError, OSError):
        return


def open_alerts(root: str) -> dict[str, str]:
    """Return a text for each open alert on machines of a run, by the alert's URI."""
    found = {}
    for uri in store.list_uris(layout.alerts(root)):
        # Objects that are not alerts are left out.
        with contextlib.suppress(RecordError, KeyError, TypeError):
            alert = {"state": "", **read_json(uri)}
            if alert["state"] != "resolved":
                machine, what = alert["machine"] or "the job", alert["metric"] or alert["kind"]
                found[uri] = f"{machine} unlike its peers in {what}"
    return found


def follow(
    root: str,
    has_ended: Callable[[], bool],
    *,
    stage: str = "",
    iteration: int = -1,
    num_lines: int = 40,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Yield lines as tasks write them until the run has ended.

    Attempts that ended before are left out, except the newest. `has_ended` is called before each
    read; the other arguments are those of `logs`.
    """
    folder = _checked_folder(root, num_lines)
    shown: dict[str, int] = {}
    complete: set[str] = set()
    shown_last = ""
    is_first = True
    while True:
        is_last = has_ended()
        attempts = _attempts(folder, stage, iteration)
        if is_first:
            complete |= {a.uri for a in attempts[:-1] if a.state in ("done", "failed")}
        for attempt in attempts:
            if attempt.uri in complete:
                continue
            if attempt.state in ("done", "failed") and attempt.uri in shown:
                complete.add(attempt.uri)  # its last lines are read below, before the next pass
            lines = attempt.lines()
            begin = shown.get(attempt.uri, max(0, len(lines) - num_lines) if is_first else 0)
            if lines[begin:] and attempt.uri != shown_last:
                yield attempt.head
                shown_last = attempt.uri
            yield from lines[begin:]
            shown[attempt.uri] = len(lines)
        if is_last:
            return
        is_first = False
        sleep(LOOK_SECONDS)


def has_report(root: str) -> bool:
    """Return whether the last stage of a run, its report, is done."""
    uri = layout.stage_log(normal_uri(root), "report", 0, 0)
    return store.exists(uri) and read_json(uri).get("state") == "done"
