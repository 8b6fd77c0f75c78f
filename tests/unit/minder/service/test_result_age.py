"""How old a result is when it is acted upon."""

from __future__ import annotations

from planish.minder.act.actor import ActionOutcome
from tests.unit.minder.service.test_service import FAULT, Recorder, run, watched


class Ages(Recorder):
    """Notes how old the results are that it is told of."""

    def handle(self, alert, result, now):
        self.seen.append(now - result.end)
        return ActionOutcome("none", "none", "", False)


def test_an_actor_is_told_how_old_a_result_has_become_while_it_was_worked_out():
    actor = Ages()
    watch, clock, _ = watched(actor=actor)
    run(watch, clock, FAULT + 400)
    look = watch.monitor.call

    def slow(*arguments, **options):
        result = look(*arguments, **options)
        clock.seconds += 200
        return result

    watch.monitor.call = slow
    actor.seen.clear()
    watch.call()
    assert actor.seen == [200]
