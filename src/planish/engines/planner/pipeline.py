"""Seconds of one decode iteration: by the law of the ping-pong pipeline, and event by event.

A micro-batch walks attention, link, expert, link and on to the attention of the next layer. Stages
and links are serial and serve in the order of readiness. A link is the outgoing one of a rank and
carries its frames for all receivers, so the frames of a micro-batch are complete for all experts at
one time, and its replies for all attention ranks.

Source: MegaScale-Infer, arXiv 2504.02263, section on ping-pong pipeline parallelism, equations 4
and 5; the law below holds beyond their conditions and equals them where these are fulfilled.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("attention", "dispatch", "experts", "combine")
"""Resources: attention ranks, their links, expert ranks, their links."""


def iteration_seconds(
    attention: float, experts: float, network: float, micro_batches: int, layers: int
) -> float:
    """Return the seconds from the first attention to the last reply of one iteration.

    The three times are of one micro-batch and layer, that of the network of one direction; there is
    at least one micro-batch, and one layer with experts.

    Example:
        >>> iteration_seconds(400, 300, 100, 3, 56), iteration_seconds(100, 120, 200, 3, 10)
        (67700, 6600)
    """
    round_trip = attention + experts + 2 * network
    slowest = max(attention, experts, network)
    return (
        max(micro_batches * slowest, round_trip) * (layers - 1)
        + round_trip
        + (micro_batches - 1) * slowest
    )


class Served(NamedTuple):
    """What one resource did for one micro-batch and layer, in seconds since the start."""

    kind: str
    """One of `KINDS`."""
    rank: int
    micro_batch: int
    layer: int
    """That after the last is what an attention rank does at the end."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that one micro-batch takes on each rank, in one layer."""

    attention: Sequence[float]
    """On each attention rank; 0: it has no row of this micro-batch and takes no part."""
    dispatch: Sequence[float]
    """On the link of each attention rank."""
    experts: Sequence[Sequence[float]]
    """[layers] on each expert rank."""
    combine: Sequence[float]
    """On the link of each expert rank."""
    outside: Sequence[float]
    """On each attention rank after the last layer."""


@dataclass
class Pipeline:
    """The resources of a deployment, and what they have done so far."""

    attention_ranks: int
    """Dead ones count too: they are given no work."""
    expert_ranks: int
    spans: list[Served] | None = None
    """What was done, if a list is given."""
    busy: dict[str, list[float]] = field(init=False)
    """Kind of resource -> seconds of work of each rank."""
    free: dict[str, list[float]] = field(init=False)
    """Kind of resource -> when each of its ranks has done what it was given."""

    def __post_init__(self) -> None:
        ranks = dict(zip(KINDS, [self.attention_ranks] * 2 + [self.expert_ranks] * 2, strict=True))
        self.busy = {kind: [0.0] * count for kind, count in ranks.items()}

    def iteration(
        self, start: float, work: Sequence[Work], layers: int, factors: Sequence[float] = (1.0,)
    ) -> float:
        """Run one iteration from `start` seconds on; return when its last micro-batch has ended.

        `work` is of each micro-batch that takes part; `factors` on the times of ranks and links are
        taken in turn, and more than one is jitter.
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
        """Let a resource do one thing, after all that it was given before, and return the end.

        `where` is rank, micro-batch and layer; calls come in the order of `ready`.
        """
        free, rank = self.free[kind], where[0]
        began = free[rank]
        began = ready if ready > began else began
        free[rank] = done = began + took
        self.busy[kind][rank] += took
        if self.spans is not None:
            self.spans.append(Served(kind, *where, began, done))
        return done
