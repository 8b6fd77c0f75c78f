"""A committed checkpoint written anew for another layout, by one process and without torch.

Bytes stream from the old objects to the new ones through a few parts of 16 MiB; no tensor is ever
whole in memory. Small values and the positions of data loaders are copied as they are: a load
derives from them what its own ranks need. The result is committed like every other save.

Source: ByteCheckpoint, arXiv 2407.20143, section 1 (scripts that reshard offline, made a plan).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from planish.base.errors import CheckpointExists, CheckpointNotFound, ConfigError, PlanishError
from planish.checkpoint.commit.commit import Commit, discard, publish, standing
from planish.checkpoint.commit.journal import attempt_folder, join, journaled, new_attempt
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.format import metafile
from planish.checkpoint.format.geometry import Box, flat_boxes, shift
from planish.checkpoint.format.integrity import DEFAULT
from planish.checkpoint.format.items import Columns, LocalItem
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.tables import ITEM_BYTES
from planish.checkpoint.load.reader import Opened, open_state
from planish.checkpoint.load.slices import CachedReader, Slice, SliceReader
from planish.checkpoint.plan.files import GlobalPlan
from planish.checkpoint.plan.save import plan_save
from planish.checkpoint.save.upload import (
    FileResult,
    FileUpload,
    ReusedMemory,
    is_large,
    upload_files,
)
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.timings import Recorder, Timeline
from planish.store import Store, open_store

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Parts on their way at the same time."""

Parts = Literal["all", "model"]


@dataclass(frozen=True)
class Rewritten:
    """What a rewrite has made visible."""

    commit: Commit
    """The new checkpoint."""
    uri: str
    """Its place."""
    bytes_read: int = 0
    """From the store, all requests together; 0 if it stood there already."""
    already_done: bool = False
    """An earlier call had committed the same."""
    timeline: Timeline = field(default_factory=Timeline)
    """What each stage cost."""

    @property
    def pin(self) -> str:
        """Place and identity as one text."""
        return f"{self.uri}#sha256={self.commit.meta_sha256}"


