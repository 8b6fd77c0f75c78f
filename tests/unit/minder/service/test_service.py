"""The service on a clock of the test: calls, failures, backoff, restart, end."""

import threading
from dataclasses import dataclass, replace

import pytest

from planish.base.errors import BackendUnavailable, ClusterError, ConfigError
from planish.minder.act.actor import ActionOutcome
from planish.minder.act.kube.objects import JobInfo, PodInfo
from planish.minder.service.config import service_settings
from planish.minder.service.job import JobWatch, Shared
from planish.minder.service.service import Service, TaskSchedule
from planish.minder.service.state import FileState, load_jobs, save_jobs
from tests import pages
from tests.benchmarks import minder_soak as day_of

T0 = day_of.T0
FAULT = T0 + 1200


class Recorder:
    """An actor that does one thing about every alert that fires."""

    def __init__(self, outcome=None):
        self.outcome = outcome
        self.seen, self.ages = [], []

    def handle(self, alert, result, now):
        self.seen.append((alert.machine, alert.state))
        self.ages.append(now - result.end)
        if self.outcome is None or alert.state != "firing":
            return ActionOutcome("none", "none", "", False)
        return self.outcome


class Failing:
    """A source that gives nothing."""

    def __init__(self, message, code):
        self.message, self.code, self.intervals = message, code, {}

    def pull(self, machines, seconds, deadline):
        raise BackendUnavailable(self.message, code=self.code)


def shared_of(clock, **changes):
    models = day_of.Models({name: day_of.Identity(name) for name in day_of.METRICS})
    return Shared(settings(), models, day_of.OwnMetrics(), clock=clock, **changes)


def watched(**changes):
    clock = day_of.FastClock(T0 + 900.0)
    day = day_of.Day(clock, 2)
    shared = shared_of(clock, **changes)
    info = day.jobs()[0]
    return JobWatch(info, day_of.DaySource(day, info.key), shared), clock, shared


def run(watch, clock, until):
    pauses = []
    while clock.seconds < until:
        pauses.append(watch.call())
        clock.seconds += pauses[-1]
    return pauses


def metric(shared, line):
    return pages.samples(shared.metrics.text().decode()).get(line)


def test_a_fault_is_told_once_acted_upon_and_resolved(caplog):
    clock = day_of.FastClock()
    heard = day_of.Heard(clock, ActionOutcome("cordon", "done", "x"))
    watch, clock, shared = watched(actor=heard)
    heard.clock = clock
    pod = PodInfo("p", "ns", "u", "a-0", "a", "Running", run_id="r7", stage="train", iteration=3)
    watch.info = replace(watch.info, pods=(pod,))
    run(watch, clock, FAULT + 480)
    (alert,) = watch.book.alerts()
    assert (alert.machine, alert.kind, alert.metric) == ("a-0", "dissimilar", "cpu_usage")
    assert abs(alert.since - FAULT) < 10
    assert 247 <= heard.told[0][0] - alert.since <= 310
    (line,) = [line for line in caplog.messages if line.startswith("alert state=firing")]
    told = f"job=a machine=a-0 kind=dissimilar metric=cpu_usage since={alert.since:.0f}"
    assert f"{told} id={alert.id} run=r7 stage=train iteration=3" in line
    faulty = 'minder_machine_faulty{job_name="a",kind="dissimilar",namespace="",node="a-0"}'
    assert metric(shared, faulty) == 1
    assert metric(shared, 'minder_actions_total{action="cordon",dry_run="true",result="done"}') == 1
    run(watch, clock, FAULT + 480 + 1000)
    assert [state for _, state, _ in heard.told] == ["firing", "resolved"]
    assert metric(shared, faulty) == 0
    assert {alert.machine for _, _, alert in heard.told} == {"a-0"}


