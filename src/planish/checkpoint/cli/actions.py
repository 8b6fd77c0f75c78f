"""What each command of `planish checkpoint` does; the functions have the names of the commands."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from planish import checkpoint, store
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, CheckpointNotFound, ConfigError
from planish.base.text import Table, bytes_text, rate_text, seconds_text
from planish.checkpoint.cli.command import Ended, Lines, Progress
from planish.checkpoint.commit.catalog import CatalogVerdict, Entry
from planish.checkpoint.format.geometry import volumes
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.train_state import checkpoint_place
from planish.records.manifest import manifest_uri, read_manifest
from planish.store import normal_pin

_MAX_ROWS = 10_000


def ls(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield a table of the checkpoints below a root."""
    root = normal_pin(options.root)
    entries = checkpoint.list_checkpoints(root)
    if options.json:
        yield _json([_facts(entry) for entry in entries])
        return
    columns = ("step", "checkpoint", "committed (UTC)", "bytes", "objects", "roles")
    rows: list[list[Any]] = [
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
    yield Table(root, columns, rows) if rows else "no committed checkpoint"


def latest(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the pin of the newest checkpoint, for scripts.

    Raises:
        CheckpointNotFound: there is none.
    """
    root = normal_pin(options.root)
    newest = checkpoint.latest(root)
    if newest is None:
        raise CheckpointNotFound(f"`{root}` must hold a committed checkpoint, but holds none")
    yield f"{newest.uri}#sha256={newest.commit.meta_sha256}"


def info(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield what COMMIT and the metadata say."""
    opened = open_state(_checkpoint(options.path))
    entry = Entry(opened.path, opened.uri, opened.commit)
    header = opened.metadata.header
    states = _states(opened.metadata)
    if options.json:
        yield _json({**_facts(entry), "header": header, "states": states})
        return
    facts = {
        **_facts(entry),
        "created_at": _time(entry.commit.created_at),
        "total_bytes": bytes_text(entry.commit.total_bytes),
    }
    rows = [[name, value] for name, value in facts.items() if value not in ("", {}, [])]
    rows += [[name, value] for name, value in header.items() if name not in facts]
    yield Table(opened.uri, ("", ""), rows)
    columns = ("tensors", "elements", "bytes", "parts", "files", "types")
    rows = []
    for name, state in states.items():
        cells = {**state, "bytes": bytes_text(state["bytes"]), "types": " ".join(state["types"])}
        rows.append([name, *(cells[column] for column in columns)])
    yield Table("states", ("state", *columns), rows)


def inspect(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the tensors, and their parts where asked for."""
    opened = open_state(_checkpoint(options.path))
    metadata = opened.metadata
    tensors, shards = metadata.tensors, metadata.shards
    names = enumerate(tensors.fqns)
    rows = [row for row, fqn in names if fnmatch.fnmatchcase(fqn, options.name)]
    described: list[list[Any]] = []
    parts: list[list[Any]] = []
    for row in rows[:_MAX_ROWS]:
        spec = tensors.spec(row)
        mine = metadata.shards_of(row)
        size = int(shards.nbytes[mine].sum())
        shape = " x ".join(map(str, spec.shape)) or "scalar"
        state = f"{spec.role}.{spec.kind}"
        described.append([state, spec.fqn, spec.dtype, shape, bytes_text(size), len(mine)])
        wanted = mine.tolist() if options.shards and len(parts) < _MAX_ROWS else ()
        for part in wanted:
            dims = len(spec.shape)
            begin = shards.offsets[part, :dims].tolist()
            lengths = shards.lengths[part, :dims].tolist()
            box = " ".join(f"{o}:{o + n}" for o, n in zip(begin, lengths, strict=True)) or "all"
            first = int(shards.start[part])
            place = f"{first}:{first + int(shards.nbytes[part])}"
            parts.append([spec.fqn, box, metadata.files.keys[int(shards.file[part])], place])
    columns = ("state", "tensor", "type", "shape", "bytes", "parts")
    more = f" (the first {_MAX_ROWS} of {len(rows)})" if len(rows) > _MAX_ROWS else ""
    yield Table(f"{opened.uri}{more}", columns, described)
    if options.shards:
        yield Table("parts", ("tensor", "box", "file", "bytes"), parts[:_MAX_ROWS])


def rm(options: argparse.Namespace, _: Progress) -> Lines:
    """Remove one checkpoint; without `--yes` only say so."""
    place = normal_pin(options.path).partition("#")[0]
    entry = checkpoint.info(place)
    what = f"`{entry.uri}`: step {entry.step}, {bytes_text(entry.commit.total_bytes)}"
    if not options.yes:
        yield f"would remove {what}; add --yes to do it"
        raise Ended(EXIT_CONFIG)
    checkpoint.delete(place)
    yield f"removed {what}"


def retain(options: argparse.Namespace, _: Progress) -> Lines:
    """Apply retention and yield a verdict for each checkpoint."""
    verdicts = checkpoint.retain(
        normal_pin(options.root),
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        pins=[int(pin) if pin.isdecimal() else normal_pin(pin) for pin in options.pin],
        dry_run=options.dry_run,
    )
    yield _verdicts(verdicts, "checkpoint", dry_run=options.dry_run)


def gc(options: argparse.Namespace, _: Progress) -> Lines:
    """Collect leftovers and yield a verdict for each attempt."""
    root, grace_s = normal_pin(options.root), options.grace_seconds
    verdicts = checkpoint.gc(root, grace_s=grace_s, dry_run=options.dry_run)
    yield _verdicts(verdicts, "attempt or upload", dry_run=options.dry_run)


def verify(options: argparse.Namespace, progress: Progress) -> Lines:
    """Check a checkpoint; yield every fault, and exit with 1 if there is one."""
    result = checkpoint.verify(
        _checkpoint(options.path),
        options.level,
        progress=lambda done, total: progress("verify", done, total),
    )
    if not result.is_intact:
        rows = [
            [fault.file, fault.block if fault.block >= 0 else "", fault.text]
            for fault in result.faults
        ]
        yield Table(f"{result.uri}: {len(rows)} faults", ("object", "block", "what"), rows)
        raise Ended(EXIT_FAILED)
    how = {"meta": "metadata read", "size": "all there", "crc": "every block intact"}
    yield (
        f"{result.uri}: {how[result.level]}, {result.num_objects} objects, {result.num_tensors} "
        f"tensors, {bytes_text(result.num_bytes)} read"
    )


def diff(options: argparse.Namespace, progress: Progress) -> Lines:
    """Compare two checkpoints bit by bit; yield how they differ, and exit with 1 if they do."""
    result = checkpoint.diff(
        _checkpoint(options.a),
        _checkpoint(options.b),
        progress=lambda done, total: progress("diff", done, total),
    )
    if result.is_equal:
        yield f"equal: {result.num_equal} tensors, {bytes_text(result.num_bytes)}"
        return
    rows: list[list[Any]] = [[name, "only in the first", "", ""] for name in result.only_a]
    rows += [[name, "only in the second", "", ""] for name in result.only_b]
    rows += [[f"role {role}", "shared small values", "", ""] for role in result.values]
    for tensor in result.differing:
        largest = "" if math.isnan(tensor.max_abs) else tensor.max_abs
        rows.append([tensor.name, tensor.reason, tensor.num_elements or "", largest])
    more = f", the first {options.limit} shown" if len(rows) > options.limit else ""
    title = f"{len(rows)} differences{more}; {result.num_equal} tensors are equal"
    columns = ("tensor", "what differs", "elements", "largest difference")
    yield Table(title, columns, rows[: options.limit])
    raise Ended(EXIT_FAILED)


def export_hf(options: argparse.Namespace, progress: Progress) -> Lines:
    """Write the policy of a checkpoint as a Hugging Face folder; yield its pin."""
    from planish.checkpoint.convert.export_hf import export

    source, policy = options.source, ""
    if "#sha256=" in source:
        policy = source
    elif source and store.exists(manifest_uri(normal_pin(source))):
        policy = read_manifest(normal_pin(source)).ref(normal_pin(source)).pin()
    elif source and not Path(source).is_dir():
        raise ConfigError(
            f"`--source` must be a policy or a local folder with `config.json`, got {source!r}"
        )
    made = export(
        _checkpoint(options.path),
        normal_pin(options.out),
        policy=policy,
        folder=Path(source) if source and not policy else None,
        role=options.role,
        progress=lambda done, total: progress("export" if done < total else "store", done, total),
    )
    yield made.pin()


def reshard(options: argparse.Namespace, progress: Progress) -> Lines:
    """Write a checkpoint anew, or export it; yield the pin of the result last."""
    from planish.checkpoint.convert.layouts import Layout
    from planish.checkpoint.convert.rewrite import rewrite

    layout = Layout.parse(options.layout)
    if layout.is_merged:
        yield from export_hf(options, progress)
        return
    made = rewrite(
        _checkpoint(options.path),
        normal_pin(options.out),
        layout,
        parts=options.parts,
        roles=[options.role] if options.role else [],
        overwrite=options.overwrite,
        progress=lambda done, total: progress(f"reshard to {layout}", done, total),
    )
    if made.already_done:
        yield "already there"
    else:
        size, seconds = made.commit.total_bytes, made.timeline.wall_seconds
        yield (
            f"{bytes_text(size)} in {made.commit.n_objects} objects for {layout.num_ranks} ranks, "
            f"{bytes_text(made.bytes_read)} read, {seconds_text(seconds)}, "
            f"{rate_text(size, seconds)}"
        )
    yield made.pin


def report(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the timings of a save or load."""
    from planish.checkpoint.watch.monitor import read_timings
    from planish.checkpoint.watch.report import text_report

    place = normal_pin(options.path)
    timeline = read_timings(place, "load" if options.load else "save")
    yield text_report(timeline, title=place.partition("#")[0], rank=options.rank).rstrip("\n")


def import_dcp(options: argparse.Namespace, progress: Progress) -> Lines:
    """Turn a folder of torch.distributed.checkpoint into a checkpoint; yield its pin."""
    with _dcp_errors():
        from planish.checkpoint.convert.dcp_bridge import import_dcp as convert

        progress("import", 0, 0)
        made = convert(
            options.folder,
            normal_pin(options.out),
            step=options.step,
            role=options.role,
            overwrite=options.overwrite,
        )
    yield made.pin


def export_dcp(options: argparse.Namespace, progress: Progress) -> Lines:
    """Turn a checkpoint into a folder that torch.distributed.checkpoint reads."""
    from planish.checkpoint.convert.export_hf import policy_role

    with _dcp_errors():
        from planish.checkpoint.convert.dcp_bridge import export_dcp as convert

        progress("export", 0, 0)
        opened = open_state(_checkpoint(options.path))
        role = policy_role(sorted(set(opened.metadata.tensors.roles)), options.role)
        convert(opened.pin, options.folder, role=role)
    yield f"written {options.folder}"


@contextlib.contextmanager
def _dcp_errors() -> Iterator[None]:
    """Raise what a user can mend as an error of the configuration."""
    try:
        yield
    except (FileExistsError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _checkpoint(text: str) -> str:
    """Return the URI or pin of a checkpoint for what a user typed, also for a train state's pin."""
    return checkpoint_place(normal_pin(text))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True)


def _time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return str(seconds)


def _facts(entry: Entry) -> dict[str, Any]:
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


def _states(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return counts by role and kind, small objects included."""
    tensors, shards, files = metadata.tensors, metadata.shards, metadata.files
    states = [f"{role}.{kind}" for role, kind in zip(tensors.roles, tensors.kinds, strict=True)]
    elements = volumes(tensors.shapes)
    counts: dict[str, dict[str, Any]] = {}
    for name in sorted(set(states)):
        rows = [row for row, state in enumerate(states) if state == name]
        mine = np.isin(shards.tensor, rows)
        counts[name] = {
            "tensors": len(rows),
            "elements": int(elements[rows].sum()),
            "bytes": int(shards.nbytes[mine].sum()),
            "parts": int(mine.sum()),
            "files": len(set(shards.file[mine].tolist())),
            "types": sorted({tensors.dtypes[row] for row in rows}),
        }
    for key, size in zip(files.keys, files.sizes, strict=True):
        if not key.endswith(".safetensors"):
            name = key.split("/")[1] if key.count("/") > 1 else key
            empty = {"tensors": 0, "elements": 0, "bytes": 0, "parts": 0, "files": 0, "types": []}
            state = counts.setdefault(name, empty)
            state["bytes"] += size
            state["files"] += 1
    return counts


def _verdicts(verdicts: list[CatalogVerdict], noun: str, *, dry_run: bool) -> Table | str:
    if not verdicts:
        return f"no {noun} there"
    gone = "would delete" if dry_run else "deleted"
    words = {"keep": "kept", "delete": gone}
    rows = [[words[verdict.action], verdict.key, verdict.reason] for verdict in verdicts]
    count = sum(verdict.action == "delete" for verdict in verdicts)
    title = f"{gone} {count}, {'would keep' if dry_run else 'kept'} {len(verdicts) - count}"
    return Table(title, ("", noun, "why"), rows)
