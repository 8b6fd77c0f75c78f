"""Load of a train state in place, saved by any ranks: plan together, read once, exchange.

Rank 0 reads the metadata and plans for all. Every rank reads its share, copies the pieces that it
wants into its tensors and sends on those that others want. Either all ranks return or all raise.
Errors in names, shapes, types or layouts are found before any tensor changes.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (six steps of a load) and 4.1.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from planish.base.errors import PeerLost
from planish.checkpoint.commit.commit import Commit
from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import Collected
from planish.checkpoint.loading.agree import JobPlan, LoadOptions, fit_items, plan_job
from planish.checkpoint.loading.exchange import Exchange, Stopped
from planish.checkpoint.loading.extras import Extras, read_extras
from planish.checkpoint.loading.fill import Targets, tensor_targets
from planish.checkpoint.loading.read_pool import ReadPool
from planish.checkpoint.loading.reader import (
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


def open_on_all(place: str, control: Control, *, storage: Store | None = None) -> Opened:
    """Open a checkpoint, by its URI or pin, on every rank; only rank 0 asks the store."""
    call = control.call(f"open {place}", OPEN_SECONDS)
    data = b""

    def read() -> bytes:
        nonlocal data
        _, _, commit, data = read_metadata(place, storage)
        return commit.encode()

    commit = Commit.decode(call.decide(read, "commit"))
    data = call.broadcast(data, "global.bin")
    store, path = locate(split_place(place)[0], storage)
    return Opened(store, path, commit, metafile.decode(data, max_bytes=MAX_DECODED_BYTES))


def load_state(
    opened: Opened,
    collected: Mapping[str, Collected],
    control: Control,
    options: LoadOptions | None = None,
) -> tuple[CheckpointInfo, Extras]:
    """Fill the tensors of a state in place; a collective of all ranks of `control`.

    `opened` is the result of `open_on_all` on this rank; `collected` is by role. Only the tensors
    of its items change.

    Returns:
        Loaded checkpoint, whose facts are `JobPlan.facts` and the bytes that all ranks together
        have read (`bytes_from_store`) and received (`bytes_over_network`); small values.

    Raises:
        PeerLost: a rank has ended; for other errors see `api.load`. An error of the transfer has
            `target_modified`: True if a tensor of this rank may have changed.
    """
    options = options or LoadOptions()
    call = control.call(f"load {opened.pin}", options.timeout_s)
    recorder = Recorder(call.rank, "load", socket.gethostname())
    retries = Counter(opened.storage.retries)
    try:
        return _load(opened, collected, call, options, recorder)
    except BaseException as error:
        monitor.publish_failure("load", error)
        raise
    finally:
        recorder.retried("read", retries, opened.storage.retries)
        monitor.publish(recorder.timeline(), call.rank)


def _load(
    opened: Opened,
    collected: Mapping[str, Collected],
    call: Control,
    options: LoadOptions,
    recorder: Recorder,
) -> tuple[CheckpointInfo, Extras]:
    """Run all steps of a load; either all ranks complete a step, or none does."""
    # 1. Compare what this rank wants with the checkpoint; rank 0 plans the reads of all ranks.
    with recorder.stage("plan"):
        roles = sorted(collected)
        items = [item for role in roles for item in collected[role].items]
        fit = fit_items(opened.metadata, items, options)
        targets = tensor_targets(fit.items)
        job = plan_job(opened, fit, roles, call, options)
    # 2. Read the small values.
    reader = BlockReader(opened, verify=options.verify == "crc")
    with recorder.stage("meta"):
        extras = read_extras(reader, collected, call, options)
    # 3. Read, verify, copy and exchange; from here on tensors change.
    pool = ReadPool(reader, job.reads, targets, recorder)
    error: Exception | None = None
    lost: PeerLost | None = None
    received = 0
    try:
        received = _move(pool, job, targets, call, recorder)
    except Stopped:
        pass
    except PeerLost as found:
        lost = found
    except Exception as caught:
        error = caught
    # 4. Raise the error of any rank on all ranks.
    with recorder.stage("barrier"):
        try:
            # Errors of ranks go first: a rank that only lost its peers must not hide the cause.
            call.settle(error, "loaded")
            call.settle(lost, "reached")
        except Exception as raised:
            raised.target_modified = pool.modified  # type: ignore[attr-defined]
            raise
    # 5. Add up what all ranks have moved, and keep their timings.
    num_bytes = reader.counters.num_bytes
    from_store, over_network = _sums(call, num_bytes, received)
    _end(opened, call, recorder.timeline(), is_kept=options.store_timings)
    commit = opened.commit
    info = CheckpointInfo(
        opened.uri,
        commit.step,
        commit.attempt,
        commit.meta_sha256,
        num_bytes,
        layout=str(opened.metadata.header.get("layout", "")),
        roles=commit.roles,
        timings=recorder.timeline(),
        facts={
            **job.facts,
            "bytes_from_store": from_store,
            "bytes_over_network": over_network,
        },
    )
    return info, extras


def _move(pool: ReadPool, job: JobPlan, targets: Targets, call: Control, recorder: Recorder) -> int:
    """Read, copy and exchange; return the bytes that came from other ranks."""
    near = call.hosts.count(call.hosts[call.rank])
    threads = min(4, max(2, -(-(os.cpu_count() or 1) // near)))
    if len(job.members) == 1:
        pool.start(threads)
        pool.finish()
        return 0
    exchange = Exchange(call, job.members, job.tag, job.reads)
    pool.start(threads, exchange.rounds)
    try:
        exchange.run(pool, targets, recorder, call)
    except BaseException as error:
        pool.stop(error)
        raise
    finally:
        pool.finish()
    return exchange.num_bytes


def _sums(call: Control, *counts: int) -> list[int]:
    """Return numbers summed over all ranks."""
    parts = call.gather(np.array(counts, np.int64).tobytes(), "bytes")
    total = np.sum([np.frombuffer(part, np.int64) for part in parts or ()], axis=0)
    return [*map(int, np.frombuffer(call.broadcast(total.tobytes(), "bytes.sum"), np.int64))]


def _end(opened: Opened, call: Control, timeline: Timeline, *, is_kept: bool) -> None:
    """Wait for all ranks, and store their timings beside the checkpoint if `is_kept`."""
    # The message store is on rank 0, which stays until every rank has read the last message.
    timelines = call.gather(timeline.encode() if is_kept else b"", "end")
    if timelines is None or not is_kept:
        return
    whole = Timeline([record for line in timelines for record in Timeline.decode(line).records])
    monitor.warn_of_stragglers(whole)
    monitor.store_timings(opened.storage, opened.path, opened.commit.attempt, whole, "load")