def test_a_machine_that_one_job_named_has_no_role_in_the_next():
    watch, clock, shared = watched()
    run(watch, clock, FAULT + 480)
    following = JobWatch(replace(watch.info, name="next"), watch._source, shared)
    assert following.monitor.baseline.suspects == ()
    following.call()
    assert following.monitor.baseline.suspects == {"a-0"}
    # A day later neither the jobs nor what they share remember it.
    clock.seconds += 86_400 + 1000
    following.call()
    assert (shared.suspects, following.monitor.baseline.suspects) == ({}, set())


def test_failures_are_tried_again_after_1_2_4_to_60_seconds_and_keep_alerts():
    watch, clock, shared = watched()
    run(watch, clock, FAULT + 400)
    source, watch._source = watch._source, None

    watch._source = Failing("down", "503")
    assert [watch.call() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert metric(shared, 'minder_calls_total{job_name="a",outcome="error"}') == 9
    assert [a.machine for a in watch.book.alerts()] == ["a-0"]
    watch._failures = 2000
    assert watch.call() == 60
    watch._source = source
    assert watch.call() == 60
    assert watch._failures == 0


def test_a_metric_without_samples_is_said_once_and_not_for_every_job(caplog):
    watch, clock, shared = watched()
    lacking = day_of.METRICS[0]

    class Lacking(day_of.DaySource):
        def pull(self, machines, seconds, deadline):
            frame = super().pull(machines, seconds, deadline)
            frame.mask[lacking][:] = False
            return frame

    day = watch._source.day
    for info in day.jobs()[:2]:
        other = JobWatch(info, Lacking(day, info.key), shared)
        run(other, clock, clock.seconds + 120)
    said = [line for line in caplog.messages if line.startswith("metric_without_samples")]
    assert len(said) == 1
    assert f"metric={lacking} " in said[0]
    assert "monitoring/README.md" in said[0]


@pytest.mark.parametrize(
    ("lost_of_ten", "machines", "told"),
    [
        (2, None, "known 80%, needs 90%"),
        (5, None, "known 50%, needs 90%"),
        (9, None, "known 10%, needs 90%"),
        (5, 1, None),
        (0, None, None),
    ],
)
def test_a_metric_that_is_known_too_little_is_said_once_per_job(
    lost_of_ten, machines, told, caplog
):
    watch, clock, shared = watched()
    young = day_of.METRICS[0]

    class Young(day_of.DaySource):
        def pull(self, names, seconds, deadline):
            frame = super().pull(names, seconds, deadline)
            lost = len(frame.mask[young]) * lost_of_ten // 10
            frame.mask[young][:lost, :machines] = False
            return frame

    day = watch._source.day
    jobs = day.jobs()[:2]
    for info in jobs:
        run(JobWatch(info, Young(day, info.key), shared), clock, clock.seconds + 120)
    said = [line for line in caplog.messages if line.startswith("metric_skipped")]
    assert said == [
        f"metric_skipped metric={young} job={info.key} seconds={told!r}" for info in jobs if told
    ]


def test_nothing_is_asked_about_a_job_of_a_single_machine():
    watch, clock, shared = watched()
    run(watch, clock, FAULT + 400)
    watch.info = replace(watch.info, machines=watch.info.machines[1:2])
    watch._source = Failing("nobody should ask", "503")
    assert watch.call() == 60
    assert metric(shared, 'minder_calls_total{job_name="a",outcome="skipped"}') == 1
    assert watch.last.status == "too_few_machines"
    # The faulty machine has left the job.
    assert watch.book.alerts() == []


@pytest.mark.parametrize("code", ["401", "403"])
def test_refused_credentials_are_tried_again_once_a_minute_and_told_loudly(code, caplog):
    watch, _, _ = watched()
    watch._source = Failing("check the token", code)
    assert [watch.call() for _ in range(3)] == [60, 60, 60]
    assert all(r.levelname == "ERROR" and "check the token" in r.getMessage()
               for r in caplog.records)  # fmt: skip


def test_a_call_that_takes_too_long_leaves_no_trace():
    watch, clock, shared = watched()
    run(watch, clock, FAULT + 200)
    pull = watch._source.pull

    def slow(machines, seconds, deadline):
        clock.seconds = FAULT + 400
        frame = pull(machines, seconds, deadline)
        object.__setattr__(deadline, "at", 0.0)
        return frame

    watch._source.pull = slow
    assert watch.call() == 1.0
    assert watch.book.alerts() == []
    assert metric(shared, 'minder_calls_total{job_name="a",outcome="error"}') == 1


def test_a_stopped_program_takes_nothing_in_and_does_not_act():
    actor = Recorder()
    watch, clock, shared = watched(actor=actor)
    run(watch, clock, FAULT + 200)
    seen = len(actor.seen)
    clock.seconds = FAULT + 400
    shared.stop.set()
    watch.call()
    assert watch.book.alerts() == []
    assert len(actor.seen) == seen


def test_damaged_state_of_a_job_is_not_used():
    watch, _, shared = watched()
    fresh = JobWatch(watch.info, watch._source, shared, {"monitor": 5, "alerts": {"open": [1]}})
    assert fresh.book.alerts() == []
    assert fresh.call() == 60


def settings(**server):
    return service_settings({"prometheus": {"url": "http://none"}, "server": server,
                             "detect": {"metrics": list(day_of.METRICS)}})  # fmt: skip


def service_of(jobs, clock, state=None, *, actor=None, **parts):
    day = day_of.Day(clock, 3)
    shared = shared_of(clock, actor=actor)
    return Service(shared, jobs=jobs, state=state, **parts,
                   source_of=lambda job: day_of.DaySource(day, job.key))  # fmt: skip


def play(service, clock, until):
    play_all([service], clock, until)


def play_all(services, clock, until):
    """Let services do what is due, on one clock."""
    while True:
        every = [one for service in services for one in (service.calls, service.control)]
        schedule = min(every, key=lambda one: one.next_due())
        if schedule.next_due() >= until:
            return
        clock.seconds = max(clock.seconds, schedule.next_due())
        schedule.run_next()


@pytest.mark.slow
def test_jobs_are_found_watched_and_ended_and_a_failing_discovery_ends_none(tmp_path):
    clock = day_of.FastClock()
    day = day_of.Day(clock, 3)
    found = day.jobs()
    is_down = threading.Event()

    def jobs():
        if is_down.is_set():
            raise ClusterError("down")
        return found

    service = service_of(jobs, clock, FileState(tmp_path / "state.json"))
    service.prepare()
    play(service, clock, FAULT + 400)
    assert (sorted(service.watches), service.why_not_ready(), service.is_healthy()) == (
        ["a", "b"], "", True,
    )  # fmt: skip
    is_down.set()
    play(service, clock, FAULT + 460)
    assert sorted(service.watches) == ["a", "b"]
    assert service.why_not_ready() == "discovery: down"
    is_down.clear()
    del found[0]
    play(service, clock, FAULT + 560)
    assert sorted(service.watches) == ["b"]
    text = service.shared.metrics.text().decode()
    assert 'job_name="a"' not in text
    assert 'job_name="b"' in text


@dataclass
class ForbiddenLease:
    """A lease of an account that may not write it, until it may."""

    fault: str = "leases is forbidden"

    def renew(self):
        return not self.fault

    is_leader = renew


def test_a_lease_that_is_refused_is_told_once_in_log_metric_and_readiness(caplog):
    clock, lease = day_of.FastClock(), ForbiddenLease()
    service = service_of(list, clock, lease=lease)
    service.shared.has_succeeded.set()
    service.prepare()
    play(service, clock, clock.seconds + 120)
    assert service.why_not_ready() == "lease: leases is forbidden"
    assert [r.message for r in caplog.records if "lease" in r.message] == [
        "lease works=false reason='leases is forbidden'"
    ]
    assert "minder_leading 0.0" in service.shared.metrics.text().decode()
    lease.fault = ""
    play(service, clock, clock.seconds + 60)
    assert service.why_not_ready() == ""
    assert "minder_leading 1.0" in service.shared.metrics.text().decode()


def test_jobs_do_not_all_start_at_the_same_second():
    clock = day_of.FastClock()
    names = tuple(f"a-{i}" for i in range(8))
    service = service_of(lambda: [JobInfo(f"j{i}", "", names) for i in range(20)], clock)
    service.prepare()
    play(service, clock, T0 + 0.001)
    due = [task.due - T0 for task in service.calls._tasks.values()]
    assert len(due) == 20
    assert 0 <= min(due) < 15
    assert 45 < max(due) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [float("inf"), 1500])
