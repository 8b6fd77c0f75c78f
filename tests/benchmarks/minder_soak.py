"""A day of the service on a clock that runs fast: memory flat, no flapping, no resolve missed.

python -m tests.benchmarks.minder_soak [--hours 24]

Everything is the service's own but the clock and the samples: two jobs, machines that break every
hour and are repaired, exporters that fall silent, a Prometheus that is away for ten minutes every
three hours, and a job that ends and starts again on other machines.
"""

import argparse
import gc
import json
import logging
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from kubernetes.client import Configuration

from planish.base.errors import BackendUnavailable
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, KubernetesConfig
from planish.minder.act.decide import ActionOutcome
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from planish.minder.service.config import service_settings
from planish.minder.service.job import Shared
from planish.minder.service.own_metrics import OwnMetrics
from planish.minder.service.service import Service
from planish.run.kube import Kube
from tests.benchmarks.facts import write_result

METRICS = ("cpu_usage", "gpu_duty_cycle")
HOUR = 3600
T0 = 1_700_000_000
MAX_GROWTH_BYTES = 2_000_000
MAX_RESOLVE_SECONDS = 1200


@dataclass
class FastClock:
    """Stands still while something is done, and jumps to what is due next."""

    seconds: float = float(T0)

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Day:
    """What happens, by the second, and the samples that show it."""

    clock: FastClock
    hours: int
    machines: int = 8
    intervals: dict[str, float] = field(default_factory=dict)
    noise: np.ndarray = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(7)
        self.noise = rng.normal(0, 1, (2 * HOUR, self.machines, len(METRICS)))

    def faults(self) -> list[tuple[str, str, int, int]]:
        """Return (job, machine, from, to) of all faults that must be told."""
        found = []
        for hour in range(self.hours):
            begin = T0 + hour * HOUR
            if begin + 3 * HOUR // 4 >= T0 + self.hours * HOUR:
                continue
            found.append(("a", f"a-{hour % self.machines}", begin + 1200, begin + 1200 + 480))
            if hour % 4 == 1 and hour % 6 != 5:
                found.append(("b", f"b-{hour % 5}", begin + 1500, begin + 1500 + 360))
        return found

    def jobs(self) -> list[JobInfo]:
        names = tuple(f"a-{i}" for i in range(self.machines))
        found = [JobInfo("a", "", names)]
        hour = (self.clock.seconds - T0) // HOUR
        if hour % 6 != 5:
            found.append(JobInfo("b", "", tuple(f"b-{i}" for i in range(self.machines))))
        return found

    def is_away(self, now: float) -> bool:
        """Tell whether Prometheus does not answer: for ten minutes from 2:35 on."""
        since = (now - T0) % (3 * HOUR)
        return 2 * HOUR + 2100 <= since < 2 * HOUR + 2700

    def frame(self, job: str, machines, seconds: int) -> Frame:
        now = int(self.clock.seconds)
        ts = np.arange(now - seconds, now, dtype=np.int64)
        wave = 60 + 20 * np.sin(ts / 4)[:, None]
        values = {}
        names = tuple(sorted(machines))
        for number, metric in enumerate(METRICS):
            noise = self.noise[ts % len(self.noise), : len(names), number]
            values[metric] = (wave + noise).astype(np.float32)
        for of, machine, begin, end in self.faults():
            if of == job and machine in names:
                values["cpu_usage"][(ts >= begin) & (ts < end), names.index(machine)] -= 30
        return Frame(job, ts, names, values)


@dataclass
class DaySource:
    """The frames of one job of a day."""

    day: Day
    job: str
    intervals: dict[str, float] = field(default_factory=dict)

    def pull(self, machines, seconds, deadline) -> Frame:
        if self.day.is_away(self.day.clock.seconds):
            raise BackendUnavailable("away", code="503")
        return self.day.frame(self.job, machines, seconds)

    def waiting(self, frame, deadline) -> dict:
        return {}

    def failed_boards(self, machines, deadline) -> set[str]:
        return set()


