"""Exchange of an attention rank's hidden states with the experts, for each micro-batch.

Each micro-batch has at most one layer in transit. While it waits, it gives up its turn, so that
other micro-batches compute.

Source: MegaScale-Infer, arXiv 2504.02263, sections 3 and 4.1.
"""

from __future__ import annotations

import bisect
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from planish.base.child import Message
from planish.base.errors import EngineError, PeerLost, PlanishError, ProtocolError
from planish.base.telemetry import REPLY_SECONDS
from planish.engines.disagg.m2n.frames import Frame, FrameHeader, FrameKind, Transport
from planish.engines.disagg.packing import combine, route_and_pack
from planish.engines.disagg.placement import ExpertLayout, ReplicaChooser
from planish.engines.disagg.settings import RankSettings
from planish.engines.weights import WeightSource, fetch_weights

Inbox = queue.SimpleQueue[Message | Frame | PlanishError]
"""Queue of a rank: messages of the coordinator, frames of peers, losses of peers."""


@dataclass
class _Waiting:
    """One layer of a micro-batch that waits for replies."""

    layer: int
    frames: dict[int, Frame] = field(default_factory=dict)
    sent_at: float = 0.0
    """Monotonic seconds at which the last rows were sent."""


@dataclass
class Traffic:
    """Counters of frames to and from the experts."""

    num_frames: Counter[str] = field(default_factory=Counter)
    """Number of frames by kind, `dispatch` or `reply`."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of frames by kind, with headers."""
    reply_seconds: float = 0.0
    """Sum over layers of the seconds from the last sent rows to the last reply."""
    reply_counts: list[int] = field(default_factory=lambda: [0] * (len(REPLY_SECONDS) + 1))
    """Number of layers whose time falls into each bucket of `telemetry.REPLY_SECONDS`."""

    def add(self, header: FrameHeader) -> None:
        """Count a frame."""
        kind = header.kind.name.lower()
        self.num_frames[kind] += 1
        self.num_bytes[kind] += header.num_bytes


class TurnTaking(Protocol):
    """Turns of micro-batches; one micro-batch computes at a time."""

    current: int

    def pause(self) -> None:
        """Return after the replies for the calling micro-batch are complete."""