def test_a_new_process_raises_nothing_twice_even_where_the_baselines_do_not_fit(
    tmp_path, max_bytes
):
    clock = day_of.FastClock()
    day, heard = day_of.Day(clock, 3), day_of.Heard(clock)
    state = FileState(tmp_path / "state.json")
    state.max_bytes = max_bytes
    first = service_of(day.jobs, clock, state, actor=heard)
    first.prepare()
    play(first, clock, FAULT + 460)
    first.stop()
    saved = load_jobs(state)["a"]
    assert saved["alerts"]["open"][0]["machine"] == "a-0"
    assert ("monitor" in saved) is (state.path.stat().st_size > 1500)
    second = service_of(day.jobs, clock, state, actor=heard)
    second.prepare()
    play(second, clock, FAULT + 2000)
    assert [(state, a.machine) for _, state, a in heard.told] == [
        ("firing", "a-0"), ("resolved", "a-0"),
    ]  # fmt: skip


class Counted(FileState):
    """A file of which it is known how often it was written, and when."""

    def __init__(self, path, clock):
        super().__init__(path)
        self.clock, self.times = clock, []

    def write(self, text):
        self.times.append(self.clock.seconds - T0)
        super().write(text)


def test_what_is_learnt_is_saved_every_ten_minutes_and_an_alert_at_once(tmp_path):
    clock = day_of.FastClock()
    day, state = day_of.Day(clock, 3), Counted(tmp_path / "state.json", clock)
    service = service_of(day.jobs, clock, state)
    service.prepare()
    play(service, clock, T0 + 1200)
    assert state.times == [600]
    play(service, clock, FAULT + 400)
    (alert,) = load_jobs(state)["a"]["alerts"]["open"]
    # At most one call and one tick after the machine has differed for long enough.
    assert len(state.times) == 3
    assert state.times[-1] + T0 - alert["since"] < 240 + 60 + 30
    written = len(state.times)
    service.stop()
    service._save()
    assert len(state.times) == written + 1


