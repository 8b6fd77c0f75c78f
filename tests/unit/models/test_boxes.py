"""Models without their weights, and weights that are read box by box."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from planish.base.errors import ConfigError
from planish.models.adapters import Adapters, is_adapter
from planish.models.config import ModelConfig
from planish.models.lora import add_adapters
from planish.models.policy import (
    FolderBoxes,
    build_policy,
    frame_policy,
    load_policy,
    save_policy,
    without_weights,
)

KINDS = {"dense": {}, "experts": {"num_experts": 4, "expert_intermediate_size": 24}}


@pytest.fixture(scope="module", params=KINDS)
def pin(request, tmp_path_factory):
    policy = build_policy(ModelConfig(**KINDS[request.param], dtype="bfloat16"), 1)
    place = tmp_path_factory.mktemp(request.param).as_uri()
    return save_policy(place, policy, version=4, parents={}, attributes={}).pin()


def test_a_frame_has_all_of_a_policy_but_its_weights(pin):
    whole, frame = load_policy(pin, dtype=torch.float32), frame_policy(pin, with_weights=False)
    assert (frame.version, frame.folder) == (4, whole.folder)
    assert {p.device.type for p in frame.model.parameters()} == {"meta"}
    shapes = {name: (p.shape, p.dtype) for name, p in frame.model.named_parameters()}
    assert shapes == {name: (p.shape, p.dtype) for name, p in whole.model.named_parameters()}
    buffers = dict(frame.model.named_buffers())
    assert buffers.keys() == dict(whole.model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], x) for name, x in whole.model.named_buffers())
    configs = [json.loads(policy.model.config.to_json_string(False)) for policy in (frame, whole)]
    for config in configs:
        config.pop("_name_or_path", "")
    assert configs[0] == configs[1]
    assert not frame.model.training
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_box_has_the_numbers_of_the_weight(pin):
    model = load_policy(pin).model
    boxes, rng = FolderBoxes(load_policy(pin).folder), torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        cuts = [(0,) * len(shape) + shape]
        for _ in range(6):
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=rng).tolist()) for n in shape]
            starts, lengths = [a for a, _ in ends], [max(1, b - a) for a, b in ends]
            starts = [min(a, n - b) for a, b, n in zip(starts, lengths, shape, strict=True)]
            cuts.append((*starts, *lengths))
        for cut in cuts:
            start, extent = cut[: len(shape)], cut[len(shape) :]
            index = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
            assert torch.equal(boxes.read(name, shape, start, extent), weight[index]), (name, cut)


def test_weights_that_are_not_there_are_told_before_one_is_read(pin, tmp_path):
    folder = load_policy(pin).folder
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    shapes = {name: tuple(tensors[name].shape), "model.norm.weight": (5,)}
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "a.safetensors")
    with pytest.raises(
        ConfigError, match=rf"none for \['{name}'\].*other shapes for \['model.norm"
    ):
        FolderBoxes(tmp_path).check(shapes)


def test_adapters_of_a_frame_are_drawn_as_those_of_a_model(pin):
    adapters = Adapters(2, 8.0, ())
    whole, frame = load_policy(pin, dtype=torch.float32), frame_policy(pin, with_weights=False)
    for policy in (whole, frame):
        add_adapters(policy.model, adapters, seed=(5, 0))
    drawn, found = dict(whole.model.named_parameters()), dict(frame.model.named_parameters())
    assert found.keys() == drawn.keys()
    for name, parameter in found.items():
        assert parameter.is_meta != is_adapter(name)
        assert parameter.requires_grad == drawn[name].requires_grad
        assert not is_adapter(name) or torch.equal(parameter, drawn[name])


def test_an_import_of_the_policy_leaves_torch_as_it_is():
    code = (
        "import planish.models.policy\n"
        "from torch.nn.modules import module\n"
        "print(len(module._global_parameter_registration_hooks))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "0\n"


def test_what_threads_build_without_weights_leaves_other_modules_theirs():
    begun = threading.Barrier(3)

    def build(order):
        with without_weights():
            begun.wait()
            assert nn.Linear(2, 2).weight.is_meta
            order.wait()

    # The first that begins ends first, too.
    first, second = threading.Event(), threading.Event()
    threads = [threading.Thread(target=build, args=[order]) for order in (first, second)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert not nn.Linear(2, 2).weight.is_meta
    for order, thread in zip((first, second), threads, strict=True):
        order.set()
        thread.join()
    assert not nn.Linear(2, 2).weight.is_meta
