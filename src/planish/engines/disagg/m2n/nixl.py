"""Frames by one-sided writes over NIXL, from the memory of one rank into that of another.

Each rank has an agent. The coordinator passes the agents' metadata and memory addresses to the
other ranks, so no rank listens on a port. All memory is registered once: for each peer and
micro-batch, one buffer for outgoing frames and one for arriving frames. A write ends with a
notification that has the header and the counts. UCX chooses shared memory, CUDA IPC, RDMA or TCP.
Rows have only the checksums of these; a checksum of ours would copy the rows to the host. A lost
peer shows only as a failed write; the coordinator detects the other cases.

A thread polls for notifications and sleeps when there are none. NIXL's own threads would spin, and
on a machine with more ranks than cores this takes milliseconds from ranks that compute.

Source: MegaScale-Infer, arXiv 2504.02263, section 5 (M2N); NIXL 1.5.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.base.errors import EngineError, PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import (
    HEADER_BYTES,
    Deliver,
    Frame,
    FrameHeader,
    FrameLimits,
    InTurn,
)

_REST_S = (2e-5, 2e-4)
"""First and longest pause in seconds of the thread while nothing arrives; the pause doubles each
time."""
_CLOSE_S = 2.0
_ALIGN = 256
"""Alignment of each buffer in bytes."""


def _new_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return an agent with the UCX back end, and the exception types of NIXL."""
    try:
        from nixl_cu13 import _bindings
        from nixl_cu13._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise EngineError(
            f"the transport 'nixl' needs the package nixl-cu13, got {error}; `pip install "
            "planish[rollout]` installs it, or take `engine.transport = 'sockets'`"
        ) from None
    # NIXL would print a line for each agent to standard output.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise EngineError(
            f"the transport 'nixl' needs the back end UCX, got {sorted(agent.backends)} of the "
            f"plug-ins {agent.get_plugin_list()}; install nixl-cu13 anew, or take "
            "`engine.transport = 'sockets'`"
        )
    faults = (fault for name, fault in vars(_bindings).items() if name.endswith("Error"))
    return agent, tuple(faults)


