"""How old a result is when it is acted upon."""

from __future__ import annotations

from planish.minder.act.types import Outcome
from tests.unit.minder.test_service import FAULT, Recorder, run, watched


class SlowNotifier:
    """Telling people takes it minutes."""

    def __init__(self, clock):
        self.clock = clock

    def send(self, now, alerts, context, deadline):
        self.clock.seconds += 200
        return len(alerts)


class Ages(Recorder):
    """Notes how old the results are that it is told of."""

    def handle(self, alert, result, now):
        self.seen.append(now - result.end)
        return Outcome("none", "none", "", False)


def test_an_actor_is_told_how_old_a_result_has_become_while_people_were_told():
    actor = Ages()
    watch, clock, around = watched(actor=actor)
    run(watch, clock, FAULT + 400)
    around.notifier = SlowNotifier(clock)
    actor.seen.clear()
    watch.call()
    assert actor.seen == [200]
