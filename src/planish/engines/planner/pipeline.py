"""Duration of a decode iteration, by the formula of the ping-pong pipeline or event by event.

A micro-batch passes attention, link, experts, link, and then the attention of the next layer.
Stages and links process one micro-batch at a time, in the order of readiness. Each rank has one
outgoing link for its frames to all receivers. The frames of a micro-batch are therefore complete
for all experts at one time, and its replies for all attention ranks.

Source: MegaScale-Infer, arXiv 2504.02263, section on ping-pong pipeline parallelism, equations 4
and 5. The formula here also holds outside their conditions, and equals them inside.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

KINDS = ("attention", "dispatch", "experts", "combine")
"""Kinds of resources: attention ranks, their links, expert ranks, their links."""


def iteration_seconds(
    attention: float, experts: float, network: float, micro_batches: int, layers: int
) -> float:
    """Return the seconds from the first attention to the last reply of one iteration.

    The times are for one micro-batch and layer; `network` is for one direction. There is at least
    one micro-batch and one layer with experts.

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


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch on each rank, in one layer."""

    attention: Sequence[float]
    """Seconds on each attention rank; 0: the rank has no row of this micro-batch."""
    dispatch: Sequence[float]
    """Seconds on the link of each attention rank."""
    experts: Sequence[Sequence[float]]
    """[layers] of the seconds on each expert rank."""
    combine: Sequence[float]
    """Seconds on the link of each expert rank."""
    outside: Sequence[float]
    """Seconds on each attention rank after the last layer."""


@dataclass
class Pipeline:
    """The resources of a deployment, and their work so far."""

    attention_ranks: int
    """Number of attention ranks; dead ranks count too, but get no work."""
    expert_ranks: int
    busy: dict[str, list[float]] = field(init=False)
    """Map from kind of resource to the seconds of work of each of its ranks."""
    free: dict[str, list[float]] = field(init=False)
    """Map from kind of resource to the time at which each of its ranks becomes free."""

    def __post_init__(self) -> None:
        ranks = dict(zip(KINDS, [self.attention_ranks] * 2 + [self.expert_ranks] * 2, strict=True))
        self.busy = {kind: [0.0] * count for kind, count in ranks.items()}

    def iteration(
        self, start: float, work: Sequence[Work], layers: int, factors: Sequence[float] = (1.0,)
    ) -> float:
        """Run one iteration from second `start`; return the second at which its last micro-batch
        ends.

        `work` has an item for each micro-batch that takes part. `factors` multiply the times of
        ranks and links in turn; several factors give jitter.
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
                    done = self.serve(kind, rank, ready, took * next(draws))
                    if link:
                        done = self.serve(link, rank, done, links[rank] * next(draws))
                    last = done if done > last else last
            if side == 0 and layer < layers:
                heapq.heappush(events, (last, layer, number, 1))
            elif layer < layers:
                heapq.heappush(events, (last, layer + 1, number, 0))
            else:
                end = last if last > end else end
        return end

    def serve(self, kind: str, rank: int, ready: float, took: float) -> float:
        """Add work to a resource after its earlier work, and return the end time.

        Calls must be in the order of `ready`.
        """
        free = self.free[kind]
        began = free[rank]
        began = ready if ready > began else began
        free[rank] = done = began + took
        self.busy[kind][rank] += took
        return done
