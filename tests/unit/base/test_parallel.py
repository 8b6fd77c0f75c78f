"""Devices of a process."""

import pytest
import torch

from planish.base.errors import ConfigError
from planish.base.parallel import num_devices, pick_device


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
