"""Functions of the commands of `planish checkpoint`, each under the name of its command."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from planish import checkpoint, store
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, CheckpointNotFound, ConfigError, Ended
from planish.base.text import Table, bytes_text, rate_text, seconds_text
from planish.checkpoint.cli.command import Lines, Progress
from planish.checkpoint.commit.catalog import CatalogVerdict, Entry
from planish.checkpoint.format.geometry import volumes
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.loading.reader import open_state
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
    rows: list[list[Any]] = []
    for entry in entries:
        made = entry.commit
        size, when = bytes_text(made.total_bytes), _time(made.created_at)
        rows.append([made.step, entry.uri, when, size, made.n_objects, " ".join(made.roles)])
    yield Table(root, columns, rows) if rows else "no committed checkpoint"


def latest(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the pin of the newest checkpoint, for scripts."""
    root = normal_pin(options.root)
    newest = checkpoint.latest(root)
    if newest is None:
        raise CheckpointNotFound(f"`{root}` must hold a committed checkpoint, but holds none")
    yield newest.pin


def info(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the facts in COMMIT and in the metadata."""
    opened = open_state(_checkpoint(options.path))
    facts = _facts(Entry(opened.path, opened.uri, opened.commit))
    header = opened.metadata.header
    states = {name: asdict(state) for name, state in _states(opened.metadata).items()}
    if options.json:
        yield _json({**facts, "header": header, "states": states})
        return
    facts["created_at"] = _time(facts["created_at"])
    facts["total_bytes"] = bytes_text(facts["total_bytes"])
    rows = [[name, value] for name, value in facts.items() if value not in ("", {}, [])]
    rows += [[name, value] for name, value in header.items() if name not in facts]
    yield Table(opened.uri, ("", ""), rows)
    rows = []
    for name, state in states.items():
        state |= {"bytes": bytes_text(state["bytes"]), "types": " ".join(state["types"])}
        rows.append([name, *state.values()])
    yield Table("states", ("state", *(f.name for f in fields(_State))), rows)


def inspect(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the tensors."""
    opened = open_state(_checkpoint(options.path))
    metadata = opened.metadata
    tensors, num_bytes = metadata.tensors, metadata.shards.nbytes
    rows = [n for n, fqn in enumerate(tensors.fqns) if fnmatch.fnmatchcase(fqn, options.name)]
    described: list[list[Any]] = []
    for row in rows[:_MAX_ROWS]:
        spec = tensors.spec(row)
        mine = metadata.shards_of(row)
        size = bytes_text(int(num_bytes[mine].sum()))
        shape = " x ".join(map(str, spec.shape)) or "scalar"
        state = f"{spec.role}.{spec.kind}"
        described.append([state, spec.fqn, spec.dtype, shape, size, len(mine)])
    columns = ("state", "tensor", "type", "shape", "bytes", "parts")
    more = f" (the first {_MAX_ROWS} of {len(rows)})" if len(rows) > _MAX_ROWS else ""
    yield Table(f"{opened.uri}{more}", columns, described)


def rm(options: argparse.Namespace, _: Progress) -> Lines:
    """Remove one checkpoint; without `--yes` only announce it and exit with an error."""
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
    """Check a checkpoint; yield every fault, and exit with 1 if there is any."""
    place, report = _checkpoint(options.path), partial(progress, "verify")
    result = checkpoint.verify(place, options.level, progress=report)
    if not result.is_intact:
        rows = [[f.file, f.block if f.block >= 0 else "", f.text] for f in result.faults]
        yield Table(f"{result.uri}: {len(rows)} faults", ("object", "block", "what"), rows)
        raise Ended(EXIT_FAILED)
    how = {"meta": "metadata read", "size": "all there", "crc": "every block intact"}
    yield (
        f"{result.uri}: {how[result.level]}, {result.num_objects} objects, {result.num_tensors} "
        f"tensors, {bytes_text(result.num_bytes)} read"
    )


def diff(options: argparse.Namespace, progress: Progress) -> Lines:
    """Compare two checkpoints bit by bit; yield how they differ, and exit with 1 if they do."""
    places = _checkpoint(options.a), _checkpoint(options.b)
    result = checkpoint.diff(*places, progress=partial(progress, "diff"))
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
        progress=partial(progress, f"reshard to {layout}"),
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
    """Convert a folder of torch.distributed.checkpoint into a checkpoint; yield its pin."""
    from planish.checkpoint.convert.dcp_bridge import import_dcp as convert

    progress("import", 0, 0)
    chosen = {name: getattr(options, name) for name in ("step", "role", "overwrite")}
    with _dcp_errors():
        made = convert(options.folder, normal_pin(options.out), **chosen)
    yield made.pin


def export_dcp(options: argparse.Namespace, progress: Progress) -> Lines:
    """Convert a checkpoint into a folder that torch.distributed.checkpoint reads."""
    from planish.checkpoint.convert.dcp_bridge import export_dcp as convert
    from planish.checkpoint.convert.export_hf import policy_role

    progress("export", 0, 0)
    opened = open_state(_checkpoint(options.path))
    role = policy_role(opened.roles, options.role)
    with _dcp_errors():
        convert(opened.pin, options.folder, role=role)
    yield f"written {options.folder}"


@contextlib.contextmanager
def _dcp_errors() -> Iterator[None]:
    """Turn `FileExistsError` and `TypeError`, which a user can correct, into `ConfigError`."""
    try:
        yield
    except (FileExistsError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _checkpoint(text: str) -> str:
    """Return the checkpoint's URI or pin for a user's argument, which may pin a train state."""
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
        "pin": entry.pin,
        "step": commit.step,
        "attempt": commit.attempt,
        "created_at": commit.created_at,
        "total_bytes": commit.total_bytes,
        "num_objects": commit.n_objects,
        "roles": list(commit.roles),
        "run_id": commit.run_id,
        "tags": dict(commit.tags),
    }


@dataclass
class _State:
    """Counts of one role and kind."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    parts: int = 0
    files: int = 0
    types: list[str] = field(default_factory=list)


def _states(metadata: Metadata) -> dict[str, _State]:
    """Return counts by role and kind, small objects included."""
    tensors, shards, files = metadata.tensors, metadata.shards, metadata.files
    names = [f"{role}.{kind}" for role, kind in zip(tensors.roles, tensors.kinds, strict=True)]
    elements = volumes(tensors.shapes)
    states: dict[str, _State] = {}
    for name in sorted(set(names)):
        rows = [row for row, own in enumerate(names) if own == name]
        mine = np.isin(shards.tensor, rows)
        states[name] = _State(
            len(rows),
            int(elements[rows].sum()),
            int(shards.nbytes[mine].sum()),
            int(mine.sum()),
            len(set(shards.file[mine].tolist())),
            sorted({tensors.dtypes[row] for row in rows}),
        )
    for key, size in zip(files.keys, files.sizes, strict=True):
        if not key.endswith(".safetensors"):
            name = key.split("/")[1] if key.count("/") > 1 else key
            state = states.setdefault(name, _State())
            state.bytes += size
            state.files += 1
    return states


def _verdicts(verdicts: list[CatalogVerdict], noun: str, *, dry_run: bool) -> Table | str:
    if not verdicts:
        return f"no {noun} there"
    gone = "would delete" if dry_run else "deleted"
    words = {"keep": "kept", "delete": gone}
    rows = [[words[verdict.action], verdict.key, verdict.reason] for verdict in verdicts]
    count = sum(verdict.action == "delete" for verdict in verdicts)
    title = f"{gone} {count}, {'would keep' if dry_run else 'kept'} {len(verdicts) - count}"
    return Table(title, ("", noun, "why"), rows)
