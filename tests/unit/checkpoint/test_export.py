"""Exports: the folder that engines load holds exactly the weights of the train state."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from planish.checkpoint import api
from planish.checkpoint.export import read_header, to_bfloat16
from planish.errors import CheckpointError, LayoutMismatch
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.refs import parse_pin

FACTS = {"parents": {}, "attributes": {"config_sha256": "ab", "policy_version": 1}}


def tiny(seed, dtype="float32"):
    config = ModelConfig(hidden_size=32, head_dim=16, intermediate_size=64, dtype=dtype)
    return build_policy(config, seed)


def source_pin(root, dtype="float32"):
    ref = save_policy(layout.policy(root, 0), tiny(0, dtype), version=0, parents={}, attributes={})
    return ref.pin()


def state_pin(root, model, **changes):
    weights = {name: p.detach().float() for name, p in model.named_parameters()} | changes
    return api.save(layout.state(root, 1), {"model": weights, "extra": {}}, **FACTS).pin()


def test_exported_policy_opens_in_transformers_with_equal_logits(store_root):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = tiny(5).model
    ref = api.export_hf(
        state_pin(store_root, trained),
        layout.policy(store_root, 1),
        source=source_pin(store_root),
        **FACTS,
    )
    assert ref.schema == "policy/1"
    wanted_facts = {"dtype": "float32", "layout": "hf", "policy_version": 1}
    assert wanted_facts.items() <= ref.attributes.items()
    policy = load_policy(ref.pin())
    ids = torch.arange(4, 12)[None]
    wanted = trained(ids).logits
    assert torch.equal(policy.model(ids).logits, wanted)
    opened = AutoModelForCausalLM.from_pretrained(policy.folder)
    assert torch.equal(opened(ids).logits, wanted)
    assert AutoTokenizer.from_pretrained(policy.folder).vocab_size == policy.tokenizer.vocab_size


def test_export_equals_the_folder_that_transformers_itself_writes(file_root):
    trained = tiny(5)
    ref = api.export_hf(
        state_pin(file_root, trained.model),
        layout.policy(file_root, 1),
        source=source_pin(file_root),
        **FACTS,
    )
    direct = save_policy(
        f"{file_root}/direct", trained, version=1, parents={}, attributes={"config_sha256": "ab"}
    )
    assert read_manifest(direct.uri).shards == read_manifest(ref.uri).shards


def test_weights_are_rounded_to_the_type_of_the_source(file_root):
    trained = tiny(5).model
    ref = api.export_hf(
        state_pin(file_root, trained),
        layout.policy(file_root, 1),
        source=source_pin(file_root, "bfloat16"),
        **FACTS,
    )
    assert ref.attributes["dtype"] == "bfloat16"
    exported = load_policy(ref.pin()).model
    for name, weight in trained.named_parameters():
        assert torch.equal(exported.get_parameter(name), weight.to(torch.bfloat16)), name


def test_rounding_to_bfloat16_equals_torch_on_every_kind_of_number():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000])
    numbers = np.concatenate([bits, special.astype(np.uint32)]).view(np.float32)
    wanted = torch.from_numpy(numbers).to(torch.bfloat16)
    seen = torch.from_numpy(to_bfloat16(numbers).view(np.int16)).view(torch.bfloat16)
    number = ~wanted.isnan()
    assert torch.equal(seen[number], wanted[number])
    assert seen[~number].isnan().all()


def test_large_weights_go_to_several_files_with_an_index(file_root):
    trained = tiny(5).model
    ref = api.export_hf(
        state_pin(file_root, trained),
        layout.policy(file_root, 1),
        source=source_pin(file_root),
        max_file_bytes=20_000,
        **FACTS,
    )
    names = [s.name for s in read_manifest(ref.uri).shards]
    assert sum(n.endswith(".safetensors") for n in names) > 2
    assert "model.safetensors.index.json" in names
    ids = torch.arange(4, 12)[None]
    assert torch.equal(load_policy(ref.pin()).model(ids).logits, trained(ids).logits)
    # The next export takes names and types from all of them.
    again = api.export_hf(
        state_pin(file_root, trained), layout.policy(file_root, 2), source=ref.pin(), **FACTS
    )
    assert torch.equal(load_policy(again.pin()).model(ids).logits, trained(ids).logits)


def test_another_model_than_the_source_is_refused_with_every_difference(file_root):
    pin = state_pin(
        file_root,
        tiny(5).model,
        **{"extra.weight": torch.ones(1), "model.norm.weight": torch.ones(3)},
    )
    with pytest.raises(LayoutMismatch) as caught:
        api.export_hf(pin, f"{file_root}/x", source=source_pin(file_root), **FACTS)
    assert "`extra.weight` is not in the source policy" in str(caught.value)
    assert "`model.norm.weight` must have the shape [32], got [3]" in str(caught.value)
    lone = api.save(layout.state(file_root, 2), {"model": {}, "extra": {}}, **FACTS)
    with pytest.raises(LayoutMismatch, match=r"embed_tokens.weight` is missing"):
        api.export_hf(lone.pin(), f"{file_root}/x", source=source_pin(file_root), **FACTS)


def test_integer_weights_are_never_cast(file_root):
    from planish.checkpoint.export import Entry, cast
    from planish.checkpoint.regions import StoredTensor

    whole = np.zeros(2, "V8")
    with pytest.raises(LayoutMismatch, match="I64 to F32"):
        cast(whole, StoredTensor("I64", (2,), ()), Entry("F32", (2,), 0))
    halves = np.array([1.5, 70000.0], np.float32).view("V4")
    seen = cast(halves, StoredTensor("F32", (2,), ()), Entry("F16", (2,), 0))
    assert seen.tolist() == [1.5, np.inf]


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04pickle.", struct.pack("<Q", 1 << 60), struct.pack("<Q", 5) + b"[1,2]",
     struct.pack("<Q", 58) + b'{"w":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}     '],
)  # fmt: skip
def test_a_header_that_is_none_is_refused(data):
    with pytest.raises(CheckpointError, match="safetensors"):
        read_header(data, name="x")


def test_a_damaged_state_is_not_exported(file_root):
    pin = state_pin(file_root, tiny(5).model)
    uri, _ = parse_pin(pin)
    path = f"{uri.removeprefix('file://')}/model-00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match="model-00000"):
        api.export_hf(pin, f"{file_root}/x", source=source_pin(file_root), **FACTS)


def test_export_needs_neither_torch_nor_transformers(file_root):
    pin, source = state_pin(file_root, tiny(5).model), source_pin(file_root)
    arguments = json.dumps([pin, f"{file_root}/policies/00001", source])
    code = (
        "import sys, json; from planish.checkpoint.api import export_hf\n"
        f"pin, uri, source = json.loads({arguments!r})\n"
        "export_hf(pin, uri, source=source, parents={}, attributes={})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    path = f"{file_root.removeprefix('file://')}/policies/00001/model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
