"""The breaker opens by itself, is closed by a human, and forgets what is old."""

from __future__ import annotations

import sys
import threading

import pytest

from planish.minder.act.config import ActConfig
from planish.minder.act.guards import Breaker


def test_more_than_half_of_the_requests_failing_opens_it():
    breaker = Breaker(ActConfig(breaker_min_requests=4))
    opened = [breaker.record(good, 100.0 + i) for i, good in enumerate([True, False, True, False])]
    assert opened == [False] * 4
    assert breaker.record(False, 104.0)
    assert breaker.is_open
    assert breaker.reason == "3 of 5 requests to the API server failed in 300 s"


def test_few_requests_and_old_ones_say_nothing():
    breaker = Breaker(ActConfig(breaker_min_requests=5))
    for second in range(4):
        assert not breaker.record(False, float(second))
    # 300 s later the four have left the window.
    assert not breaker.record(False, 304.0)
    assert not breaker.is_open


def test_the_first_reason_stays_and_only_a_human_closes_it():
    breaker = Breaker(ActConfig())
    assert breaker.open("cap", 10.0)
    assert not breaker.open("job", 20.0)
    for second in range(100):
        breaker.record(True, 1000.0 + 100 * second)
    assert (breaker.reason, breaker.opened) == ("cap", 10.0)
    breaker.close(20_000.0)
    assert not breaker.is_open


@pytest.mark.parametrize(("fired", "discarded"), [(99.0, True), (100.0, False), (1500.0, False)])
def test_closing_discards_alerts_older_than_fifteen_minutes(fired, discarded):
    breaker = Breaker(ActConfig())
    assert not breaker.discards(fired)
    breaker.open("cap", 50.0)
    breaker.close(1000.0)
    assert breaker.discards(fired) is discarded


def test_it_is_as_it_was_after_a_restart():
    config = ActConfig()
    breaker = Breaker(config)
    breaker.open("the whole job", 7.0)
    again = Breaker.from_json(config, breaker.to_json())
    assert (again.is_open, again.reason, again.opened) == (True, "the whole job", 7.0)
    again.close(9.0)
    assert Breaker.from_json(config, again.to_json()).closed == 9.0


def test_threads_count_their_requests_at_the_same_time():
    breaker = Breaker(ActConfig(breaker_seconds=1, breaker_min_requests=10**6))
    failures = []

    def count(first):
        try:
            for number in range(1500):
                breaker.record(True, first + number / 500)
        except Exception as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count, args=(0.0,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []
