"""Measurement of frames between two processes of this machine, for `planish rollout profile`.

Source: MegaScale-Infer, arXiv 2504.02263, performance model: the network's share by profiling.
"""

from __future__ import annotations

import multiprocessing
import queue
import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from planish.base.errors import EngineError
from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits, Transport
from planish.engines.disagg.m2n.nixl import NixlTransport
from planish.engines.disagg.m2n.sockets import SocketTransport

ROW_BYTES = 4096
_LONGEST_S = 60.0
"""Time limit in seconds of a start, and of one frame."""


def _open(name: str, rank: int, largest: int, secret: str, device: torch.device) -> Transport:
    limits = FrameLimits(1, largest // ROW_BYTES, ROW_BYTES, 1)
    if name == "nixl":
        own, peers = (range(number, number + 1) for number in (rank, 1 - rank))
        return NixlTransport(rank, limits, secret, own=own, peers=peers, device=device)
    return SocketTransport(rank, limits, secret, device=device)


def _answer(pipe: Connection, name: str, largest: int, secret: str, device: torch.device) -> None:
    """Run rank 1: answer each frame by a frame without rows, after its rows are on the device."""
    transport = _open(name, 1, largest, secret, device)
    arrived: Any = queue.SimpleQueue()
    pipe.send(transport.address)
    transport.connect({0: pipe.recv()}, arrived.put)
    while True:
        frame = arrived.get()
        frame.rows.to(device)
        none = frame.header.reply()._replace(num_rows=0)
        transport.send(none, None, transport.room(none, 0))


def frame_seconds(
    name: str, device: torch.device, sizes: Sequence[int], repeats: int
) -> list[float]:
    """Return the median seconds of one direction for frames of each of `sizes` bytes.

    Sizes are multiples of 4 KiB. Both processes compute on `device`. The answer has no rows; its
    time is taken as half of the round trip of frames without rows, and subtracted.

    Raises:
        EngineError: the other process ends, or the transport is not available.
    """
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    secret, largest = secrets.token_hex(16), max(sizes)
    transport = _open(name, 0, largest, secret, device)
    given = far, name, largest, secret, device
    process = context.Process(target=_answer, args=given, daemon=True)
    process.start()
    far.close()
    arrived: Any = queue.SimpleQueue()
    try:
        address = pipe.recv()
        pipe.send(transport.address)
        transport.connect({1: address}, arrived.put)
        header = FrameHeader(FrameKind.DISPATCH, 0, 1, 0, 0, 0, 0, 0, ROW_BYTES, torch.uint8, 1)
        seconds = []
        for size in (0, *sizes):
            one = header._replace(num_rows=size // ROW_BYTES)
            rows = transport.room(one, one.num_rows).fill_(1)
            counts = torch.tensor([one.num_rows], dtype=torch.int32)
            times = []
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                transport.send(one, counts, rows)
                arrived.get(timeout=_LONGEST_S)
                times.append(time.perf_counter() - begin)
            seconds.append(median(times[1:]))
        # Noise must not make a frame with rows faster than a frame without.
        return [max(whole - seconds[0] / 2, whole / 2) for whole in seconds[1:]]
    except (EOFError, queue.Empty) as error:
        raise EngineError(
            f"frames over {name!r} must be answered by another process, got {error!r}"
        ) from None
    finally:
        transport.close()
        process.kill()
        process.join()
