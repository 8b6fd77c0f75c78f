"""What one iteration of a task tells the next: the pace of its upload."""

import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from planish.base.parallel import SINGLE
from planish.records.stream import StreamState, fresh_cursor
from planish.run.gang import node
from planish.run.gang.manifests import GRACE_SECONDS
from planish.run.pins import Pins
from planish.run.signals import STOP_SECONDS, STOP_VARIABLE
from planish.stages.iterate import loop
from planish.stages.iterate.commit import LEAVE_SECONDS, Made
from planish.stages.rollout.job import Start

POD_SECONDS = 30.0
"""Grace of a pod that names none."""


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class Late(Future):
    """Pins that somebody waits for."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.set_result(Pins("", ""))

    def result(self, timeout=None):
        self.clock.now += self.seconds
        return super().result(timeout)


@pytest.mark.parametrize(
    ("sampling", "refreshing", "waiting", "count", "expected"),
    [
        (10.0, 0.0, 0.0, 2, [5.0, 0.0]),
        (10.0, 40.0, 600.0, 2, [5.0, 0.0]),
        (0.0, 0.0, 9.0, 2, [0.0, 0.0]),
        (10.0, 0.0, 6.0, 1, [0.0]),
    ],
)
def test_the_pace_is_of_sampling_alone(monkeypatch, sampling, refreshing, waiting, count, expected):
    clock = Clock()
    trainer, paces = SimpleNamespace(pace_seconds=None), []

    def refresh(made):
        clock.now += refreshing
        return Start(0, "", "", made.data)

    def sample(*_):
        clock.now += sampling

    def update(*_, **__):
        paces.append(trainer.pace_seconds)
        return made

    made = Made(StreamState(fresh_cursor()), "", pins=Late(clock, waiting))
    residents = SimpleNamespace(refresh=refresh, trainer=trainer, rest=lambda: None)
    fakes = {
        "time": clock, "stored": lambda _: made, "sample_shards": sample, "update": update,
        "evaluate": lambda *_: None, "check_weights": lambda *_: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(loop, name, fake)
    block = SimpleNamespace(iteration=1, last=count, policy_pin="", state_pin="")
    loop.run_in_turn(block, SINGLE, residents, None)
    assert paces == pytest.approx(expected)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_trainer_stays_open_whether_engines_take_its_weights_or_read_files(
    monkeypatch, in_memory
):
    data, ended = StreamState(fresh_cursor()), Future()
    ended.set_result(Pins("policy", "state"))
    made, trainer = Made(data, "", version=1, pins=ended), SimpleNamespace(state_pin="")
    start = Start(1, "", "", data, in_memory=in_memory)
    residents = SimpleNamespace(refresh=lambda _: start, trainer=trainer, rest=lambda: None)
    fakes = ("sample_shards", "evaluate", "check_weights")
    for name in fakes:
        monkeypatch.setattr(loop, name, lambda *_: None)
    monkeypatch.setattr(loop, "stored", lambda _: made)
    monkeypatch.setattr(loop, "update", lambda *_, **__: made)
    block = SimpleNamespace(iteration=2, last=2, policy_pin="", state_pin="")
    loop.run_in_turn(block, SINGLE, residents, None)
    assert trainer.state_pin == "state"


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
