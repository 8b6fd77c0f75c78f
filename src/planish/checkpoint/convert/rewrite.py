"""Rewrite of a committed checkpoint for another layout, by one process and without torch.

Bytes stream from the old objects to the new ones through a few parts of 16 MiB. Small values and
the positions of data loaders are copied unchanged: a load adapts them to its own ranks. The result
is committed like every other save.

Source: ByteCheckpoint, arXiv 2407.20143, section 1 (scripts that reshard offline; here a plan).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from planish.base.errors import CheckpointExists, CheckpointNotFound, PlanishError
from planish.checkpoint.commit.commit import Commit, discard, publish, standing
from planish.checkpoint.commit.journal import attempt_folder, join, journaled, new_attempt
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.format import metafile
from planish.checkpoint.format.geometry import box_of, flat_boxes, shift
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem
from planish.checkpoint.format.metafile import DEFAULT_CHECKSUM
from planish.checkpoint.format.strict_json import Fields
from planish.checkpoint.loading.reader import BlockReader, Opened, Progress, open_state
from planish.checkpoint.loading.slices import Slice, SliceReader
from planish.checkpoint.plan.files import RankPlan
from planish.checkpoint.plan.save import plan_save
from planish.checkpoint.saving.upload import FileUpload, is_large, upload_files
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import Recorder, Timeline
from planish.store import Store, open_store

logger = logging.getLogger(__name__)

NUM_THREADS = 4
WINDOW_BYTES = 16 << 20
NUM_WINDOWS = 16
"""Number of windows of the source in the cache."""

Parts = Literal["all", "model"]


@dataclass(frozen=True)
class Rewritten:
    """Result of a rewrite."""

    commit: Commit
    uri: str
    bytes_read: int = 0
    """Bytes read from the store; 0 if the result was there already."""
    already_done: bool = False
    """True if an earlier call had committed the same."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def pin(self) -> str:
        """Pin: `<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.commit.meta_sha256}"


def rewrite(
    source: str,
    target: str,
    layout: Layout,
    *,
    parts: Parts = "all",
    roles: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Rewritten:
    """Write the state at `source` (URI or pin) at `target`, under another layout.

    A second call with the same arguments finds the committed result and writes nothing.

    Args:
        layout: layout of the result; `merged` is an export and not for this function.
        parts: `model` leaves out optimizers, small values and loader positions.
        roles: roles to keep; empty for all.
        overwrite: replace another checkpoint at `target`.
        progress: called from any thread with the bytes made so far and those of all objects.

    Raises:
        CheckpointNotFound: nothing is committed at `source`, or it lacks a role.
        CheckpointExists: another state is committed at `target`.
        CheckpointCorrupt: a checksum of the source differs; nothing has become visible.
    """
    opened = open_state(source)
    known = sorted({*opened.metadata.tensors.roles, *opened.metadata.objects})
    missing = sorted(set(roles) - set(known))
    if missing:
        raise CheckpointNotFound(
            f"`{opened.uri}` must hold the roles {missing}, got {known}; name some of these"
        )
    recorder = Recorder(0, "save")
    storage, path = open_store(target)
    with recorder.stage("plan"):
        kept = tuple(name for name in known if not roles or name in roles)
        work = _Work(opened, layout, parts, kept, progress)
    done = _standing(storage, path, work.header, overwrite=overwrite)
    if done is not None:
        return Rewritten(done, storage.uri(path), already_done=True)
    replaces = standing(storage, path) if overwrite else ""
    attempt = new_attempt()
    try:
        commit = _write(work, storage, path, attempt, recorder, replaces)
    except BaseException:
        try:
            discard(storage, path, attempt)
        except PlanishError as error:
            # A later `gc` clears the attempt.
            logger.warning("attempt not cleared uri=%s error=%s", storage.uri(path), error)
        raise
    timeline = recorder.timeline()
    monitor.store_timings(storage, path, attempt, timeline)
    bytes_read = work.reader.reader.counters.num_bytes
    return Rewritten(commit, storage.uri(path), bytes_read, timeline=timeline)


class _WindowReader(BlockReader):
    """Caches windows of files, because several ranks of the new layout need parts of one window."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._windows: OrderedDict[tuple[int, int], Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def fetch(self, file: int, start: int, target: memoryview) -> None:
        """Fill `target` with verified bytes."""
        stop = start + len(target)
        for first in range(start // WINDOW_BYTES * WINDOW_BYTES, stop, WINDOW_BYTES):
            window = self._window(file, first)
            low, high = max(start, first), min(stop, first + len(window))
            target[low - start : high - start] = window[low - first : high - first]

    def check(self, file: int, start: int, target: memoryview) -> None:
        """Do nothing: `fetch` returns verified bytes."""

    def _window(self, file: int, first: int) -> memoryview:
        key = file, first
        with self._lock:
            is_new = key not in self._windows
            window = self._windows.setdefault(key, Future())
            self._windows.move_to_end(key)
            if len(self._windows) > NUM_WINDOWS:
                self._windows.popitem(last=False)
        if is_new:
            size = min(WINDOW_BYTES, self.opened.metadata.files.sizes[file] - first)
            data = memoryview(bytearray(size))
            try:
                super().fetch(file, first, data)
                super().check(file, first, data)
                window.set_result(data)
            except BaseException as error:
                window.set_exception(error)
                raise
        return window.result()


class _Work:
    """The plan of a rewrite, and the bytes of its files."""

    def __init__(
        self,
        opened: Opened,
        layout: Layout,
        parts: Parts,
        roles: tuple[str, ...],
        progress: Progress,
    ) -> None:
        self.opened, self.progress = opened, progress
        self.reader = SliceReader(opened, reader=_WindowReader(opened), num_threads=1)
        tensors, files = opened.metadata.tensors, opened.metadata.files
        specs = [
            tensors.spec(row)
            for row in range(len(tensors))
            if tensors.roles[row] in roles and (parts == "all" or tensors.kinds[row] == "model")
        ]
        columns = [
            Columns.from_items([LocalItem(spec, layout.boxes(spec, rank)) for spec in specs])
            for rank in range(layout.num_ranks)
        ]
        self.plan = plan_save(columns)
        self.header = {
            **opened.metadata.header,
            "layout": str(layout),
            "roles": list(roles),
            "parents": {"state": opened.commit.meta_sha256},
            "parts": parts,
        }
        self.objects: Fields = {}
        """Small objects by role, as the metadata lists them."""
        self.copied: list[int] = []
        """Rows, in the old file table, of files that are copied byte by byte."""
        if parts == "all":
            objects = opened.metadata.objects
            self.objects = {role: objects[role] for role in objects if role in roles}
            named = set(_texts(self.objects))
            self.copied = [row for row in range(len(files)) if files.keys[row] in named]
        self.keys = [*self.plan.keys, *(files.keys[row] for row in self.copied)]
        """Keys of all objects, relative to the attempt: planned ones, then copied ones."""
        self.sizes = [*self.plan.sizes.tolist(), *(files.sizes[row] for row in self.copied)]
        self._heads = [
            file.header
            for rank, own in enumerate(columns)
            for file in RankPlan.decode(self.plan.wire(rank), own).files
        ]
        self._made, self._total, self._lock = 0, sum(self.sizes), threading.Lock()

    def part(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes `[start, stop)` of one of the files."""
        memory = memoryview(bytearray(stop - start))
        if file >= len(self._heads):
            row = self.copied[file - len(self._heads)]
            memory[:] = self.reader.reader.read(row, start, stop)
        else:
            head = self._heads[file]
            count = max(0, min(stop, len(head)) - start)
            memory[:count] = head[start : start + count]
            if stop > len(head):
                first = max(start, len(head)) - len(head)
                self._fill_boxes(file, first, stop - len(head), memory[count:])
        with self._lock:
            self._made += stop - start
            self.progress(self._made, self._total)
        return memory

    def _fill_boxes(self, file: int, start: int, stop: int, memory: memoryview) -> None:
        """Fill `memory` with bytes `[start, stop)`, counted from the end of the header."""
        boxes = self.plan.boxes
        first, last = self.plan.file_boxes[file : file + 2].tolist()
        begin = first + int(np.searchsorted(boxes.stop[first:last], start, side="right"))
        end = first + int(np.searchsorted(boxes.start[first:last], stop, side="left"))
        slices, places = [], []
        for row in range(begin, end):
            spec = self.plan.tensors.spec(int(boxes.tensor[row]))
            dims, width, base = len(spec.shape), ITEM_BYTES[spec.dtype], int(boxes.start[row])
            low, high = max(start, base), min(stop, int(boxes.stop[row]))
            first_element, end_element = (low - base) // width, -(-(high - base) // width)
            box = box_of(boxes.offsets[row], boxes.lengths[row], dims)
            cut = flat_boxes(box.lengths, first_element, end_element)
            slices.append(Slice(spec, tuple(shift(part, box.offsets) for part in cut)))
            places.append((low, high, base + first_element * width))
        for array, (low, high, origin) in zip(self.reader.read_many(slices), places, strict=True):
            data = array.view(np.uint8).data[low - origin : high - origin]
            memory[low - start : high - start] = data


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in _texts(part)]


def _standing(storage: Store, path: str, header: Fields, *, overwrite: bool) -> Commit | None:
    """Return the commit at the target if it is the result of this rewrite; None if it is free."""
    try:
        earlier = open_state(storage.uri(path), storage)
    except CheckpointNotFound:
        return None
    if earlier.metadata.header == header:
        return earlier.commit
    if overwrite:
        return None
    raise CheckpointExists(
        f"`{storage.uri(path)}` must be free or hold the same state under the same layout, got "
        f"step {earlier.commit.step}, layout {str(earlier.metadata.header.get('layout'))[:40]!r}; "
        "choose another place, or overwrite"
    )


def _write(
    work: _Work, storage: Store, path: str, attempt: str, recorder: Recorder, replaces: str
) -> Commit:
    folder = attempt_folder(path, attempt)
    sizes = dict(zip(work.keys, work.sizes, strict=True))
    files = [FileUpload(join(folder, key), size, key.split("/")[1]) for key, size in sizes.items()]
    # Order by state, then by rank: ranks of one state need neighbouring parts of the same windows.
    order = sorted(range(len(files)), key=lambda row: (files[row].state, row))
    large = [file.key for file in files if is_large(file.size)]
    with journaled(storage, path, attempt, large) as journal:
        results = upload_files(
            storage,
            [files[row] for row in order],
            lambda file, *part: work.part(order[file], *part),
            journal=journal,
            recorder=recorder,
            stop=threading.Event(),
            num_threads=NUM_THREADS,
            in_turns=True,
        )
        with recorder.stage("meta"):
            metadata = work.plan.metadata(work.header, algorithm=DEFAULT_CHECKSUM)
            for row, result in sorted(zip(order, results, strict=True)):
                crcs = np.array(result.crcs, np.uint32)
                if row < len(work.plan.keys):
                    metadata.files.crcs[row] = crcs
                else:
                    key, algorithm = work.keys[row], result.algorithm
                    metadata.files.add(key, sizes[key], algorithm=algorithm, crcs=crcs)
            metadata.objects = work.objects
            meta = metafile.encode(metadata)
        source = work.opened.commit
        with recorder.stage("commit"):
            return publish(
                storage,
                path,
                attempt,
                meta,
                sizes,
                step=source.step,
                roles=work.header["roles"],
                run_id=source.run_id,
                tags=source.tags,
                replaces=replaces,
                journal=journal,
                is_newest=False,
            )