class Forbidden(FileState):
    """A place that may not be written."""

    tries = 0

    def write(self, text):
        self.tries += 1
        if self.tries < 100:
            raise ClusterError("configmaps is forbidden", status=403)
        super().write(text)


def test_state_that_may_not_be_written_is_told_once_and_written_when_it_may(tmp_path, caplog):
    state = Forbidden(tmp_path / "state.json")
    for number in range(150):
        assert save_jobs(state, {"a": {"monitor": number}}) is (number >= 99)
    said = [line for line in caplog.messages if line.startswith("state_not_saved")]
    assert len(said) == 1
    assert "configmaps is forbidden" in said[0]
    assert load_jobs(state) == {"a": {"monitor": 149}}


class Election:
    """A lease that the test gives and takes."""

    fault = ""

    def __init__(self):
        self.leads = False

    def renew(self):
        return self.leads

    def is_leader(self):
        return self.leads

    def release(self):
        self.leads = False


@pytest.mark.slow
def test_only_the_leader_watches_and_a_new_one_goes_on_with_what_the_old_one_knew(tmp_path):
    clock = day_of.FastClock()
    day, heard = day_of.Day(clock, 3), day_of.Heard(clock)
    state = FileState(tmp_path / "state.json")
    replicas, elections = [], [Election(), Election()]
    for election in elections:
        one = service_of(day.jobs, clock, state, lease=election, actor=heard)
        one.prepare()
        replicas.append(one)
    elections[0].leads = True
    play_all(replicas, clock, FAULT + 460)
    assert [sorted(one.watches) for one in replicas] == [["a", "b"], []]
    elections[0].leads, elections[1].leads = False, True
    play_all(replicas, clock, FAULT + 2000)
    assert [sorted(one.watches) for one in replicas] == [[], ["a", "b"]]
    assert 'job_name="a"' not in replicas[0].shared.metrics.text().decode()
    assert [(state, a.machine) for _, state, a in heard.told] == [
        ("firing", "a-0"), ("resolved", "a-0"),
    ]  # fmt: skip


