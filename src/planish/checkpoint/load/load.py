"""Load a train state in place, whatever ranks saved it: plan together, read once, exchange.

Rank 0 reads the metadata and plans for all; every rank reads its share, copies what it wants into
its tensors and hands on what others want. Either all ranks return or all raise; what is wrong with
names, shapes, types or layouts is found before any tensor is touched.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (six steps of a load) and 4.1.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planish.base.errors import PeerLost
from planish.checkpoint.commit.commit import Commit
from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import Collected
from planish.checkpoint.load.agree import JobPlan, Loaded, LoadOptions, fit_items, plan_job
from planish.checkpoint.load.exchange import BUCKET_BYTES, Exchange, Stopped
from planish.checkpoint.load.extras import Extras, read_extras
from planish.checkpoint.load.fill import Targets, tensor_targets
from planish.checkpoint.load.read_pool import RING, ReadPool, Rounds
from planish.checkpoint.load.reader import (
    MAX_DECODED_BYTES,
    BlockReader,
    Opened,
    locate,
    read_metadata,
    split_place,
)
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import CheckpointInfo, Recorder, Timeline
from planish.store import Store

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control

OPEN_SECONDS = 300.0
"""Limit on reading the metadata."""


def open_on_all(
    place: str,
    control: Control,
    *,
    storage: Store | None = None,
    timeout_s: float = OPEN_SECONDS,
) -> Opened:
    """Open a checkpoint on every rank; only rank 0 asks the store.

    Args:
        place: URI of the checkpoint, or its pin; equal on all ranks.
        control: of the ranks that load.
        storage: in place of the one that the URI names.
        timeout_s: limit in seconds.

    Raises:
        CheckpointNotFound: nothing is committed there.
        CheckpointIncomplete: an object that COMMIT names is missing or short.
        CheckpointCorrupt: damaged, or not the state that the pin names.
    """
    call = control.call(f"open {place}", timeout_s)
    error: Exception | None = None
    head, data = b"", b""
    if call.rank == 0:
        try:
            _, _, commit, data = read_metadata(place, storage)
            head = commit.encode()
        except Exception as caught:
            error = caught
    call.settle(error, "meta")
    commit = Commit.decode(call.broadcast(head, "commit"))
    data = call.broadcast(data, "global.bin")
    store, path = locate(split_place(place)[0], storage)
    return Opened(store, path, commit, metafile.decode(data, max_bytes=MAX_DECODED_BYTES))


def load_state(
    opened: Opened,
    collected: Mapping[str, Collected],
    control: Control,
    options: LoadOptions | None = None,
) -> Loaded:
    """Fill the tensors of a state in place; a collective of all ranks of `control`.

    Args:
        opened: what `open_on_all` returned on this rank.
        collected: role to what its adapter found; tensors are filled, nothing else is changed.
        control: of the ranks that load.
        options: see `LoadOptions`.

    Returns:
        What the checkpoint brings besides tensors; `missing` and `unexpected` are equal on all
        ranks.

    Raises:
        ValueError: options that mean nothing.
        LayoutMismatch: names, shapes, types or layouts do not fit; every offender is listed, and
            no tensor has been touched.
        CheckpointIncomplete: an object is missing or short, or was replaced meanwhile.
        CheckpointCorrupt: a block differs from its checksum.
        PeerLost: a rank went away. Whatever is raised, its `target_modified` says whether a
            tensor of this rank may have changed.
    """
    options = options or LoadOptions()
    options.check()
    call = control.call(f"load {opened.pin}", options.timeout_s)
    work = _Load(opened, collected, call, options)
    retries = Counter(opened.storage.counters.retries)
    try:
        loaded = work.run()
    except BaseException as error:
        monitor.publish_failure("load", error)
        raise
    finally:
        work.recorder.retried("read", retries, opened.storage.counters.retries)
        monitor.publish(work.recorder.timeline(), call.rank)
    return loaded


@dataclass
class _Load:
    """One load on one rank."""

    opened: Opened
    collected: Mapping[str, Collected]
    call: Control
    options: LoadOptions

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.call.rank, "load", socket.gethostname())
        self.reader = BlockReader(self.opened, verify=self.options.verify == "crc")
        self.modified = False
        self.network_bytes = 0

    def run(self) -> Loaded:
        """Go through all stages; every rank leaves each of them, or none does."""
        error: Exception | None = None
        lost: PeerLost | None = None
        roles = sorted(self.collected)
        with self.recorder.stage("plan"):
            items = [item for role in roles for item in self.collected[role].items]
            fit = fit_items(self.opened.metadata, items, self.options)
            targets = tensor_targets(fit.items)
            job = plan_job(self.opened, fit, roles, self.call, self.options)
        with self.recorder.stage("meta"):
            extras = read_extras(self.reader, self.collected, self.call, self.options)
        try:
            self._move(targets, job)
        except Stopped:
            pass
        except PeerLost as found:
            lost = found
        except Exception as caught:
            error = caught
        with self.recorder.stage("barrier"):
            # A rank that only lost its peers must not hide why they went.
            self._settle(error, "loaded")
            self._settle(lost, "reached")
        return self._loaded(job, extras)

    def _move(self, targets: Targets, job: JobPlan) -> None:
        """Read, copy and exchange."""
        # How many threads read, and how many buckets a ring has, within the limit.
        units = job.max_host_bytes // BUCKET_BYTES
        near = self.call.hosts.count(self.call.hosts[self.call.rank])
        cores = -(-(os.cpu_count() or 1) // near)
        threads = min(4, max(2, cores), max(1, units // 4))
        buckets = max(2, min(RING, units - threads - 2))
        exchange: Exchange | None = None
        rounds, ring = Rounds({}, 0, 0), np.zeros(0, np.uint8)
        if len(job.members) > 1:
            exchange = Exchange(self.call, job.members, job.reads, buckets, job.tag)
            rounds, ring = exchange.rounds, exchange.segments.own
        pool = ReadPool(self.reader, job.reads, targets, self.recorder, rounds)
        pool.start(ring, threads)
        try:
            if exchange is not None:
                exchange.run(pool, targets, self.recorder, self.call)
                self.network_bytes = exchange.network_bytes
        except BaseException as error:
            pool.stop(error)
            raise
        finally:
            try:
                pool.finish()
            finally:
                self.modified = pool.modified

    def _settle(self, error: Exception | None, tag: str) -> None:
        """Leave with the error of any rank; say whether this rank's tensors have changed."""
        try:
            self.call.settle(error, tag)
        except Exception as raised:
            raised.target_modified = self.modified  # type: ignore[attr-defined]
            raise

    def _loaded(self, job: JobPlan, extras: Extras) -> Loaded:
        counters = self.reader.counters
        moved = np.array([counters.num_bytes, self.network_bytes], np.int64)
        brought = self.call.gather(moved.tobytes(), "bytes")
        if brought is not None:
            moved = np.sum([np.frombuffer(counts, np.int64) for counts in brought], axis=0)
        moved = np.frombuffer(self.call.broadcast(moved.tobytes(), "bytes.sum"), np.int64)
        mine = self.recorder.timeline().encode() if self.options.store_timings else b""
        # Rank 0, which keeps the messages, stays until everybody has read the last one.
        timelines = self.call.gather(mine, "end")
        if timelines is not None and self.options.store_timings:
            records = [record for line in timelines for record in Timeline.decode(line).records]
            monitor.warn_of_stragglers(Timeline(records))
            monitor.store_timings(
                self.opened.storage,
                self.opened.path,
                self.opened.commit.attempt,
                Timeline(records),
                "load",
            )
        commit, header = self.opened.commit, self.opened.metadata.header
        info = CheckpointInfo(
            self.opened.uri,
            commit.step,
            commit.attempt,
            commit.meta_sha256,
            counters.num_bytes,
            layout=str(header.get("layout", "")),
            roles=commit.roles,
            timings=self.recorder.timeline(),
        )
        return Loaded(
            info,
            header,
            shared=extras.shared,
            own=extras.own,
            loader=extras.loader,
            missing=job.missing,
            unexpected=job.unexpected,
            bytes_from_store=int(moved[0]),
            bytes_over_network=int(moved[1]),
            unique_bytes_needed=job.unique_bytes,
            sharing=job.sharing,
            replication=job.replication,
        )