class Heard(Actor):
    """An actor that touches no machine and notes each alert that begins to fire or ends."""

    def __init__(self, clock: FastClock, outcome: ActionOutcome | None = None):
        super().__init__(Cluster(Kube(Configuration()), KubernetesConfig()), ActConfig())
        self.clock, self.outcome = clock, outcome
        self.states: dict[str, str] = {}
        self.told: list[tuple[float, str, Alert]] = []

    def handle(self, alert, result, now) -> ActionOutcome:
        is_new = self.states.get(alert.id) != alert.state
        if is_new:
            self.states[alert.id] = alert.state
            self.told.append((self.clock.seconds, alert.state, alert))
        if self.outcome is None or alert.ended or not is_new:
            return ActionOutcome("none", "none", "", False)
        return self.outcome


def soak(hours: int) -> dict:
    """Let the service run for some simulated hours, and return what came of it."""
    clock = FastClock()
    day, heard = Day(clock, hours), Heard(clock)
    raw = {"prometheus": {"url": "http://none"}, "detect": {"metrics": list(METRICS)}}
    models = Models({name: Identity(name) for name in METRICS})
    shared = Shared(service_settings(raw), models, OwnMetrics(), actor=heard, clock=clock)
    service = Service(shared, jobs=day.jobs, source_of=lambda job: DaySource(day, job.key))
    service.prepare()
    memory, calls, begun = [], 0, time.perf_counter()
    tracemalloc.start()
    for hour in range(hours):
        end = T0 + (hour + 1) * HOUR
        while True:
            schedule = min((service.calls, service.control), key=lambda one: one.next_due())
            if schedule.next_due() >= end:
                break
            clock.seconds = max(clock.seconds, schedule.next_due())
            calls += schedule is service.calls
            schedule.run_next()
        gc.collect()
        memory.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    wall = time.perf_counter() - begun
    text = shared.metrics.text().decode()
    return {**_judged(day, heard), "hours": hours, "calls": calls, "wall_seconds": wall,
            "memory_bytes": memory, "series": sum(line[0] != "#" for line in text.splitlines()),
            "growth_bytes": max(memory[-6:]) - max(memory[: 8])}  # fmt: skip


def _judged(day: Day, heard: Heard) -> dict:
    """Compare what was told with what happened."""
    expected = Counter((job, machine) for job, machine, _, _ in day.faults())
    fired = [(alert.job, alert.machine) for _, state, alert in heard.told if state == "firing"]
    of_id = Counter((alert.id, state) for _, state, alert in heard.told)
    end = {alert.id: at - alert.seen for at, state, alert in heard.told if state == "resolved"}
    open_ones = [name for name, state in heard.states.items() if state == "firing"]
    delays = [
        at - begin
        for job, machine, begin, stop in day.faults()
        for at, state, alert in heard.told
        if state == "firing" and (alert.job, alert.machine) == (job, machine)
        and begin <= at <= stop + 900
    ]  # fmt: skip
    return {
        "faults": sum(expected.values()),
        "fired": len(fired),
        "as_expected": Counter(fired) == expected,
        "told_twice": sum(count > 1 for count in of_id.values()),
        "not_resolved": len(open_ones),
        "resolve_seconds_max": max(end.values(), default=0.0),
        "fire_delay_seconds_max": max(delays, default=0.0),
    }


def faults_of(result: dict) -> list[str]:
    """Return what is not as it must be."""
    rules = {
        "every fault is told, and nothing else": result["as_expected"],
        "nothing is told twice": result["told_twice"] == 0,
        "everything is resolved": result["not_resolved"] == 0,
        "resolved in time": result["resolve_seconds_max"] <= MAX_RESOLVE_SECONDS + 600,
        "memory stays": result["growth_bytes"] <= MAX_GROWTH_BYTES,
    }
    return [name for name, holds in rules.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    logging.getLogger("planish").setLevel(logging.ERROR)
    result = soak(options.hours)
    print(json.dumps(result, indent=1))
    wrong = faults_of(result)
    if wrong:
        raise SystemExit(f"not as it must be: {wrong}")
    write_result("minder_soak", "simulated", result, "tests.benchmarks.minder_soak")


if __name__ == "__main__":
    main()