class ExpertExchange:
    """Sends the rows of a layer to every expert rank, and combines the replies."""

    transport: Transport

    def __init__(self, settings: RankSettings, inbox: Inbox, turns: TurnTaking) -> None:
        self._settings, self._inbox, self._turns = settings, inbox, turns
        self.use(ExpertLayout.parse(settings.layout), settings.version)
        self._iteration = 0
        self._is_prefill = False
        self.seconds = {"dispatch": 0.0, "combine": 0.0, "wait": 0.0}
        """Seconds spent so far; `wait` is time in which no micro-batch could compute."""
        self.traffic = Traffic()
        self._waiting: dict[int, _Waiting] = {}
        self._free_s = 0.0

    def use(self, layout: ExpertLayout, version: int) -> None:
        """Set the layout and the version of the weights, between iterations."""
        self.layout, self.version = layout, version
        device = torch.device(self._settings.device)
        self._chooser = ReplicaChooser(layout.layers, self._settings.rank, device)

    def begin(self, iteration: int, *, is_prefill: bool) -> None:
        """Start an iteration; from now on a frame of another iteration is a fault."""
        self._iteration, self._is_prefill = iteration, is_prefill
        self._waiting.clear()
        self._free_s = time.monotonic()

    def compute(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each row, [n, H] like `hidden`.

        `layer` counts sparse layers from 0; `index` [n, k] int64 has the experts of each row, and
        `weights` [n, k] their weights.
        """
        size = self._settings.max_tokens
        if len(hidden) > size:
            parts = (torch.split(part, size) for part in (hidden, index, weights))
            return torch.cat([self.compute(layer, *piece) for piece in zip(*parts, strict=True)])
        micro_batch = self._turns.current
        begin = time.monotonic()
        ranks = self._settings.expert_ranks
        header = FrameHeader(
            FrameKind.DISPATCH,
            source=self._settings.rank,
            target=ranks[0],
            weight_version=self.version,
            iteration=self._iteration,
            layer=layer,
            micro_batch=micro_batch,
            num_rows=0,
            row_bytes=hidden.shape[1] * hidden.element_size(),
            dtype=hidden.dtype,
            num_local_experts=self._chooser.num_local,
            placement_version=self.layout.version,
            is_prefill=self._is_prefill,
        )
        packed = route_and_pack(
            hidden,
            index,
            self._chooser.slots(layer, index),
            num_nodes=len(ranks),
            num_local=self._chooser.num_local,
            room=self.transport.room(header, index.numel()),
        )
        waiting = self._waiting[micro_batch] = _Waiting(layer)
        left = self._settings.stage_s[0] - (time.monotonic() - self._free_s)
        if left > 0 and (not self._is_prefill or self._settings.vllm is not None):
            time.sleep(left)
            begin += left
        for rank, local, rows in zip(ranks, packed.counts, packed.rows, strict=True):
            one = header._replace(target=rank, num_rows=len(rows))
            self.transport.send(one, local, rows)
            self.traffic.add(one)
        self._free_s = waiting.sent_at = time.monotonic()
        self.seconds["dispatch"] += self._free_s - begin
        self._turns.pause()
        begin = self._free_s = time.monotonic()
        del self._waiting[micro_batch]
        frames = (waiting.frames[rank] for rank in ranks)
        replies = [frame.rows.to(hidden.device, non_blocking=True) for frame in frames]
        result = combine(replies, weights, packed)
        self.seconds["combine"] += time.monotonic() - begin
        return result

    def wait(self, must: bool) -> list[int]:
        """Handle arrived frames; return the micro-batches whose replies are complete, in order.

        With `must` it waits until there is one.

        Raises:
            PeerLost: expert ranks are lost or late.
            EngineError: the coordinator stopped the iteration.
            ProtocolError: a frame is unexpected.
        """
        complete: list[int] = []
        begin = time.monotonic()
        while True:
            left = begin + self._settings.timeout_s - time.monotonic()
            try:
                item = self._inbox.get(timeout=max(left, 0.0) if must and not complete else 0.0)
            except queue.Empty:
                if must and not complete:
                    raise self._late() from None
                self.seconds["wait"] += time.monotonic() - begin if must else 0.0
                return complete
            if isinstance(item, PlanishError):
                raise item
            if not isinstance(item, Frame):
                raise EngineError(f"the coordinator stopped the iteration: {item.get('reason')}")
            if self.deliver(item):
                complete.append(item.header.micro_batch)

    def _late(self) -> PeerLost:
        late = {
            rank: "did not answer in time"
            for waiting in self._waiting.values()
            for rank in self._settings.expert_ranks
            if rank not in waiting.frames
        }
        return PeerLost(
            f"expert ranks must answer within {self._settings.timeout_s:g} s, got nothing from "
            f"{sorted(late)}",
            per_rank=late,
        )

    def deliver(self, frame: Frame) -> bool:
        """Give a reply to its micro-batch; return whether all replies of the micro-batch are
        there.
        """
        header = frame.header
        waiting = self._waiting.get(header.micro_batch)
        seen = (header.weight_version, header.iteration, header.layer)
        if (
            waiting is None
            or seen != (self.version, self._iteration, waiting.layer)
            or header.source in waiting.frames
            or header.source not in self._settings.expert_ranks
        ):
            raise ProtocolError(
                f"a reply must be one that its micro-batch waits for, once, in iteration "
                f"{self._iteration} of weights {self.version}, got {header}"
            )
        waiting.frames[header.source] = frame
        self.traffic.add(header)
        if len(waiting.frames) < len(self._settings.expert_ranks):
            return False
        spent = time.monotonic() - waiting.sent_at
        self.traffic.reply_seconds += spent
        self.traffic.reply_counts[bisect.bisect_left(REPLY_SECONDS, spent)] += 1
        return True


class Rank:
    """Interface of every rank to its process.

    Each message of the coordinator names a method. The method returns the answer, or None for a
    message that needs no answer.
    """

    has_work = False
    """True if `serve` has work; attention ranks do all their work in answers."""
    transport: Transport
    """Transport of hidden states; set after the rank has read its weights."""
    _next: tuple[int, ExpertLayout, Any]
    """Version, placement and weights for the next `commit`."""

    def close(self) -> None:
        """Free resources that would outlive this rank in its process."""

    def load(self, message: Mapping[str, Any]) -> Message:
        """Read new weights or another placement; the present weights and placement stay until
        `commit`.
        """
        layout = ExpertLayout.parse(message["layout"])
        weights = self._read(fetch_weights(message["weights"]), layout)
        self._next = int(message["version"]), layout, weights
        return {}

    def _read(self, weights: WeightSource, layout: ExpertLayout) -> Any:
        """Return the part of some weights that this rank needs."""
        return weights

    def stop(self, _: Mapping[str, Any]) -> None:
        """Do nothing; an expert rank has no iteration to stop."""


class ExchangingRank(Rank):
    """Interface of an attention rank to its process, for both engines."""

    def __init__(self, settings: RankSettings, inbox: Inbox, turns: TurnTaking) -> None:
        self._exchange = ExpertExchange(settings, inbox, turns)
        self._busy_s = 0.0

    @property
    def transport(self) -> Transport:
        """Transport of hidden states."""
        return self._exchange.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._exchange.transport = transport

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the time in the block as busy, without the time in which all micro-batches wait."""
        begin, waited = time.monotonic(), self._exchange.seconds["wait"]
        yield
        self._busy_s += time.monotonic() - begin - (self._exchange.seconds["wait"] - waited)

    def _stats(self, **facts: Any) -> Message:
        """Return counters since the start."""
        return {
            "role": "attention",
            "busy_s": self._busy_s,
            "wait_s": self._exchange.seconds["wait"],
            "seconds": self._exchange.seconds,
            "m2n": vars(self._exchange.traffic),
            **facts,
        }
