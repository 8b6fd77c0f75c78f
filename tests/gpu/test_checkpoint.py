"""Saves from device memory: the state of the call is saved, and what waits is one copy."""

import time

import torch

from planish.checkpoint import api
from planish.checkpoint.train_state import by_role
from tests.gpu.models import DEVICE

COUNT, NUMBERS = 48, 16 << 20
"""Tensors of 64 MiB: 3 GiB."""


def test_a_save_takes_the_state_of_its_call(tmp_path, figures):
    made = torch.Generator(DEVICE).manual_seed(0)
    state = {
        f"w{k}": torch.randn(NUMBERS, device=DEVICE, generator=made) for k in range(COUNT)
    }  # fmt: skip
    size = COUNT * NUMBERS * 4
    pinned = torch.empty(NUMBERS, pin_memory=True)
    torch.cuda.synchronize(DEVICE)
    began = time.perf_counter()
    for tensor in state.values():
        pinned.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize(DEVICE)
    copied = time.perf_counter() - began
    stalls, commits = [], []
    for step in range(3):
        kept = {name: tensor.clone() for name, tensor in state.items()}
        torch.cuda.synchronize(DEVICE)
        began = time.perf_counter()
        handle = api.save(
            (tmp_path / f"step-{step}").as_uri(), by_role({"model": state}), "plain", step=step
        )
        stalls.append(time.perf_counter() - began)
        for tensor in state.values():
            tensor.add_(1.0)  # the next step, before anything has been uploaded
        torch.cuda.synchronize(DEVICE)
        handle.result(300)
        commits.append(time.perf_counter() - began)
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        began = time.perf_counter()
        api.load((tmp_path / f"step-{step}").as_uri(), by_role({"model": blank}), "plain")
        torch.cuda.synchronize(DEVICE)
        loaded = time.perf_counter() - began
        assert all(torch.equal(blank[name], tensor) for name, tensor in kept.items())
    figures["save from device memory"] = {
        "bytes": size,
        "stall_seconds": stalls,
        "plain_pinned_copy_seconds": copied,
        "stall_over_copy": min(stalls[1:]) / copied,
        "commit_seconds": commits,
        "load_seconds": loaded,
    }
