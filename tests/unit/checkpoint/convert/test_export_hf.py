"""Exports: the folder that engines load holds exactly the weights of the checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConfigError,
    LayoutMismatch,
    SaveFailed,
)
from planish.checkpoint.convert import export_hf
from planish.checkpoint.convert.hf_names import cast, to_bfloat16
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import TensorSpec
from planish.checkpoint.loading.fill import RAW
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest
from tests.processes import python
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.ranks.test_control import LIMIT, in_ranks
from tests.unit.checkpoint.written import write_checkpoint

FACTS = {"parents": {}, "attributes": {"config_sha256": "ab", "policy_version": 1}}


def tiny(seed, dtype="float32"):
    config = ModelConfig(hidden_size=32, head_dim=16, intermediate_size=64, dtype=dtype)
    return build_policy(config, seed)


def source_pin(root, dtype="float32"):
    ref = save_policy(layout.policy(root, 0), tiny(0, dtype), version=0, parents={}, attributes={})
    return ref.pin()


def raw(tensor):
    array = tensor.detach().contiguous().numpy()
    return array.view(RAW[array.dtype.itemsize])


def columns(spec, rank):
    """Cut along the last dimension in three: rows of the file are no rows of the tensor."""
    if not spec.shape:
        return (whole(()),)
    step = -(-spec.shape[-1] // 3)
    start, stop = min(rank * step, spec.shape[-1]), min((rank + 1) * step, spec.shape[-1])
    zeros = (0,) * (len(spec.shape) - 1)
    return (Box((*zeros, start), (*spec.shape[:-1], stop - start)),)


def state_of(model, uri=None, role="main", **changes):
    weights = {name: p.detach().float() for name, p in model.named_parameters()} | changes
    tensors = {
        TensorSpec(role, kind, f"{name}{tail}", "F32", tuple(w.shape)): raw(w)
        for name, w in weights.items()
        if w is not None
        for kind, tail in (("model", ""), ("optim", ".exp_avg"))
    }
    return write_checkpoint(uri or damage.fresh(), tensors, columns, num_ranks=3, extra=False)


def test_export_equals_the_folder_that_transformers_itself_writes(file_root):
    trained = tiny(5)
    ref = export_hf.export(
        state_of(trained.model), layout.policy(file_root, 1), policy=source_pin(file_root), **FACTS
    )
    direct = save_policy(
        f"{file_root}/direct", trained, version=1, parents={}, attributes={"config_sha256": "ab"}
    )
    assert read_manifest(direct.uri).shards == read_manifest(ref.uri).shards


def test_weights_are_rounded_to_the_type_of_the_source(file_root):
    trained = tiny(5).model
    ref = export_hf.export(
        state_of(trained), layout.policy(file_root, 1),
        policy=source_pin(file_root, "bfloat16"), **FACTS,
    )  # fmt: skip
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


def test_large_weights_go_to_several_files_with_an_index(file_root, monkeypatch):
    monkeypatch.setattr(export_hf, "GROUP_BYTES", 3000)
    trained = tiny(5).model
    state = state_of(trained)
    ref = export_hf.export(
        state, layout.policy(file_root, 1), policy=source_pin(file_root),
        max_file_bytes=20_000, **FACTS,
    )  # fmt: skip
    names = [s.name for s in read_manifest(ref.uri).shards]
    assert sum(n.endswith(".safetensors") for n in names) > 2
    assert "model.safetensors.index.json" in names
    ids = torch.arange(4, 12)[None]
    assert torch.equal(load_policy(ref.pin()).model(ids).logits, trained(ids).logits)
    # The next export takes names and types from all of them.
    again = export_hf.export(state, layout.policy(file_root, 2), policy=ref.pin(), **FACTS)
    assert torch.equal(load_policy(again.pin()).model(ids).logits, trained(ids).logits)


def test_ranks_share_the_files_of_an_export(file_root):
    state, source = state_of(tiny(5).model), source_pin(file_root)
    settings = {"policy": source, "max_file_bytes": 20_000, **FACTS}
    alone = export_hf.export(state, f"{file_root}/alone", **settings)
    out = f"{file_root}/together"

    def share(control):
        call = control.call("export", LIMIT).twin(missing=SaveFailed)
        return export_hf.export(state, out, call=call, **settings)

    refs, left = in_ranks([0, 0, 1], share)
    assert left == []
    assert refs == [replace(alone, uri=out)] * 3
    assert read_manifest(out).shards == read_manifest(alone.uri).shards


def test_another_model_than_the_source_is_refused_with_every_difference(file_root):
    changes = {"extra.weight": torch.ones(1), "model.norm.weight": torch.ones(3)}
    changes["model.embed_tokens.weight"] = None
    with pytest.raises(LayoutMismatch) as caught:
        export_hf.export(
            state_of(tiny(5).model, **changes), f"{file_root}/x", policy=source_pin(file_root),
            **FACTS,
        )  # fmt: skip
    assert "`model.embed_tokens.weight` is missing" in str(caught.value)
    assert "`extra.weight` is not in the source policy" in str(caught.value)
    assert "`model.norm.weight` must have the shape [32], got [3]" in str(caught.value)
    other = state_of(tiny(5).model, role="critic")
    with pytest.raises(ConfigError, match=r"`role` must be one of \['critic'\], got 'main'"):
        export_hf.export(
            other, f"{file_root}/x", policy=source_pin(file_root), role="main", **FACTS
        )
    ref = export_hf.export(other, f"{file_root}/x", policy=source_pin(file_root), **FACTS)
    assert ref.schema == "policy/1"


def test_types_are_cast_between_floats_only():
    with pytest.raises(LayoutMismatch, match="I64 to F32"):
        cast(np.zeros(2, np.uint64), "I64", "F32")
    halves = np.array([1.5, 70000.0], np.float32).view(np.uint32)
    assert cast(halves, "F32", "F16").tolist() == [1.5, np.inf]
    assert cast(cast(halves, "F32", "BF16"), "BF16", "F32").tolist() == [1.5, 70144.0]
    assert cast(np.array([3], np.uint64), "I64", "I64").tolist() == [3]


def test_a_folder_without_an_earlier_policy_is_written_with_its_config(file_root, tmp_path):
    trained = tiny(5)
    trained.model.save_pretrained(tmp_path / "config")
    place = state_of(trained.model)
    ref = export_hf.export(place, f"{file_root}/out", folder=tmp_path / "config", dtype="BF16")
    facts = {"dtype": "bfloat16", "layout": "hf", "role": "main", "step": 7}
    assert facts.items() <= ref.attributes.items()
    folder = f"{file_root.removeprefix('file://')}/out"
    loaded = safetensors.torch.load_file(f"{folder}/model.safetensors")
    for name, weight in trained.model.named_parameters():
        assert torch.equal(loaded[name], weight.to(torch.bfloat16)), name
    assert json.loads(Path(f"{folder}/config.json").read_text())["hidden_size"] == 32


def test_a_damaged_checkpoint_or_source_is_not_exported(file_root):
    place, source = state_of(tiny(5).model), source_pin(file_root)
    damage.flip(place, "data/main.model/00001-0.safetensors")
    with pytest.raises(CheckpointCorrupt, match="00001-0"):
        export_hf.export(place, f"{file_root}/x", policy=source, **FACTS)
    path = f"{layout.policy(file_root, 0).removeprefix('file://')}/config.json"
    with open(path, "a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"config.json` must have"):
        export_hf.export(state_of(tiny(5).model), f"{file_root}/x", policy=source, **FACTS)


@pytest.mark.slow
def test_export_needs_neither_torch_nor_transformers(file_root):
    place, source = state_of(tiny(5).model, f"{file_root}/step-1"), source_pin(file_root)
    arguments = json.dumps([place, f"{file_root}/policies/00001", source])
    code = (
        "import sys, json; from planish.checkpoint.convert.export_hf import export\n"
        f"pin, uri, source = json.loads({arguments!r})\n"
        "export(pin, uri, policy=source, parents={}, attributes={})\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    assert python("-c", code).returncode == 0
    path = f"{file_root.removeprefix('file://')}/policies/00001/model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
