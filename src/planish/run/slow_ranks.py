"""Which rank is slow, from what each rank says of its own work.

A rank is slow where it needs longer for the same work than the median of the others in its stage,
and longer than it did before. Ranks with other work are no stragglers: a pass and a token must both
take longer. Time in which no rank works counts nowhere.

Source: NVIDIA Resiliency Extension, "Straggler Detection", compares relative and individual scores
with .7 in this way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import NamedTuple

LONGER = 1 / 0.7
"""A slow rank needs so many times the seconds of the others, and its own of before."""
FAR_LONGER = 1 / 0.6
"""Where its past was no better it needs so many times those of the others."""
ABOVE_MIDDLE = 1.1
"""A rank that is nearer to the median of all, itself among them, is not slow."""
WINDOW = 8
"""Looks over which work is compared: 40 seconds in which ranks work."""
LEAST_WINDOW = 4
"""As many are enough at the beginning."""
HELD = 15
"""A rank is named once so many looks have found it slow, of which each that did not takes back two;
until all are taken back it stays named."""
PAST = 360
"""Looks over which a rank's own past reaches back: half an hour of work."""
MIN_PASSES = 8
"""Fewer passes in a window are not judged."""


class Work(NamedTuple):
    """What a rank has computed."""

    compute_seconds: float = 0.0
    """Without waits for other ranks."""
    passes: int = 0
    """Pieces of work of nearly the same size."""
    tokens: int = 0

    def since(self, before: Work) -> Work:
        """Return what has been added."""
        seconds = self.compute_seconds - before.compute_seconds
        return Work(seconds, self.passes - before.passes, self.tokens - before.tokens)


Pace = tuple[float, ...]
"""Seconds a pass and seconds a token."""


def _middle(paces: Collection[Pace]) -> Pace:
    return tuple(map(median, zip(*paces, strict=True)))


def _times(pace: Pace, other: Pace) -> float:
    """Return by how much a pass and a token both take longer."""
    return min(mine / max(1e-12, theirs) for mine, theirs in zip(pace, other, strict=True))


class Slow(NamedTuple):
    """A rank that is slow."""

    rank: int
    times: float
    """Its seconds for the same work over the median of the others."""
    own_times: float
    """Over its own past; 0 where it has none."""


class SlowRanks:
    """Looks at all ranks that do one kind of work, every few seconds."""

    def __init__(self) -> None:
        self._looks: deque[Mapping[int, Work]] = deque(maxlen=WINDOW + 1)
        self._past: dict[int, deque[Pace]] = defaultdict(lambda: deque(maxlen=PAST))
        self._held = Counter[int]()
        self.slow: list[Slow] = []
        """Ranks that are slow now."""

    def look(self, works: Mapping[int, Work], stages: Mapping[int, int]) -> None:
        """Compare ranks of one stage with each other, and find those in `slow`.

        Args:
            works: of each rank, all of its work so far.
            stages: of each rank; a stage of a pipeline differs from the next by design.
        """
        if not self._looks or works != self._looks[-1]:
            self._looks.append(dict(works))
            if len(self._looks) > LEAST_WINDOW:
                self._judge(stages)

    def _judge(self, stages: Mapping[int, int]) -> None:
        paces: dict[int, dict[int, Pace]] = defaultdict(dict)
        for rank, work in self._looks[-1].items():
            seconds, passes, tokens = work.since(self._looks[0].get(rank, Work()))
            if passes >= MIN_PASSES and tokens > 0:
                paces[stages[rank]][rank] = seconds / passes, seconds / tokens
        known, self.slow = {slow.rank for slow in self.slow}, []
        for peers in paces.values():
            middle = _middle(peers.values())
            for rank, pace in peers.items():
                times, past, own_times = 0.0, self._past[rank], 0.0
                # The others are looked at one by one for few ranks alone.
                if _times(pace, middle) > ABOVE_MIDDLE:
                    times = _times(pace, _middle([peers[each] for each in peers if each != rank]))
                    own_times = _times(pace, _middle(past)) if len(past) >= WINDOW else 0.0
                is_slow = times > LONGER and (
                    times > FAR_LONGER or not own_times or own_times > LONGER
                )
                held = min(HELD, self._held[rank] + 1) if is_slow else self._held[rank] - 2
                self._held[rank] = max(0, held)
                if not is_slow:
                    past.append(pace)
                if held >= HELD or (held > 0 and rank in known):
                    self.slow.append(Slow(rank, times, own_times))
