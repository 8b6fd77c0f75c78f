"""Find slow ranks from each rank's report of its work.

A rank is slow if it needs more time for the same work than the median of the others in its stage,
and more than it did before. Both its seconds per pass and its seconds per token must be higher, so
a rank with more work is not slow. Time in which no rank works does not count.

Source: NVIDIA Resiliency Extension, "Straggler Detection", compares relative and individual scores
with .7 in this way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import NamedTuple

LONGER = 1 / 0.7
"""Ratio above which a rank is slow, both to the others and to its own past."""
FAR_LONGER = 1 / 0.6
"""Ratio to the others above which a rank is slow whatever its own past."""
ABOVE_MIDDLE = 1.1
"""Ratio to the median of all ranks, itself included, up to which a rank is not slow."""
WINDOW = 8
"""Number of looks over which work is compared: 40 seconds in which ranks work."""
LEAST_WINDOW = 4
"""Number of looks that is enough at the start."""
HELD = 15
"""Score at which a rank is named. A look that finds it slow adds 1, any other look subtracts 2; the
rank stays named until the score is 0."""
PAST = 360
"""Number of looks in a rank's own past: half an hour of work."""
MIN_PASSES = 8
"""Least number of passes in a window for a judgement."""


class Work(NamedTuple):
    """Work of a rank."""

    compute_seconds: float = 0.0
    """Seconds of computation without waits for other ranks."""
    passes: int = 0
    """Number of pieces of work of nearly the same size."""
    tokens: int = 0

    def since(self, before: Work) -> Work:
        """Return the difference to earlier work."""
        seconds = self.compute_seconds - before.compute_seconds
        return Work(seconds, self.passes - before.passes, self.tokens - before.tokens)


Pace = tuple[float, ...]
"""Seconds per pass and seconds per token."""


def _middle(paces: Collection[Pace]) -> Pace:
    return tuple(map(median, zip(*paces, strict=True)))


def _times(pace: Pace, other: Pace) -> float:
    """Return the smaller of the ratios of seconds per pass and per token."""
    return min(mine / max(1e-12, theirs) for mine, theirs in zip(pace, other, strict=True))


class Slow(NamedTuple):
    """A slow rank."""

    rank: int
    times: float
    """Ratio of its seconds for the same work to the median of the others."""
    own_times: float
    """Ratio to the median of its own past; 0 if it has none."""


class SlowRanks:
    """Comparison of all ranks with one kind of work, repeated every few seconds."""

    def __init__(self) -> None:
        self._looks: deque[Mapping[int, Work]] = deque(maxlen=WINDOW + 1)
        self._past: dict[int, deque[Pace]] = defaultdict(lambda: deque(maxlen=PAST))
        self._held = Counter[int]()
        self.slow: list[Slow] = []
        """Ranks that are slow now."""

    def look(self, works: Mapping[int, Work], stages: Mapping[int, int]) -> None:
        """Compare the ranks of each stage with each other, and update `slow`.

        Args:
            works: rank to all of its work so far.
            stages: rank to its pipeline stage; stages differ from each other by design.
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
                # The median without the rank itself is costly: compute it for few ranks only.
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