def rewrite(
    source: str,
    target: str,
    layout: Layout,
    *,
    parts: Parts = "all",
    roles: Sequence[str] = (),
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rewritten:
    """Write the state at `source` anew at `target`.

    Calling it again with the same arguments finds the committed result and writes nothing.

    Args:
        source: URI or pin of a committed checkpoint.
        target: URI of the new one.
        layout: not `merged`, which is an export.
        parts: `model` leaves out optimizers, small values and loader positions.
        roles: which to keep; empty for all.
        overwrite: replace another checkpoint at `target`.
        progress: told the bytes made so far and those of all objects, from any thread.

    Raises:
        CheckpointNotFound: nothing is committed at `source`, or it lacks a role.
        CheckpointExists: another state is committed at `target`.
        CheckpointCorrupt: a checksum of the source differs; nothing has become visible.
        ConfigError: `layout` is `merged`, or `parts` is unknown.
    """
    if layout.is_merged or parts not in ("all", "model"):
        raise ConfigError(
            f"a rewrite must have degrees as its layout and `all` or `model` as its parts, got "
            f"{str(layout)!r} and {parts!r}; export the policy for a merged one"
        )
    opened = open_state(source)
    recorder = Recorder(0, "save")
    storage, path = open_store(target)
    with recorder.stage("plan"):
        work = _Work(opened, layout, parts, _roles(opened, roles))
    done = _standing(storage, path, work, overwrite=overwrite)
    if done is not None:
        return Rewritten(done, storage.uri(path), already_done=True)
    replaces = standing(storage, path) if overwrite else ""
    attempt = new_attempt()
    work.progress = progress
    try:
        commit = _write(work, storage, path, attempt, recorder, replaces)
    except BaseException:
        _clear(storage, path, attempt)
        raise
    timeline = recorder.timeline()
    monitor.store_timings(storage, path, attempt, timeline)
    return Rewritten(
        *(commit, storage.uri(path), work.reader.reader.counters.num_bytes),
        timeline=timeline,
    )


def _roles(opened: Opened, wanted: Sequence[str]) -> tuple[str, ...]:
    known = sorted({*opened.metadata.tensors.roles, *opened.metadata.objects})
    missing = sorted(set(wanted) - set(known))
    if missing:
        raise CheckpointNotFound(
            f"`{opened.uri}` must hold the roles {missing}, got {known}; name some of these"
        )
    return tuple(name for name in known if not wanted or name in wanted)


def _clear(storage: Store, path: str, attempt: str) -> None:
    """Remove a failed attempt; what cannot be removed now is left to the collection."""
    try:
        discard(storage, path, attempt)
    except PlanishError as error:
        logger.warning("attempt not cleared uri=%s error=%s", storage.uri(path), error)


class _Work:
    """The plan of a rewrite, and the bytes of its files."""

    def __init__(self, opened: Opened, layout: Layout, parts: Parts, roles: tuple[str, ...]):
        self.opened, self.reader = opened, SliceReader(opened, num_threads=1)
        self.reader.reader = CachedReader(opened)
        tensors = opened.metadata.tensors
        specs = [
            tensors.spec(row)
            for row in range(len(tensors))
            if tensors.roles[row] in roles and (parts == "all" or tensors.kinds[row] == "model")
        ]
        columns = [
            Columns.from_items([LocalItem(spec, layout.boxes(spec, rank)) for spec in specs])
            for rank in range(layout.num_ranks)
        ]
        self.plan: GlobalPlan = plan_save(columns)
        self.header = self._header(layout, parts, roles)
        files = opened.metadata.files
        self.objects: dict[str, Any] = {}
        self.copied: list[int] = []
        if parts == "all":
            kept = {role: v for role, v in opened.metadata.objects.items() if role in roles}
            self.objects = kept
            named = set(_texts(kept))
            self.copied = [row for row in range(len(files)) if files.keys[row] in named]
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self._made, self._total = 0, sum(self.sizes)
        self._lock = threading.Lock()
        self._heads = [
            file.header for rank in range(layout.num_ranks) for file in self.plan.rank(rank).files
        ]

    def _header(self, layout: Layout, parts: Parts, roles: tuple[str, ...]) -> dict[str, Any]:
        header = dict(self.opened.metadata.header)
        header.update(
            layout=str(layout),
            roles=list(roles),
            parents={"state": self.opened.commit.meta_sha256},
            parts=parts,
        )
        return header

    @property
    def keys(self) -> list[str]:
        """Every object, relative to the attempt: planned ones, then copied ones."""
        return [*self.plan.keys, *(self.opened.metadata.files.keys[row] for row in self.copied)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of every object."""
        sizes = self.opened.metadata.files.sizes
        return [*self.plan.sizes.tolist(), *(sizes[row] for row in self.copied)]

    def fill(self, file: int, start: int, stop: int, memory: memoryview) -> None:
        """Write bytes `[start, stop)` of one of the files into memory."""
        self._fill(file, start, stop, memory)
        with self._lock:
            self._made += stop - start
            self.progress(self._made, self._total)

    def _fill(self, file: int, start: int, stop: int, memory: memoryview) -> None:
        if file >= len(self._heads):
            row = self.copied[file - len(self._heads)]
            memory[:] = self.reader.reader.read(row, start, stop)
            return
        head = self._heads[file]
        if start < len(head):
            count = min(stop, len(head)) - start
            memory[:count] = head[start : start + count]
        low, high = max(start, len(head)), stop
        if low < high:
            self._fill_boxes(file, low - len(head), high - len(head), memory[low - start :])

    def _fill_boxes(self, file: int, start: int, stop: int, memory: memoryview) -> None:
        """Do so for the bytes behind the header: those of the boxes that reach into the range."""
        boxes = self.plan.boxes
        first, last = self.plan.file_boxes[file : file + 2].tolist()
        begin = first + int(np.searchsorted(boxes.stop[first:last], start, side="right"))
        end = first + int(np.searchsorted(boxes.start[first:last], stop, side="left"))
        slices, places = [], []
        for row in range(begin, end):
            spec = self.plan.tensors.spec(int(boxes.tensor[row]))
            dims, width, base = len(spec.shape), ITEM_BYTES[spec.dtype], int(boxes.start[row])
            low, high = max(start, base), min(stop, int(boxes.stop[row]))
            elements = (low - base) // width, -(-(high - base) // width)
            box = Box(
                tuple(boxes.offsets[row, :dims].tolist()), tuple(boxes.lengths[row, :dims].tolist())
            )
            cut = flat_boxes(box.lengths, *elements)
            slices.append(Slice(spec, tuple(shift(part, box.offsets) for part in cut)))
            places.append((low, high, base + elements[0] * width))
        for array, (low, high, origin) in zip(self.reader.read_many(slices), places, strict=True):
            data = array.view(np.uint8).data[low - origin : high - origin]
            memory[low - start : high - start] = data


def _texts(value: Any) -> list[str]:
    """Return every text inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts(one)]


def _standing(storage: Store, path: str, work: _Work, *, overwrite: bool) -> Commit | None:
    """Return what is committed at the target if it is what this rewrite would write."""
    try:
        found = open_state(storage.uri(path), storage)
    except CheckpointNotFound:
        return None
    if found.metadata.header == work.header:
        return found.commit
    if overwrite:
        return None
    raise CheckpointExists(
        f"`{storage.uri(path)}` must be free or hold the same state under the same layout, got "
        f"step {found.commit.step}, layout {str(found.metadata.header.get('layout'))[:40]!r}; "
        "choose another place, or overwrite"
    )


def _write(
    work: _Work,
    storage: Store,
    path: str,
    attempt: str,
    recorder: Recorder,
    replaces: str,
) -> Commit:
    folder = attempt_folder(path, attempt)
    files = [
        FileUpload(join(folder, key), size, key.split("/")[1])
        for key, size in zip(work.keys, work.sizes, strict=True)
    ]
    # Ranks in turns, state by state: what one needs of a tensor lies where its neighbour's does.
    order = sorted(range(len(files)), key=lambda row: (files[row].state, row))
    large = [file.key for file in files if is_large(file.size)]
    with journaled(storage, path, attempt, large) as journal:
        results = upload_files(
            *(storage, [files[row] for row in order]),
            ReusedMemory(lambda file, *rest: work.fill(order[file], *rest)),
            journal=journal,
            recorder=recorder,
            stop=threading.Event(),
            num_threads=NUM_THREADS,
            in_turns=True,
        )
        with recorder.stage("meta"):
            by_row = dict(zip(order, results, strict=True))
            meta = metafile.encode(_metadata(work, [by_row[row] for row in sorted(by_row)]))
        source = work.opened.commit
        with recorder.stage("commit"):
            return publish(
                *(storage, path, attempt, meta),
                dict(zip(work.keys, work.sizes, strict=True)),
                step=source.step,
                roles=work.header["roles"],
                run_id=source.run_id,
                tags=source.tags,
                overwrite=bool(replaces),
                replaces=replaces,
                journal=journal,
            )


def _metadata(work: _Work, results: Sequence[FileResult]) -> Metadata:
    metadata = work.plan.metadata(work.header, algorithm=DEFAULT)
    for row, result in enumerate(results):
        crcs = np.array(result.crcs, np.uint32)
        if row < len(work.plan.keys):
            metadata.files.crcs[row] = crcs
        else:
            key, size = work.keys[row], work.sizes[row]
            metadata.files.add(key, size, algorithm=result.algorithm, crcs=crcs)
    metadata.objects = work.objects
    return metadata
