"""Devices of a process."""

import pytest
import torch

from components.pod_settings import GPU_ENV
from planish.base.errors import ConfigError
from planish.base.parallel import GPU_POD_VARIABLE, driver_fault, num_devices, pick_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_auto_is_the_cpu_and_cuda_is_refused():
    assert pick_device("auto", 3) == pick_device("cpu") == torch.device("cpu")
    assert num_devices("auto") == num_devices("cpu") == 1
    for ask in (pick_device, num_devices):
        with pytest.raises(ConfigError, match="sees no accelerator, got 'cuda'; give the pod"):
            ask("cuda")


def test_ranks_go_round_the_accelerators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert num_devices("auto") == num_devices("cuda") == 8
    assert [pick_device("auto", rank).index for rank in (0, 7, 8)] == [0, 7, 0]
    assert num_devices("cpu") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_a_pod_that_asked_for_accelerators_does_not_compute_without(monkeypatch):
    monkeypatch.setenv(GPU_POD_VARIABLE, GPU_ENV[GPU_POD_VARIABLE])
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=rf"`device` = '{name}' must find .*got none: the no"):
            pick_device(name)
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr("planish.base.parallel.driver_fault", lambda: "the driver is old")
    with pytest.raises(ConfigError, match="in a pod that asked for GPUs, got none: the driver is"):
        num_devices("auto")


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release", ""),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  1001.5  Sat Aug 19", ""),
        ("NVRM", ""),
    ],
)
def test_a_driver_older_than_the_wheels_is_named(told, seen, tmp_path):
    place = tmp_path / "version"
    assert driver_fault(place) == ""
    place.write_text(told)
    fault = driver_fault(place)
    assert bool(fault) == bool(seen)
    assert seen in fault
