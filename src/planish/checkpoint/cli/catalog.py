"""Commands that look at and clear up what a store holds: ls, info, inspect, latest, rm, gc."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from planish.base.errors import EXIT_CONFIG, EXIT_FAILED
from planish.checkpoint.cli.command import Ended, Lines, Progress, Table, checkpoint_of, place_of
from planish.checkpoint.commit import catalog
from planish.checkpoint.format.geometry import volumes
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.load.reader import Opened, open_state
from planish.checkpoint.watch.heatmap import bytes_text
from planish.store import open_store

_MAX_ROWS = 10_000


def ls(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield a table of the checkpoints below a root."""
    entries = _entries(options.root)
    if options.json:
        yield _json([_facts(entry) for entry in entries])
        return
    columns = ("step", "checkpoint", "committed (UTC)", "bytes", "objects", "roles")
    rows = [
        [
            entry.step,
            entry.uri,
            _time(entry.commit.created_at),
            bytes_text(entry.commit.total_bytes),
            entry.commit.n_objects,
            " ".join(entry.commit.roles),
        ]
        for entry in entries
    ]
    yield Table(place_of(options.root), columns, rows) if rows else "no committed checkpoint"


def _entries(root: str) -> list[catalog.Entry]:
    storage, key = open_store(place_of(root))
    return catalog.list_checkpoints(storage, key)


def _facts(entry: catalog.Entry) -> dict[str, Any]:
    commit = entry.commit
    return {
        "uri": entry.uri,
        "pin": f"{entry.uri}#sha256={commit.meta_sha256}",
        "step": commit.step,
        "attempt": commit.attempt,
        "created_at": commit.created_at,
        "total_bytes": commit.total_bytes,
        "num_objects": commit.n_objects,
        "roles": list(commit.roles),
        "run_id": commit.run_id,
        "tags": dict(commit.tags),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True)


def _time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return str(seconds)


