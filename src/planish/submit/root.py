"""What an operator reads and writes below the root of a run: logs, the wish to stop, bad nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from planish import store
from planish.base.errors import ConfigError, ObjectMissing
from planish.records import layout
from planish.run import avoid as nodes
from planish.store import normal_uri
from planish.store.documents import read_json

_LOG = re.compile(
    r"(?P<iteration>\d{5,})-(?P<stage>[a-z_]+)-(?P<shard>\d{2,})-(?P<attempt>\d+)\.txt"
)


def stop(root: str, *, undo: bool = False) -> list[str]:
    """Ask a run to end after the iteration in progress, or take that back.

    Returns:
        URIs of the objects that were written or deleted.
    """
    root = normal_uri(root)
    uri = layout.stop_file(root)
    if not undo:
        store.write(uri, json.dumps({"reason": "operator"}).encode())
        return [uri]
    folder = layout.iteration(root, 0).rpartition("/")[0]
    marks = [mark for mark in store.list_uris(folder) if mark.endswith("/stopped.json")]
    present = [mark for mark in (uri, *marks) if store.exists(mark)]
    for mark in present:
        store.delete(mark)
    return present


def avoid(root: str, node: str, *, undo: bool = False) -> list[str]:
    """Keep the following runs on a root away from a node, or take that back.

    Only runs that are submitted with restarts keep away from anything.

    Returns:
        URIs of the objects that were written or deleted.

    Raises:
        ConfigError: no node can have that name.
    """
    root = normal_uri(root)
    uri = layout.avoided_node(root, node)
    if not undo:
        return [uri] if nodes.avoid(root, nodes.AvoidedNode(node, "operator")) else []
    if not nodes.is_node_name(node) or not store.exists(uri):
        return []
    store.delete(uri)
    return [uri]


def logs(root: str, *, stage: str = "", iteration: int = -1, num_lines: int = 40) -> Iterator[str]:
    """Yield the last lines of task attempts, each below a line that says whose they are.

    Args:
        root: URI or path of the run.
        stage: only of this one; empty for all.
        iteration: only of this one, 0 for what runs once; -1 for all. Without stage and iteration
            what failed is shown, and the attempt that began last.
        num_lines: lines of each attempt.

    Raises:
        ConfigError: no lines are asked for.
        ObjectMissing: no such attempt has written anything yet.
    """
    if num_lines < 1:
        raise ConfigError(f"`--lines` must be at least 1, got {num_lines}")
    folder = layout.logs(normal_uri(root))
    attempts: list[tuple[float, str, dict[str, Any]]] = []
    for uri in store.list_uris(folder):
        found = _LOG.fullmatch(uri.rpartition("/")[2])
        if found is None or stage not in ("", found["stage"]):
            continue
        if iteration in (-1, int(found["iteration"])):
            known = f"{uri.rpartition('-')[0]}.json"
            entry = read_json(known) if store.exists(known) else {}
            attempts.append((float(entry.get("start_seconds", 0)), uri, entry))
    attempts.sort(key=lambda attempt: attempt[:2])
    if not attempts:
        raise ObjectMissing(
            f"`{folder}` must hold a log of {stage or 'a stage'}, got none; lines arrive a minute "
            "after a task began"
        )
    if not stage and iteration < 0:
        attempts = [a for a in attempts[:-1] if a[2].get("state") == "failed"] + attempts[-1:]
    for _, uri, entry in attempts:
        yield f"== {uri.rpartition('/')[2]} {entry.get('state', '')}".rstrip()
        yield from store.read(uri).decode("utf-8", "replace").splitlines()[-num_lines:]