def test_a_clock_of_this_machine_that_jumps_changes_nothing(monkeypatch):
    watch, clock, _ = watched()
    watch.call()
    before = watch.now()
    assert before == T0 + 900
    monkeypatch.setattr("time.time", lambda: 0.0)
    clock.seconds += 60
    assert watch.now() == before + 60
    assert watch.call() == 60


def test_state_that_is_damaged_or_of_another_kind_is_none(tmp_path):
    state = FileState(tmp_path / "deep" / "state.json")
    assert load_jobs(state) == {}
    assert save_jobs(state, {"a": {"monitor": 1}})
    assert load_jobs(state) == {"a": {"monitor": 1}}
    assert [path.name for path in state.path.parent.iterdir()] == ["state.json"]
    for text in (b"{", b"[]", b'{"jobs": 3}', b"\xff"):
        state.path.write_bytes(text)
        assert load_jobs(state) == {}


def test_probes_tell_health_and_readiness_and_metrics_are_text():
    clock = day_of.FastClock()
    service = service_of(list, clock)
    service.shared.settings = settings(host="127.0.0.1", port=0)
    server = service.serve_pages()

    def get(path):
        return pages.get(f"http://127.0.0.1:{server.port}{path}")

    try:
        assert get("/healthz") == (200, "ok\n")
        assert get("/readyz") == (503, "not ok: no query has been answered yet\n")
        service.shared.has_succeeded.set()
        clock.seconds += 3600
        assert get("/healthz")[0] == 503
        assert get("/readyz?verbose=1") == (200, "ok\n")
        assert "minder_build_info{" in get("/metrics")[1]
        assert get("/other")[0] == 404
        service.shared.settings = settings(host="127.0.0.1", port=server.port)
        with pytest.raises(ConfigError, match=r"server.port"):
            service.serve_pages()
    finally:
        server.close()


def test_an_actor_is_told_how_old_a_result_has_become_while_it_was_worked_out():
    actor = Recorder()
    watch, clock, _ = watched(actor=actor)
    run(watch, clock, FAULT + 400)
    look = watch.monitor.call

    def slow(*arguments, **options):
        result = look(*arguments, **options)
        clock.seconds += 200
        return result

    watch.monitor.call = slow
    actor.ages.clear()
    watch.call()
    assert actor.ages == [200]


def test_a_task_is_never_done_twice_at_the_same_time_and_a_failure_ends_no_other():
    schedule = TaskSchedule()
    running, seen = [], []
    done = threading.Event()

    def slow():
        running.append(1)
        seen.append(len(running))
        threading.Event().wait(0.01)
        running.pop()
        if len(seen) > 5:
            done.set()
        return 0.0

    schedule.add("slow", slow)
    schedule.add("broken", lambda: 1 / 0)
    schedule.start(3, "test")
    assert done.wait(60)
    schedule.stop(60)
    assert set(seen) == {1}
