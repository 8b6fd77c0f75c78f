"""What a shard tells of itself while it samples."""

import logging

import pytest

from planish.base import telemetry
from planish.stages.rollout.progress import SamplingProgress
from planish.submit.local.progress import sampling_line


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def told(num_tokens):
    """What an engine answers that has sampled so many tokens."""
    return lambda: {"tokens": num_tokens}


def levels():
    lines = telemetry.metrics_text().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("planish_rollout_"))
    return {name.removeprefix("planish_rollout_"): float(value) for name, value in found.items()}


def test_the_log_and_the_levels_tell_the_pace_so_far(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = SamplingProgress(64, clock=clock)
    progress.look(kept=0, dropped=0, num_rows=8, stats=told(0))
    clock.now += 0.5
    progress.look(kept=1, dropped=0, num_rows=8, stats=told(50))
    assert caplog.text == ""
    clock.now += 5.5
    progress.look(kept=16, dropped=4, num_rows=7, stats=told(1200))
    found = levels()
    assert (found["kept_groups"], found["dropped_groups"]) == (16, 4)
    assert (found['tokens_per_second{rank="0"}'], found["busy_slots"]) == (200, 7)
    assert found["remaining_seconds"] == 18
    line = "sampling: 16 of 64 kept, 4 dropped, 200 tokens/s, 7 slots in use, 18 s left"
    assert sampling_line(caplog.text) == line
    clock.now += 1.0
    progress.look(kept=70, dropped=4, num_rows=1, stats=told(1400))
    assert levels()["remaining_seconds"] == 0
    assert len(caplog.records) == 1


def rank_stats(busy, seconds, rows=10):
    """Counters of an attention rank that always computes, and of experts that do so long."""
    traffic = {
        "num_frames": {"dispatch": 2 * rows, "reply": 2 * rows},
        "num_bytes": {"dispatch": 300 * rows, "reply": 200 * rows},
        "reply_seconds": 0.002 * rows,
        "reply_counts": [0, 0, 0, 0, 0, rows, *[0] * 8],
    }
    attention = {"rank": 0, "role": "attention", "busy_s": seconds, "cache_bytes": 64, "queue": 3}
    attention["m2n"] = traffic
    experts = [
        {"rank": 1 + number, "role": "expert", "busy_s": spent, "queue": 0}
        for number, spent in enumerate(busy)
    ]
    ranks = [{"wait_s": seconds - r["busy_s"], "rows": rows, **r} for r in (attention, *experts)]
    shown = {"imbalance": 1.25, "expert_tokens": [[rows, 0], [1, rows]]}
    return {**shown, "step_seconds": seconds, "ranks": ranks}


def test_ranks_show_what_they_have_done_since_the_last_look():
    for metric in telemetry.METRICS:
        if "_rank_" in metric.name or "_expert_" in metric.name:
            telemetry.forget(metric.name)
    progress = SamplingProgress(64)
    progress.show_ranks(rank_stats([2.0, 3.0], 4.0))
    progress.show_ranks(rank_stats([2.5, 6.0], 8.0, rows=30))
    # A rank that is gone is in no later answer, and its counters stay as they are.
    gone = rank_stats([4.0], 9.0, rows=31)
    progress.show_ranks(gone)
    found = levels()

    def of(name, rank, role):
        return found[f'{name}{{rank="{rank}",role="{role}"}}']

    assert found["expert_imbalance_ratio"] == 1.25
    assert found['expert_rows_total{expert="0",layer="0"}'] == 31
    assert found['expert_rows_total{expert="0",layer="1"}'] == 1
    assert of("rank_busy_seconds_total", 0, "attention") == 9.0
    assert of("rank_busy_seconds_total", 1, "expert") == 4.0
    assert of("rank_busy_seconds_total", 2, "expert") == 6.0
    assert of("rank_wait_seconds_total", 1, "expert") == 5.5
    assert of("rank_rows_total", 1, "expert") == 31
    assert of("rank_rows_total", 2, "expert") == 30
    assert of("rank_bubble_ratio", 1, "expert") == 1 - 4 / 9
    assert of("rank_bubble_ratio", 0, "attention") == 0
    assert of("rank_queue", 0, "attention") == 3
    assert of("rank_cache_bytes", 0, "attention") == 64
    assert 'rank_cache_bytes{rank="1",role="expert"}' not in found
    assert found['rank_frame_bytes_total{kind="dispatch",rank="0"}'] == 300 * 31
    assert found['rank_frames_total{kind="reply",rank="0"}'] == 2 * 31
    assert found['rank_reply_seconds_bucket{le="0.001",rank="0"}'] == 0
    assert found['rank_reply_seconds_bucket{le="0.003",rank="0"}'] == 31
    assert found['rank_reply_seconds_count{rank="0"}'] == 31
    assert found['rank_reply_seconds_sum{rank="0"}'] == pytest.approx(0.002 * 31)
