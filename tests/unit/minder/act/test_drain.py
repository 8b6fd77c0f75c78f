"""What is done where the API server refuses or fails, on a cluster that answers as it is told."""

import pytest

from planish.base.errors import ClusterError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig
from planish.minder.act.drain import Evictions, change_node, evict_round
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.detect.result import Result

POD = PodInfo("p", "team", "u", "n1", "job", "Running")
NODE = NodeInfo("n1", "u", "1")


class Refusing:
    """Answers each request with the next of the statuses; the last one for ever."""

    def __init__(self, *statuses, retry_after=0.0):
        self.statuses, self.retry_after, self.num_requests = list(statuses), retry_after, 0

    def answer(self, *_):
        self.num_requests += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status != 200:
            raise ClusterError("refused", status=status, retry_after=self.retry_after)

    evict = patch_node = pods = answer

    def node(self, _):
        return NODE


def test_a_budget_is_asked_again_after_5_10_20_40_and_60_seconds_until_15_minutes():
    cluster, state, asked = Refusing(429), Evictions(), []
    for second in range(1000):
        before = cluster.num_requests
        done = evict_round(cluster, [POD], state, float(second))
        if cluster.num_requests > before:
            asked.append(second)
        if done.given_up:
            break
        assert done.num_waiting == 1
    assert asked == [0, 5, 15, 35, *range(75, 916, 60)]
    assert second == 915
    assert (state.given_up, state.attempts) == ({"u"}, {})
    # Given up for good.
    assert evict_round(cluster, [POD], state, 5000.0).num_waiting == 0
    assert cluster.num_requests == len(asked)


@pytest.mark.parametrize(("wanted", "pause"), [(30.0, 30.0), (4000.0, 60.0)])
def test_the_server_may_ask_for_a_longer_pause_up_to_a_minute(wanted, pause):
    state = Evictions()
    evict_round(Refusing(429, retry_after=wanted), [POD], state, 0.0)
    assert state.attempts["u"].due == pause


@pytest.mark.parametrize("status", [404, 409])
def test_a_pod_that_is_gone_or_another_one_is_done(status):
    done = evict_round(Refusing(status), [POD], Evictions(), 0.0)
    assert (done.evicted, done.given_up, done.num_waiting) == ([], [], 0)


@pytest.mark.parametrize(
    ("statuses", "tries"), [([409, 409, 200], 3), ([409, 409, 409, 200], 3), ([500], 1)]
)
def test_a_patch_is_tried_three_times_against_others(statuses, tries):
    cluster = Refusing(*statuses)
    if statuses == [409, 409, 200]:
        assert change_node(cluster, NODE, lambda _: {"spec": {}})
    else:
        with pytest.raises(ClusterError):
            change_node(cluster, NODE, lambda _: {"spec": {}})
    assert cluster.num_requests == tries


def test_a_server_that_fails_is_told_once_and_nothing_is_done():
    cluster = Refusing(503)
    actor = Actor(cluster, ActConfig(mode="evict", dry_run=False))
    alert = Alert("a", "team/job", "n1", "dissimilar", "cpu_usage", 500.0, 900.0)
    result = Result("team/job", "fault", 0, 1000, 4, "default", 1.35, "euclidean")
    actor.events.note = lambda *_, **__: None
    outcomes = [actor.handle(alert, result, 1000 + second) for second in range(3)]
    assert [(one.result, one.has_changed) for one in outcomes] == [
        *(("failed", True), ("failed", False), ("failed", False)),
    ]
    assert cluster.num_requests == 3
