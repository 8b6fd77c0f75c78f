"""How fast the store and the network between machines are, and what a load makes of it.

One rank of each machine measures, of eight machines at most, all at the same time: a few small and
a few large reads of a file that the load is going to read, then messages round a ring over gloo.
Rank 0 keeps what they found for later loads of the run, decides, and tells everybody. Small loads
are not worth measuring for. What is read here is not counted as read by the load.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (redundant reads are eliminated); when it pays
is ours.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from planish.base.errors import CheckpointError, StoreError
from planish.checkpoint.load.reader import Opened
from planish.checkpoint.plan.coalesce import Costs

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control

Sharing = Literal["all", "machine", "none"]
"""Between whom bytes are exchanged: all ranks, those of one machine, or nobody."""

MEASURE_BYTES = 256 << 20
"""Loads of fewer bytes, of all ranks together, do without measured rates."""
MACHINES = 8
"""So many take part in measuring, at most."""
SMALL_BYTES = 4 << 10
"""A read of this size shows what a request costs."""
STREAMS = 4
"""Large reads at a time, as many as a load has threads."""
PIECE_BYTES = 2 << 20
"""Of one large read, and of one message."""
MESSAGES = 4
"""Sent round the ring, one after the other; one more before the clock starts."""
REQUEST_SECONDS = (1e-4, 2e-2)
"""A request is taken to cost no less and no more, whatever was measured."""
STREAM_RATES = (1e7, 4e9)
"""Bytes per second of one read, likewise."""


@dataclass(frozen=True)
class Rates:
    """What was measured, medians over machines.

    Example:
        >>> Rates(2e-3, 4e8, 1e9).costs()
        Costs(request_s=0.002, bytes_per_s=100000000.0)
    """

    request_s: float
    """Seconds of a small read."""
    store_bytes_per_s: float
    """Of the reads of one machine, `STREAMS` at a time, while the others read too."""
    fabric_bytes_per_s: float = 0.0
    """Received by one machine from another while it sends as much; 0: not measured."""

    def costs(self) -> Costs:
        """Return what requests cost one after the other on one of the streams, within bounds."""
        return Costs(
            float(np.clip(self.request_s, *REQUEST_SECONDS)),
            float(np.clip(self.store_bytes_per_s / STREAMS, *STREAM_RATES)),
        )


def is_in_memory(opened: Opened) -> bool:
    """Return whether the store is memory of this process: nothing is faster."""
    return opened.uri.startswith("mem://")


def choose_sharing(
    redundancy: str,
    replication: float,
    hosts: Sequence[int],
    *,
    in_memory: bool,
    rates: Rates | None,
) -> Sharing:
    """Return between whom the bytes that several ranks need are exchanged.

    Ranks of one machine share memory, which is faster than any store but memory itself. Between
    machines bytes are exchanged where the network is faster than the store, or nobody knows.

    Args:
        redundancy: `auto` or `off`.
        replication: how many ranks need a block on average.
        hosts: number of the machine of every rank.
        in_memory: whether the store is memory of the process.
        rates: what was measured; None: nothing.

    Example:
        >>> slow = Rates(2e-3, store_bytes_per_s=2e9, fabric_bytes_per_s=1e9)
        >>> choose_sharing("auto", 4.0, [0, 0, 1], in_memory=False, rates=slow)
        'machine'
    """
    if redundancy == "off" or in_memory or replication <= 1.0:
        return "none"
    machines = len(set(hosts))
    if machines == 1 or rates is None or rates.fabric_bytes_per_s <= 0:
        return "all"
    if rates.fabric_bytes_per_s > rates.store_bytes_per_s:
        return "all"
    return "machine" if machines < len(hosts) else "none"


@dataclass(frozen=True)
class Order:
    """What is to be measured."""

    file: int
    """Row of the file to read."""
    members: tuple[int, ...]
    """Ranks that measure, one of a machine; rank 0 is one of them."""
    tag: str
    """Random name of the ring; empty to leave the network out."""

    def encode(self) -> bytes:
        """Return what `decode` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Order | None:
        """Return the order of rank 0, None for none."""
        if not data:
            return None
        found = json.loads(data)
        return cls(found["file"], tuple(found["members"]), found["tag"])


