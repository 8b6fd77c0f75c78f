"""The rule by which a rank is slow, on work that is made up look by look."""

import numpy as np
import pytest

from planish.run.slow_ranks import HELD, WINDOW, SlowRanks, Work

START = 40
"""First look in which something is other than before."""


def looks(seconds, *, tokens=None, stages=None, passes=20, total=120, noise=0.05):
    """Return the judge, and the look and rank of all that were named.

    `seconds` gives those of each rank at a look, `tokens` those of a pass.
    """
    rng = np.random.default_rng(0)
    judge, named = SlowRanks(), []
    size = len(seconds(0))
    works = {rank: Work() for rank in range(size)}
    stages = dict(enumerate(stages or [0] * size))
    for number in range(total):
        for rank, spent in enumerate(seconds(number)):
            count = passes if spent else 0
            spent *= float(rng.normal(1.0, noise))
            each = (tokens or [100] * size)[rank]
            works[rank] = Work(
                works[rank][0] + spent, works[rank][1] + count, works[rank][2] + count * each
            )
        known = {slow.rank for slow in judge.slow}
        judge.look(works, stages)
        named += [(number, slow.rank) for slow in judge.slow if slow.rank not in known]
    return judge, named


def slowed(size, rank, times, begin=START, end=10**9):
    """Return seconds of a gang of which one rank is slowed for a while."""
    return lambda look: [
        times if each == rank and begin <= look < end else 1.0 for each in range(size)
    ]


@pytest.mark.parametrize(
    ("seconds", "rank", "latest"),
    [
        (slowed(2, 1, 2.0), 1, START + WINDOW + HELD),
        (slowed(2, 0, 2.0), 0, START + WINDOW + HELD),
        (slowed(4, 3, 2.0), 3, START + WINDOW + HELD),
        (slowed(4, 2, 1.6), 2, START + WINDOW + HELD),
        (slowed(64, 17, 3.0), 17, START + WINDOW + HELD),
        (slowed(2, 1, 2.0, begin=0), 1, WINDOW + HELD),
        (slowed(4, 0, 2.0, begin=0), 0, WINDOW + HELD),
        # There is no past in which it was faster.
        (slowed(4, 1, 1.6, begin=0), 1, WINDOW + HELD),
    ],
)
def test_a_slow_rank_is_named_once_within_three_minutes_of_work(seconds, rank, latest):
    judge, named = looks(seconds)
    assert [each for _, each in named] == [rank]
    assert named[0][0] <= latest
    assert 5.0 * (WINDOW + HELD) <= 180.0
    assert [slow.rank for slow in judge.slow] == [rank]


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (slowed(2, 0, 1.0), {"noise": 0.3}),
        (slowed(4, 0, 1.3), {}),
        (slowed(4, 1, 1.3, begin=0), {}),
        # A pass takes as long for half of the tokens: it is what they do not change.
        (slowed(2, 0, 1.0), {"tokens": [100, 50]}),
        (slowed(2, 1, 3.0, begin=0), {"tokens": [100, 300]}),
        (slowed(4, 1, 3.0), {"stages": [0, 1, 2, 3]}),
        (lambda look: [1.0, 1.0, 4.0, 4.0], {"stages": [0, 0, 1, 1]}),
        (lambda look: [3.0 if look >= START else 1.0] * 4, {}),
        (slowed(2, 1, 3.0, end=START + 4), {}),
        (lambda look: [1.0, 0.0, 1.0], {}),
        (lambda look: [1.0], {}),
        (slowed(2, 1, 9.0, begin=0), {"passes": 0}),
    ],
)
def test_healthy_ranks_are_left_alone(seconds, options):
    judge, named = looks(seconds, **options)
    assert (named, judge.slow) == ([], [])


def test_what_is_over_is_forgotten_and_what_comes_again_is_named_again():
    turns = [(START, START + 40), (START + 80, START + 120)]
    judge, named = looks(
        lambda look: [1.0, 2.0 if any(a <= look < b for a, b in turns) else 1.0], total=START + 160
    )
    assert [rank for _, rank in named] == [1, 1]
    assert judge.slow == []


def test_time_without_work_counts_nowhere():
    def seconds(look):
        return [0.0, 0.0] if look % 2 else [1.0, 2.0 if look >= START else 1.0]

    _, named = looks(seconds, total=160)
    assert [rank for _, rank in named] == [1]
    assert named[0][0] <= START + 2 * (WINDOW + HELD)