def latest(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the pin of the newest checkpoint, for scripts; exit code 1 without one."""
    entries = _entries(options.root)
    if not entries:
        raise Ended(EXIT_FAILED)
    yield f"{entries[-1].uri}#sha256={entries[-1].commit.meta_sha256}"


def info(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield what COMMIT and the metadata say."""
    opened = open_state(checkpoint_of(options.path))
    entry = catalog.Entry(opened.path, opened.uri, opened.commit)
    header = opened.metadata.header
    states = _states(opened.metadata)
    if options.json:
        yield _json({**_facts(entry), "header": header, "states": states})
        return
    facts = {**_facts(entry), "created_at": _time(entry.commit.created_at)}
    facts["total_bytes"] = bytes_text(entry.commit.total_bytes)
    rows = [[name, value] for name, value in facts.items() if value not in ("", {}, [])]
    rows += [[name, value] for name, value in header.items() if name not in facts]
    yield Table(opened.uri, ("", ""), rows)
    columns = ("state", "tensors", "elements", "bytes", "parts", "files", "types")
    yield Table(
        "states",
        columns,
        [
            [
                name,
                *(found["tensors"], found["elements"], bytes_text(found["bytes"])),
                *(found["parts"], found["files"], " ".join(found["types"])),
            ]
            for name, found in states.items()
        ],
    )


def _states(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return counts by role and kind, small objects included."""
    tensors, shards, files = metadata.tensors, metadata.shards, metadata.files
    rows: dict[str, list[int]] = defaultdict(list)
    for row, (role, kind) in enumerate(zip(tensors.roles, tensors.kinds, strict=True)):
        rows[f"{role}.{kind}"].append(row)
    elements = volumes(tensors.shapes)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(rows):
        mine = rows[name]
        chosen = np.isin(shards.tensor, mine)
        found[name] = {
            "tensors": len(mine),
            "elements": int(elements[mine].sum()),
            "bytes": int(shards.nbytes[chosen].sum()),
            "parts": int(chosen.sum()),
            "files": len(set(shards.file[chosen].tolist())),
            "types": sorted({tensors.dtypes[row] for row in mine}),
        }
    for key, size in zip(files.keys, files.sizes, strict=True):
        name = key.split("/")[1] if key.count("/") > 1 else key
        if not key.endswith(".safetensors"):
            empty = {"tensors": 0, "elements": 0, "bytes": 0, "parts": 0, "files": 0, "types": []}
            one = found.setdefault(name, empty)
            one["bytes"] += size
            one["files"] += 1
    return found


def inspect(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the tensors, and their parts where asked for."""
    opened = open_state(checkpoint_of(options.path))
    tensors = opened.metadata.tensors
    rows = [
        row for row in range(len(tensors)) if fnmatch.fnmatchcase(tensors.fqns[row], options.name)
    ]
    table = []
    for row in rows[:_MAX_ROWS]:
        spec = tensors.spec(row)
        parts = opened.metadata.shards_of(row)
        size = int(opened.metadata.shards.nbytes[parts].sum())
        shape = " x ".join(map(str, spec.shape)) or "scalar"
        state = f"{spec.role}.{spec.kind}"
        table.append([state, spec.fqn, spec.dtype, shape, bytes_text(size), len(parts)])
    columns = ("state", "tensor", "type", "shape", "bytes", "parts")
    more = f" (the first {_MAX_ROWS} of {len(rows)})" if len(rows) > _MAX_ROWS else ""
    yield Table(f"{opened.uri}{more}", columns, table)
    if options.shards:
        yield _shards(opened, rows[:_MAX_ROWS])


def _shards(opened: Opened, rows: list[int]) -> Table:
    metadata = opened.metadata
    shards, table = metadata.shards, []
    for row in rows:
        spec = metadata.tensors.spec(row)
        dims = len(spec.shape)
        for part in metadata.shards_of(row).tolist():
            begin = shards.offsets[part, :dims].tolist()
            lengths = shards.lengths[part, :dims].tolist()
            box = " ".join(f"{o}:{o + n}" for o, n in zip(begin, lengths, strict=True)) or "all"
            first = int(shards.start[part])
            place = f"{first}:{first + int(shards.nbytes[part])}"
            table.append([spec.fqn, box, metadata.files.keys[int(shards.file[part])], place])
            if len(table) == _MAX_ROWS:
                break
    return Table("parts", ("tensor", "box", "file", "bytes"), table[:_MAX_ROWS])


def rm(options: argparse.Namespace, _: Progress) -> Lines:
    """Remove one checkpoint; without `--yes` only say so."""
    storage, key = open_store(place_of(options.path).partition("#")[0])
    entry = catalog.info(storage, key)
    what = f"`{entry.uri}`: step {entry.step}, {bytes_text(entry.commit.total_bytes)}"
    if not options.yes:
        yield f"would remove {what}; add --yes to do it"
        raise Ended(EXIT_CONFIG)
    catalog.delete(storage, key)
    yield f"removed {what}"


def retain(options: argparse.Namespace, _: Progress) -> Lines:
    """Apply retention and yield a verdict for each checkpoint."""
    storage, key = open_store(place_of(options.root))
    pins = [int(pin) if pin.isdecimal() else place_of(pin) for pin in options.pin]
    verdicts = catalog.retain(
        *(storage, key),
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        pins=pins,
        dry_run=options.dry_run,
    )
    yield _verdicts(verdicts, "checkpoint", dry_run=options.dry_run)


def gc(options: argparse.Namespace, _: Progress) -> Lines:
    """Collect leftovers and yield a verdict for each attempt."""
    storage, key = open_store(place_of(options.root))
    verdicts = catalog.gc(storage, key, grace_s=options.grace_seconds, dry_run=options.dry_run)
    yield _verdicts(verdicts, "attempt or upload", dry_run=options.dry_run)


def _verdicts(verdicts: list[catalog.Verdict], noun: str, *, dry_run: bool) -> Table | str:
    if not verdicts:
        return f"no {noun} there"
    gone = "would delete" if dry_run else "deleted"
    words = {"keep": "kept", "delete": gone}
    rows = [[words[verdict.action], verdict.key, verdict.reason] for verdict in verdicts]
    count = sum(verdict.action == "delete" for verdict in verdicts)
    title = f"{gone} {count}, {'would keep' if dry_run else 'kept'} {len(verdicts) - count}"
    return Table(title, ("", noun, "why"), rows)
