"""What one iteration of a task tells the next: the pace of its upload."""

import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from planish.base.parallel import SINGLE
from planish.run.gang import node
from planish.run.gang.manifests import GRACE_SECONDS
from planish.run.pins import Pins
from planish.run.signals import STOP_SECONDS, STOP_VARIABLE
from planish.stages.iterate import block as module
from planish.stages.iterate import commit
from planish.stages.iterate.commit import LEAVE_SECONDS, Commit

POD_SECONDS = 30.0
"""Grace of a pod that names none."""


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for each in (module, commit):
        monkeypatch.setattr(each, "time", made)
    return made


def waiting(clock, seconds):
    """Return what an iteration starts from, whose pins are there after some seconds."""
    start = Commit.__new__(Commit)
    start._pins = Pins("", "")

    class Ended(Future):
        def result(self, timeout=None):
            clock.now += seconds
            return Pins("", "")

    start._ended = Ended()
    return start


@pytest.mark.parametrize(
    ("sampling", "before", "within", "count", "expected"),
    [
        (10.0, 0.0, 0.0, 2, 5.0),
        (10.0, 0.0, 6.3, 2, 5.0),
        (10.0, 40.0, 600.0, 2, 5.0),
        (0.0, 0.0, 9.0, 2, 0.0),
        (10.0, 0.0, 6.0, 1, 0.0),
    ],
)
def test_the_pace_is_of_sampling_alone(
    clock, monkeypatch, sampling, before, within, count, expected
):
    start = waiting(clock, within)

    def sample(block, iteration, start, engines, opened):
        clock.now += sampling / 2
        start.pins()
        clock.now += sampling / 2

    def refresh(start):
        clock.now += before
        start.waited_seconds += before

    trainer = SimpleNamespace(pace_seconds=None)
    residents = SimpleNamespace(
        refresh=refresh, lead=lambda work, start: work(), engines=SINGLE, trainer=trainer,
        settle=lambda start: start.pins(), rest=lambda: None, serve=print,
    )  # fmt: skip
    monkeypatch.setattr(module, "sample_shards", sample)
    monkeypatch.setattr(module, "evaluate", lambda *_: None)
    monkeypatch.setattr(module, "update", lambda *_, **__: start)
    monkeypatch.setattr(module, "Pins", Pins)
    block = SimpleNamespace(iteration=1, count=count)
    module._run_iteration(block, 1, start, SINGLE, residents, None)
    assert trainer.pace_seconds == pytest.approx(expected)


def test_the_upload_has_the_grace_of_the_pod_less_five_seconds(monkeypatch):
    assert LEAVE_SECONDS == STOP_SECONDS == POD_SECONDS - 5.0
    given = []
    monkeypatch.setenv(STOP_VARIABLE, "")
    monkeypatch.setattr("torch.distributed.run.run", given.append)
    words = "--name g --nodes 1 --processes 1 --rendezvous h:1 --index 0 --address h module"
    assert node.main(words.split()) == 0
    # torchrun has five seconds of its own to see that its ranks have ended.
    assert given[0].shutdown_timeout == GRACE_SECONDS - 10
    code = "from planish.run.signals import STOP_SECONDS; print(STOP_SECONDS)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert float(told) == given[0].shutdown_timeout - 5
