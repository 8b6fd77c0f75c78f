"""What Kubernetes and the boards say of machines changes whom a call names."""

import pytest

from planish.base.errors import ClusterError
from planish.minder.act.actor import ActionOutcome
from planish.minder.act.alerts import AlertBook
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.result import Result
from planish.minder.service.config import service_settings
from planish.minder.service.job import JobWatch, Shared
from tests.benchmarks import minder_soak as day_of

T0 = day_of.T0
FAULT = T0 + 1200
"""Machine a-0 differs from then on."""


class Nodes:
    """An actor that does nothing, and its cluster, in which some nodes are not ready."""

    def __init__(self, down, error=None):
        self.down, self.error, self.asked = set(down), error, 0
        self.cluster = self

    def nodes_down(self):
        self.asked += 1
        if self.error:
            raise self.error
        return self.down

    def handle(self, alert, result, now):
        return ActionOutcome("none", "none", "", False)


class Source(day_of.DaySource):
    """Machines that fall silent, and boards that report errors."""

    silent: tuple = ()
    since = 0
    failed: tuple = ()

    def pull(self, machines, seconds, deadline):
        frame = super().pull(machines, seconds, deadline)
        for name in self.silent:
            for mask in frame.mask.values():
                mask[frame.ts >= self.since, frame.machines.index(name)] = False
        return frame

    def waiting(self, frame, deadline):
        # A query about no machine is one about all of the server.
        assert frame.machines
        return super().waiting(frame, deadline)

    def failed_boards(self, machines, deadline):
        self.asked = list(machines)
        return set(self.failed)


def looked(until, *, down=(), silent=(), since=0, failed=(), error=None, calls=1):
    """Return the watch after a few calls, a minute apart, of which the last one is at `until`."""
    clock = day_of.FastClock(float(until - 60 * (calls - 1)))
    day = day_of.Day(clock, 2, machines=16)
    models = day_of.Models({name: day_of.Identity(name) for name in day_of.METRICS})
    raw = {"prometheus": {"url": "http://none"}, "detect": {"metrics": list(day_of.METRICS)}}
    nodes = Nodes(down, error)
    shared = Shared(service_settings(raw), models, day_of.OwnMetrics(), actor=nodes, clock=clock)
    source = Source(day, "a")
    source.silent, source.since, source.failed = silent, since, failed
    info = JobInfo("a", "", tuple(sorted(f"a-{i}" for i in range(16))))
    watch = JobWatch(info, source, shared)
    for _ in range(calls):
        watch.call()
        clock.seconds += 60
    return watch


def told(watch):
    return sorted((alert.kind, alert.machine) for alert in watch.book.alerts())


FOUR = ("a-3", "a-5", "a-7", "a-9")
MOST = tuple(f"a-{i}" for i in range(1, 16))
QUIET = T0 + 1100
"""Nothing differs."""


@pytest.mark.parametrize(
    ("silent", "down", "expected"),
    [
        (FOUR, FOUR, [("silent", name) for name in FOUR]),
        (FOUR, (), [("outage", "")]),
        ((), FOUR, []),
        (FOUR, FOUR[:1], [("silent", "a-3")]),
        (("a-3",), ("a-3",), [("silent", "a-3")]),
        (tuple(f"a-{i}" for i in range(3, 11)), ("a-3",), [("outage", ""), ("silent", "a-3")]),
        (MOST, MOST, [("silent", name) for name in sorted(MOST)]),
        ((*MOST, "a-0"), (*MOST, "a-0"), [("silent", name) for name in sorted((*MOST, "a-0"))]),
    ],
)  # fmt: skip
def test_a_machine_that_is_silent_and_not_ready_is_dead_however_many_are(silent, down, expected):
    watch = looked(QUIET, silent=silent, since=QUIET - 90, down=down)
    found = told(watch)
    # Three silent machines of fifteen are no outage, and are found by themselves.
    assert [one for one in found if one[1] in (*down, "")] == expected
    since = {alert.machine: alert.since for alert in watch.book.alerts() if alert.kind == "silent"}
    assert all(abs(since[name] - (QUIET - 90)) < 3 for _, name in expected if name)


def test_where_four_of_sixteen_are_dead_the_others_are_still_compared():
    watch = looked(FAULT + 300, silent=FOUR, since=FAULT - 600, down=FOUR, calls=12)
    assert told(watch) == [("dissimilar", "a-0"), *(("silent", name) for name in FOUR)]


@pytest.mark.parametrize("silent_seconds", [20, 50])
def test_nobody_asks_kubernetes_about_machines_that_speak(silent_seconds):
    watch = looked(QUIET, silent=FOUR, since=QUIET - silent_seconds, down=FOUR)
    assert watch._shared.actor.asked == 0
    assert told(watch) == []


def test_where_kubernetes_refuses_to_say_silence_is_judged_by_itself_and_told_once(caplog):
    error = ClusterError("nodes is forbidden", status=403)
    watch = looked(QUIET, silent=FOUR, since=QUIET - 400, error=error, calls=4)
    assert told(watch) == [("outage", "")]
    said = [line for line in caplog.messages if line.startswith("nodes_not_known")]
    assert len(said) == 1
    assert "nodes is forbidden" in said[0]


@pytest.mark.parametrize(
    ("seconds", "failed", "expected"),
    [
        (80, ("a-0",), [("dissimilar", "a-0")]),
        (80, (), []),
        (80, ("a-1",), []),
        (40, ("a-0",), [("dissimilar", "a-0")]),
        (10, ("a-0",), []),
        (-60, ("a-0", "a-1"), []),
        (300, (), [("dissimilar", "a-0")]),
    ],
)
def test_a_machine_that_begins_to_differ_is_named_at_once_where_a_board_reports_an_error(
    seconds, failed, expected
):
    watch = looked(FAULT + seconds, failed=failed, calls=6)
    assert told(watch) == expected
    if expected and failed:
        (alert,) = watch.book.alerts()
        assert alert.metric == "cpu_usage"
        assert abs(alert.since - FAULT) < 12


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"gpu_duty_cycle": ("a", "b", "c")}, [("outage", "", ("a", "b", "c"))]),
        ({"gpu_duty_cycle": ("a", "b"), "gpu_power_draw": ("b", "c")},
         [("outage", "", ("a", "b", "c"))]),
        ({"gpu_duty_cycle": ("a", "b"), "gpu_power_draw": ("a", "b")},
         [("broken", "a", ()), ("broken", "b", ())]),
        ({"gpu_duty_cycle": ("a",)}, [("broken", "a", ())]),
        ({}, []),
    ],
)  # fmt: skip
def test_exporters_of_most_machines_that_stand_still_are_one_alert(broken, expected):
    result = Result("j", "ok", T0, T0 + 60, 4, "default", 1.0, "euclidean", broken=broken)
    book = AlertBook(900)
    book.update(result, ("a", "b", "c", "d"))
    assert [(one.kind, one.machine, one.machines) for one in book.alerts()] == expected