def order_for(
    opened: Opened, call: Control, files: Sequence[int], num_bytes: int, *, network: bool
) -> Order | None:
    """Return what rank 0 wants to have measured before a load; None where there is no need.

    Args:
        opened: the checkpoint.
        call: of the ranks that load.
        files: rows of those that the load reads.
        num_bytes: that the ranks want, added up.
        network: whether bytes may be exchanged between machines.
    """
    kept = kept_rates(opened, call)
    firsts = [call.hosts.index(host) for host in dict.fromkeys(call.hosts)]
    is_wide = network and len(firsts) > 1
    if num_bytes < MEASURE_BYTES or not len(files) or is_in_memory(opened):
        return None
    if kept is not None and (kept.fabric_bytes_per_s > 0 or not is_wide):
        return None
    largest = max(files, key=lambda row: opened.metadata.files.sizes[row])
    return Order(int(largest), tuple(firsts[:MACHINES]), secrets.token_hex(8) if is_wide else "")


def kept_rates(opened: Opened, call: Control) -> Rates | None:
    """Return what was measured for an earlier load from the same folder; rank 0 knows."""
    found = call.kept.get(_name(opened))
    return found if isinstance(found, Rates) else None


def keep_rates(opened: Opened, call: Control, measured: Sequence[bytes]) -> None:
    """Keep what the ranks have measured, for this load and later ones; on rank 0."""
    found = [json.loads(data) for data in measured if data]
    columns = [
        [one[name] for one in found if one[name] > 0]
        for name in ("request_s", "store_bytes_per_s", "fabric_bytes_per_s")
    ]
    if columns[0] and columns[1]:
        request_s, store, fabric = (statistics.median(c) if c else 0.0 for c in columns)
        call.kept[_name(opened)] = Rates(request_s, store, fabric)


def _name(opened: Opened) -> str:
    return f"rates of {opened.uri.rpartition('/')[0]}"


def measure(opened: Opened, call: Control, order: Order) -> bytes:
    """Measure this rank's part; what it found is for `keep_rates`, empty if it takes no part.

    Raises:
        PeerLost: another rank does not answer.
    """
    if call.rank not in order.members:
        return b""
    request_s, store = 0.0, 0.0
    # The load itself will say what is wrong with the store.
    with contextlib.suppress(StoreError, CheckpointError):
        request_s, store = _measure_store(opened, order.file, order.members.index(call.rank))
    fabric = _measure_network(call, order) if order.tag else 0.0
    return json.dumps(asdict(Rates(request_s, store, fabric))).encode()


def _measure_store(opened: Opened, file: int, place: int) -> tuple[float, float]:
    """Return the seconds of a small read, and the bytes per second of large ones together."""
    size, key = opened.metadata.files.sizes[file], opened.key(file)

    def get(start: int, target: memoryview) -> None:
        opened.storage.get_into(key, start, target)

    small = memoryview(bytearray(min(SMALL_BYTES, size)))
    request_s = min(_seconds(lambda: get(0, small)) for _ in range(3))
    piece = min(PIECE_BYTES, size)
    starts = [(place * STREAMS + k) * piece % (size - piece + 1) for k in range(STREAMS)]
    targets = [memoryview(bytearray(piece)) for _ in starts]
    with ThreadPoolExecutor(STREAMS) as pool:
        seconds = _seconds(lambda: list(pool.map(get, starts, targets)))
    return request_s, STREAMS * piece / seconds


def _measure_network(call: Control, order: Order) -> float:
    """Return the bytes per second that come from the machine before, while as many leave."""
    from planish.checkpoint.load.exchange import Mesh

    mesh = Mesh(call, order.members, order.tag)
    own, size = mesh.place[call.rank], len(order.members)
    after, before = order.members[(own + 1) % size], order.members[(own - 1) % size]
    sent, received = np.zeros(PIECE_BYTES, np.uint8), np.zeros(PIECE_BYTES, np.uint8)

    def swap(*tags: int) -> None:
        for tag in tags:
            mesh.swap(after, sent, before, received, tag)

    try:
        swap(0)
        mesh.highest(0)
        seconds = _seconds(lambda: swap(*range(1, 1 + MESSAGES)))
        mesh.highest(0)
    finally:
        mesh.close()
    return MESSAGES * PIECE_BYTES / seconds


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began)
