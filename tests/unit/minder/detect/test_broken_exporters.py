"""Exporters of one machine that give zeros or stand still are broken, not the machine."""

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from tests.unit.minder.waves import detect

START = 1_000_000
GPU = ("gpu_duty_cycle", "gpu_power_draw", "gpu_tensor_core_activity")
HOST = ("cpu_usage", "pfc_tx_packet_rate")
MODELS = Models(
    {name: Identity(name) for name in GPU + HOST},
    {"gpu_power_draw": (0.0, 400.0), "pfc_tx_packet_rate": (0.0, 8.0)},
)


def job(machines=8, seconds=900):
    rng = np.random.default_rng(0)
    wave = np.where(np.arange(seconds) % 12 < 9, 1.0, 0.3)[:, None]
    levels = dict(zip(GPU + HOST, (95.0, 300.0, 0.5, 25.0, 40.0), strict=True))
    values = {
        name: (level * wave * (1 + 0.02 * rng.normal(size=(seconds, machines)))).astype(np.float32)
        for name, level in levels.items()
    }
    names = tuple(f"n{i}" for i in range(machines))
    return Frame("job", np.arange(START, START + seconds), names, values)


def called(frame, **preprocess):
    config = minder_config({"detect": {"metrics": list(GPU + HOST)}, "preprocess": preprocess})
    return detect(frame, MODELS, config)


@pytest.mark.parametrize("row", [400, 403, 408])
def test_a_gpu_exporter_that_stands_still_is_broken_and_its_machine_is_not_blamed(row):
    frame = job()
    for name in GPU:
        frame.values[name][400:, 3] = frame.values[name][row, 3]
    result = called(frame)
    assert (result.status, result.broken) == ("ok", dict.fromkeys(GPU, ("n3",)))
    assert called(frame, frozen_after_seconds=0).broken == {}


def test_counters_that_stand_still_show_a_host_exporter_that_is_frozen():
    frame = job()
    # Idle time that never grows looks like a host that is busy without a pause.
    frame.values["cpu_usage"][400:, 3] = 100.0
    frame.values["pfc_tx_packet_rate"][400:, 3] = 0.0
    result = called(frame)
    assert (result.status, result.broken) == ("ok", dict.fromkeys(HOST, ("n3",)))
    assert called(frame, frozen_after_seconds=0).status == "fault"


def test_idle_gpus_values_held_for_seconds_and_quiet_jobs_are_no_broken_exporters():
    idle = job()
    for name in GPU:
        idle.values[name][400:, 3] = 0.0
    idle.values["gpu_power_draw"][400:, 3] = 60 + np.random.default_rng(1).normal(size=500)
    result = called(idle)
    assert (result.broken, [one.machine for one in result.findings]) == ({}, ["n3"])
    held = job()
    for name in GPU:
        held.values[name][:, 3] = np.repeat(held.values[name][::5, 3], 5)
        held.values[name][-50:, 3] = held.values[name][-50, 3]
    assert called(held).broken == {}
    quiet = job()
    for name in GPU:
        quiet.values[name][400:] = quiet.values[name][400]
    assert called(quiet).broken == {}


def test_a_machine_that_falls_silent_is_silent_and_not_frozen():
    frame = job()
    for name in GPU + HOST:
        frame.values[name][500:, 3] = np.nan
        frame.mask[name][500:, 3] = False
    result = called(frame)
    assert (result.broken, [one.kind for one in result.findings]) == ({}, ["silent"])
