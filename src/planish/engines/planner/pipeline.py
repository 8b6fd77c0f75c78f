"""Event simulation of one iteration: ranks and their links, each serving in the order of readiness.

A link is the outgoing one of a rank and carries its frames for all receivers. So the frames of a
micro-batch are complete for all experts at one time, and its replies for all attention ranks.

Source: MegaScale-Infer, arXiv 2504.02263, ping-pong pipeline; with equal times it gives the law of
`law.iteration_seconds`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("attention", "dispatch", "experts", "combine")
"""Resources: attention ranks, their links, expert ranks, their links."""


class Served(NamedTuple):
    """What one resource did for one micro-batch and layer."""

    kind: str
    """One of `KINDS`."""
    rank: int
    """Number of the rank."""
    micro_batch: int
    """Number of the micro-batch."""
    layer: int
    """Number of the layer; that after the last is what an attention rank does at the end."""
    start: float
    """Seconds since the start of the simulation."""
    end: float
    """Likewise."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that one micro-batch takes on each rank, in one layer."""

    attention: Sequence[float]
    """Of each attention rank; 0: it has no row of this micro-batch and takes no part."""
    dispatch: Sequence[float]
    """Of the link of each attention rank."""
    experts: Sequence[Sequence[float]]
    """[layers] of each expert rank."""
    combine: Sequence[float]
    """Of the link of each expert rank."""
    outside: Sequence[float]
    """Of each attention rank after the last layer."""


@dataclass
class Pipeline:
    """The resources of a deployment, and what they have done so far."""

    attention_ranks: int
    """Attention ranks, dead ones too: they are given no work."""
    expert_ranks: int
    """Likewise of experts."""
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Kind of resource -> seconds of work of each rank."""
    spans: list[Served] | None = None
    """What was done, if a list is given."""
    free: dict[str, list[float]] = field(default_factory=dict)
    """Kind of resource -> when each of its ranks has done what it was given."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            ranks = self.attention_ranks if kind in KINDS[:2] else self.expert_ranks
            self.busy[kind] = [0.0] * ranks

    def iteration(
        self, start: float, work: Sequence[Work], layers: int, factors: Sequence[float] = (1.0,)
    ) -> float:
        """Run one iteration and return when its last micro-batch has ended.

        Args:
            start: seconds; no resource is busy at that time.
            work: of each micro-batch that takes part.
            layers: of the model.
            factors: on the times of ranks and links, taken in turn; more than one is jitter.
        """
        self.free = {kind: [start] * len(ranks) for kind, ranks in self.busy.items()}
        # Ready time, layer, micro-batch, and 0 for attention or 1 for experts.
        events = [(start, 0, number, 0) for number in range(len(work))]
        end, draws = start, itertools.cycle(factors)
        while events:
            ready, layer, number, side = heapq.heappop(events)
            one = work[number]
            links: Sequence[float] = ()
            if side == 0 and layer == layers:
                seconds, kind, link = one.outside, "attention", ""
            elif side == 0:
                seconds, kind, link, links = one.attention, "attention", "dispatch", one.dispatch
            else:
                seconds, kind, link, links = one.experts[layer], "experts", "combine", one.combine
            last = ready
            for rank, took in enumerate(seconds):
                # A rank without rows of this micro-batch takes no part.
                if took:
                    where = (rank, number, layer)
                    done = self.serve(kind, where, ready, took * next(draws))
                    if link:
                        done = self.serve(link, where, done, links[rank] * next(draws))
                    last = done if done > last else last
            if side == 0 and layer < layers:
                heapq.heappush(events, (last, layer, number, 1))
            elif layer < layers:
                heapq.heappush(events, (last, layer + 1, number, 0))
            else:
                end = last if last > end else end
        return end

    def serve(self, kind: str, where: tuple[int, int, int], ready: float, took: float) -> float:
        """Let one resource do one thing, after all that it was given before, and return the end.

        Args:
            kind: of the resource.
            where: rank, micro-batch and layer.
            ready: when it can begin at the earliest; calls come in the order of this time.
            took: seconds that it takes.
        """
        free, rank = self.free[kind], where[0]
        began = free[rank]
        began = ready if ready > began else began
        free[rank] = done = began + took
        self.busy[kind][rank] += took
        if self.spans is not None:
            self.spans.append(Served(kind, *where, began, done))
        return done