class NixlTransport:
    """Transport of the frames of one rank over NIXL."""

    def __init__(
        self,
        rank: int,
        limits: FrameLimits,
        secret: str,
        *,
        own: range,
        peers: range,
        device: torch.device,
    ) -> None:
        """Register memory of `device` for all peers; no rank writes before `connect`.

        `limits` and `secret` are equal on all ranks of the instance. `own` are the ranks with this
        rank's role (attention or expert), `peers` the ranks with the other.
        """
        self.rank, self._secret, self._own, self._peers = rank, secret, own, peers
        self._is_vram = device.type == "cuda"
        self._kind = "VRAM" if self._is_vram else "DRAM"
        self._agent, self._faults = _new_agent(self._name(rank))
        place_bytes = -(-limits.num_rows * limits.row_bytes // _ALIGN) * _ALIGN
        shape = (limits.num_micro_batches, len(peers), place_bytes)
        self._leaving, self._arriving = (
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)
        )
        places = [self._place(part, 0, part.nbytes) for part in (self._leaving, self._arriving)]
        self._registered = self._agent.register_memory(
            [(*place, "") for place in places], mem_type=self._kind
        )
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.address = [metadata, *places[1][::2]]
        self._memory: dict[int, tuple[int, int]] = {}
        """Map from connected peer to address and device of its buffer for the first rank of our
        role."""
        self._in_turn = InTurn()
        self._lost: dict[int, str] = {}
        self._under_way: list[tuple[int, Any]] = []
        """Rank and handle of the writes that have not ended."""
        self._lock = threading.Lock()
        """Lock around calls of NIXL, which must not overlap."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"m2n-{rank}", daemon=True)

    def _name(self, rank: int) -> str:
        return f"{self._secret}-{rank}"

    @staticmethod
    def _place(memory: Tensor, offset: int, num_bytes: int) -> tuple[int, int, int]:
        """Return address, length and device of a part of some memory."""
        return memory.data_ptr() + offset, num_bytes, max(memory.get_device(), 0)

    def connect(self, addresses: Mapping[int, Any], deliver: Deliver) -> None:
        """Store the addresses of the peers, as in `Transport`."""
        self._deliver = deliver
        for peer, (metadata, start, device) in addresses.items():
            with self._telling(peer):
                self._agent.add_remote_agent(base64.b64decode(metadata))
            self._memory[peer] = start, device
        self._thread.start()

    @contextlib.contextmanager
    def _telling(self, peer: int) -> Iterator[None]:
        """Convert an exception of NIXL in the block into `PeerLost`."""
        try:
            yield
        except self._faults as error:
            self._lost.setdefault(peer, f"NIXL can not reach it ({error})")
            raise self._loss(peer) from None

    def _loss(self, peer: int) -> PeerLost:
        reason = self._lost[peer]
        return PeerLost(f"rank {peer} is lost: {reason}", per_rank={peer: reason})

    def room(self, first: FrameHeader, num_rows: int) -> Tensor:
        """Return registered memory, as in `Transport`."""
        places = self._leaving[first.micro_batch].view(-1)
        start = (first.target - self._peers.start) * self._leaving.shape[2]
        rows = places[start : start + num_rows * first.row_bytes].view(first.dtype)
        return rows.view(num_rows, first.row_bytes // first.dtype.itemsize)

    def send(self, header: FrameHeader, counts: Tensor | None, rows: Tensor) -> None:
        """Write a frame into the memory of its target, as in `Transport`."""
        peer = header.target
        if peer in self._lost or self._is_closing:
            self._lost.setdefault(peer, "this transport is closed")
            raise self._loss(peer)
        told = header.encode() + (b"" if counts is None else counts.numpy().tobytes())
        if self._is_vram:
            # A write does not wait for pending computations of the device.
            torch.cuda.current_stream(rows.device).synchronize()
        with self._lock, self._telling(peer):
            if not header.num_rows:
                self._agent.send_notif(self._name(peer), told)
                return
            start, device = self._memory[peer]
            place = header.micro_batch * len(self._own) + self.rank - self._own.start
            start += place * self._arriving.shape[2]
            write = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([self._place(rows, 0, rows.nbytes)], self._kind),
                self._agent.get_xfer_descs([(start, rows.nbytes, device)], self._kind),
                self._name(peer),
                told,
            )
            self._agent.transfer(write)
            self._under_way.append((peer, write))

    def close(self) -> None:
        """End the thread and release all memory, as in `Transport`."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S + 1.0)
        # Releasing a write to a dead rank may fail as well.
        for _, write in self._under_way:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(write)
        for peer in self._memory:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._name(peer))
        self._agent.deregister_memory(self._registered)

    # What the thread does.

    def _run(self) -> None:
        rest, close_by = _REST_S[0], float("inf")
        try:
            while not self._is_closing or (self._under_way and time.monotonic() < close_by):
                if self._is_closing:
                    close_by = min(close_by, time.monotonic() + _CLOSE_S)
                has_come = self._turn()
                rest = _REST_S[0] if has_come or self._under_way else min(2 * rest, _REST_S[1])
                if not has_come:
                    time.sleep(rest)
        except Exception as error:
            self._deliver(EngineError(f"receiving on rank {self.rank} ended: {error!r}"))
            raise

    def _turn(self) -> bool:
        """Deliver arrived frames and remove ended writes; return whether a frame arrived."""
        with self._lock:
            come = self._agent.get_new_notifs()
            left, lost = [], []
            for peer, write in self._under_way:
                was_lost = peer in self._lost
                try:
                    with self._telling(peer):
                        state = self._agent.check_xfer_state(write)
                        if state == "PROC":
                            left.append((peer, write))
                        else:
                            self._agent.release_xfer_handle(write)
                except PeerLost as loss:
                    lost += [loss] * (not was_lost)
            self._under_way = left
        for fault in lost:
            self._deliver(fault)
        for name, messages in come.items():
            for told in messages:
                try:
                    self._deliver(self._arrived(name, told))
                except ProtocolError as error:
                    self._deliver(error)
        return bool(come)

    def _arrived(self, name: str, told: bytes) -> Frame:
        """Return the frame of a notification.

        Raises:
            ProtocolError: the frame is not allowed.
        """
        header = FrameHeader.decode(told[:HEADER_BYTES])
        num_bytes = header.num_rows * header.row_bytes
        if len(told) + num_bytes != header.num_bytes or num_bytes > self._arriving.shape[2]:
            raise ProtocolError(
                "a frame must have the counts and rows that it names, in the "
                f"{self._arriving.shape[2]} bytes of its place, got {header}, {len(told)} bytes; "
                "start all ranks anew"
            )
        counts = np.frombuffer(told, np.int32, header.num_local_experts, HEADER_BYTES).copy()
        self._in_turn.check(header, is_own_name=name == self._name(header.source))
        place = self._arriving[header.micro_batch, header.source - self._peers.start]
        rows = place[:num_bytes].view(header.dtype)
        width = header.row_bytes // header.dtype.itemsize
        return Frame(header, torch.from_numpy(counts), rows.view(header.num_rows, width))
