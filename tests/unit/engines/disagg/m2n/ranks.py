"""Connected transports in the threads of one process, and frames to send over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.distributed import HashStore

from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits
from planish.engines.disagg.m2n.gloo import GlooTransport
from planish.engines.disagg.m2n.peers import PeerTransport, Timeouts
from planish.engines.disagg.m2n.sockets import SocketTransport
from tests.unit.engines.disagg.m2n.local import LocalNetwork, LocalTransport

LIMITS = FrameLimits(num_micro_batches=4, num_rows=32, row_bytes=32, num_local_experts=3)
PATIENT = Timeouts(connect_s=120, send_s=120, heartbeat_s=0.5, dead_after_s=120, close_s=1)
QUICK = replace(PATIENT, send_s=0.4)
"""For who is held back."""
KINDS = ("local", "sockets", "gloo")


def connect(transports: dict[int, PeerTransport], peers: Callable[[int], list[int]]) -> None:
    """Connect the transports of some ranks, each in a thread, with the peers of each rank."""
    addresses = {rank: getattr(t, "address", ("", 0)) for rank, t in transports.items()}
    with ThreadPoolExecutor(len(transports)) as pool:
        calls = [
            pool.submit(t.connect, {peer: addresses[peer] for peer in peers(rank)})
            for rank, t in transports.items()
        ]
        for call in calls:
            call.result(120)


def make(kind: str, num_ranks: int, limits=LIMITS, timeouts=PATIENT) -> dict[int, PeerTransport]:
    """Return one transport for each rank, not connected; `limits` may be a list by rank."""
    sizes = limits if isinstance(limits, list) else [limits] * num_ranks
    if kind == "sockets":
        return {
            rank: SocketTransport(rank, size, token="t", timeouts=timeouts)
            for rank, size in enumerate(sizes)
        }
    if kind == "gloo":
        store = HashStore()
        return {
            rank: GlooTransport(rank, num_ranks, size, store=store, timeouts=timeouts)
            for rank, size in enumerate(sizes)
        }
    network = LocalNetwork()
    return {rank: LocalTransport(rank, size, network, timeouts) for rank, size in enumerate(sizes)}


def header(num_rows: int, *, layer: int = 0, micro_batch: int = 0, **changes) -> FrameHeader:
    """Return a header from rank 0 to rank 1 of rows of 4 float32 for 3 experts."""
    fields = {
        "kind": FrameKind.DISPATCH,
        "source": 0,
        "target": 1,
        "weight_version": 7,
        "iteration": 40,
        "layer": layer,
        "micro_batch": micro_batch,
        "num_rows": num_rows,
        "row_bytes": 16,
        "dtype": torch.float32,
        "num_local_experts": 3,
    }
    return FrameHeader(**{**fields, **changes})


def counts_of(num_rows: int) -> torch.Tensor:
    """Return counts of 3 experts with that sum."""
    return torch.tensor([num_rows // 2, 0, num_rows - num_rows // 2], dtype=torch.int32)


def close_all(transports: dict[int, PeerTransport]) -> None:
    """Close them at the same time, as ranks do."""
    threads = [threading.Thread(target=transport.close) for transport in transports.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
