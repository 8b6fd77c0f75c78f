"""What a shard tells of itself while it samples."""

from __future__ import annotations

import logging

from pipelines.demo import sampling_line
from planish.base import telemetry
from planish.stages.rollout.progress import SamplingProgress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def levels():
    lines = telemetry.metrics_text().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("planish_rollout_"))
    return {name.removeprefix("planish_rollout_"): float(value) for name, value in found.items()}


def test_the_log_and_the_levels_tell_the_pace_so_far(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = SamplingProgress(64, clock=clock)
    progress.look(kept=0, dropped=0, num_tokens=0, num_rows=8)
    clock.now += 0.5
    progress.look(kept=1, dropped=0, num_tokens=50, num_rows=8)
    assert caplog.text == ""
    clock.now += 5.5
    progress.look(kept=16, dropped=4, num_tokens=1200, num_rows=7)
    found = levels()
    assert (found["kept_groups"], found["dropped_groups"]) == (16, 4)
    assert (found["tokens_per_second"], found["busy_slots"]) == (200, 7)
    assert found["remaining_seconds"] == 18
    line = "sampling: 16 of 64 kept, 4 dropped, 200 tokens/s, 7 slots in use, 18 s left"
    assert sampling_line(caplog.text) == line
    clock.now += 1.0
    progress.look(kept=70, dropped=4, num_tokens=1400, num_rows=1)
    assert levels()["remaining_seconds"] == 0
    assert len(caplog.records) == 1


def test_groups_of_an_earlier_attempt_say_nothing_of_the_pace(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = SamplingProgress(64, clock=clock)
    progress.look(kept=60, dropped=0, num_tokens=0, num_rows=8)
    clock.now += 10.0
    progress.look(kept=60, dropped=0, num_tokens=10, num_rows=8)
    assert sampling_line(caplog.text).endswith("1 tokens/s, 8 slots in use")


def test_a_log_without_sampling_gives_no_line():
    assert sampling_line("done stage=rollout\n") == ""
