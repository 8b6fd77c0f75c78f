"""Train states: round trips, damage, hostile files."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from planish.checkpoint import api
from planish.checkpoint.regions import (
    Region,
    StoredTensor,
    encode_index,
    parse_index,
)
from planish.errors import CheckpointError, CheckpointIncomplete, LayoutMismatch, RecordError
from planish.records import layout
from planish.records.manifest import manifest_uri, read_manifest, seal
from planish.store import open_store

FACTS = {"parents": {"rewards": "0" * 64}, "attributes": {"step": 3, "config_sha256": "ab"}}


def make_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "a.weight": torch.randn(4, 3, generator=generator),
            "half": torch.randn(5, generator=generator).to(torch.bfloat16),
            "column": torch.randn(6, 4, generator=generator).t(),
            "empty": torch.zeros(0, 2),
            "odd name/..|é": torch.ones(2),
        },
        "optimizer": {
            "a.weight.exp_avg": torch.full((4, 3), 0.5),
            "a.weight.step": torch.tensor(7.0),
        },
        "random": {"torch.00000": torch.arange(9, dtype=torch.uint8)},
        "extra": {"step": 3, "policy_version": 2, "data": {"next": 4, "pending": [1]}},
    }


def blank(state):
    return {
        part: {name: torch.zeros_like(t) for name, t in values.items()}
        for part, values in state.items()
        if part != "extra"
    }


def save(root, step=3, state=None):
    return api.save(layout.state(root, step), state or make_state(), **FACTS)


def test_save_then_load_gives_equal_tensors_and_extra(store_root):
    state = make_state()
    ref = save(store_root)
    target = blank(state)
    extra = api.load(ref.pin(), target)
    assert extra == state["extra"]
    for part in ("model", "optimizer", "random"):
        for name, tensor in state[part].items():
            assert torch.equal(target[part][name], tensor), name
    assert api.read_state_info(ref.pin()) == state["extra"]
    assert ref.attributes["step"] == 3


def test_equal_states_have_equal_digests_wherever_they_lie(tmp_path):
    first = save(f"file://{tmp_path}/a")
    second = save(f"file://{tmp_path}/b")
    assert first.manifest_sha256 == second.manifest_sha256
    again = save(f"file://{tmp_path}/a")
    assert again.manifest_sha256 == first.manifest_sha256


def test_saving_over_another_state_leaves_none_of_its_files(file_root):
    state = make_state()
    save(file_root)
    small = {"model": {"w": torch.ones(2)}, "extra": {}}
    ref = save(file_root, state=small)
    names = {uri.rsplit("/", 1)[1] for uri in open_store(ref.uri).list(ref.uri)}
    assert names == {"model-00000.safetensors", "tensors.json", "extra.json", "manifest.json"}
    with pytest.raises(LayoutMismatch, match="weight"):
        api.load(ref.pin(), blank(state))


def test_load_refuses_a_state_without_manifest(file_root):
    ref = save(file_root)
    open_store(ref.uri).delete(manifest_uri(ref.uri))
    for call in (lambda: api.load(ref.pin(), {}), lambda: api.read_state_info(ref.pin())):
        with pytest.raises(CheckpointIncomplete, match="never finished"):
            call()


def test_load_refuses_another_manifest_than_the_pinned_one(file_root):
    ref = save(file_root)
    changed = make_state()
    changed["model"]["half"] += 1
    save(file_root, state=changed)
    with pytest.raises(RecordError, match="sha256"):
        api.load(ref.pin(), blank(changed))


def test_load_names_every_tensor_that_does_not_fit_and_touches_none(file_root):
    ref = save(file_root)
    target = {
        "model": {"a.weight": torch.zeros(3, 4), "half": torch.zeros(5), "new": torch.zeros(1)}
    }
    with pytest.raises(LayoutMismatch) as caught:
        api.load(ref.pin(), target)
    text = str(caught.value)
    for part in ("`model.a.weight` must be F32 [3, 4], got F32 [4, 3]", "BF16", "`model.new`"):
        assert part in text
    assert "`optim.a.weight.exp_avg` has no place to go" in text
    assert all((t == 0).all() for t in target["model"].values())


def test_a_part_alone_loads_when_not_strict(file_root):
    ref = save(file_root)
    target = {"model": {"a.weight": torch.zeros(4, 3)}}
    api.load(ref.pin(), target, strict=False)
    assert torch.equal(target["model"]["a.weight"], make_state()["model"]["a.weight"])


def test_values_that_are_no_tensors_and_unknown_parts_are_refused(file_root):
    with pytest.raises(CheckpointError, match="must be a tensor"):
        save(file_root, state={"model": {"w": [1, 2]}, "extra": {}})
    with pytest.raises(CheckpointError, match="gossip"):
        save(file_root, state={"gossip": {}})
    assert api.latest(file_root) is None


def test_latest_is_the_highest_finished_step(file_root):
    assert api.latest(file_root) is None
    save(file_root, step=8)
    newest = save(file_root, step=24)
    save(file_root, step=16)
    unfinished = save(file_root, step=40)
    open_store(file_root).delete(manifest_uri(unfinished.uri))
    assert api.latest(file_root) == newest


@pytest.mark.parametrize("file", ["model-00000.safetensors", "tensors.json", "extra.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_refused(file_root, file, damage):
    ref = save(file_root)
    store, place = open_store(ref.uri), f"{ref.uri}/{file}"
    data = bytearray(store.read(place))
    if damage == "flip":
        data[-1] ^= 1
        store.write(place, bytes(data))
    elif damage == "cut":
        store.write(place, bytes(data[:-1]))
    else:
        store.delete(place)
    with pytest.raises(CheckpointError, match=file):
        api.load(ref.pin(), blank(make_state()))


def forge(ref, file, data):
    """Write a state whose digests are right but whose content is hostile."""
    store = open_store(ref.uri)
    old = read_manifest(ref.uri)
    store.write(f"{ref.uri}/{file}", data)
    digest = hashlib.sha256(data).hexdigest()
    shards = [
        replace(s, bytes=len(data), sha256=digest) if s.name == file else s for s in old.shards
    ]
    manifest, text = seal(old.schema, 0, shards, old.parents, old.attributes)
    store.write(manifest_uri(ref.uri), text)
    return manifest.ref(ref.uri).pin()


class Bomb:
    def __reduce__(self):
        return (print, ("PICKLE RAN",))


@pytest.mark.parametrize("file", ["tensors.json", "extra.json", "model-00000.safetensors"])
def test_a_pickle_in_place_of_any_file_is_never_run(file_root, file, capsys):
    pin = forge(save(file_root), file, pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        api.load(pin, blank(make_state()))
    assert "PICKLE RAN" not in capsys.readouterr().out


def test_an_index_that_names_a_file_outside_the_state_is_refused(file_root):
    ref = save(file_root)
    index = json.loads(open_store(ref.uri).read(f"{ref.uri}/tensors.json"))
    index["model.half"]["regions"][0]["file"] = "../../secret"
    pin = forge(ref, "tensors.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="secret"):
        api.load(pin, blank(make_state()))


def test_an_entry_of_another_shape_than_its_index_is_refused(file_root):
    ref = save(file_root)
    name = "optim.a.weight.step||"
    moments = {"optim.a.weight.exp_avg|0,0|4,3": torch.zeros(2, 6), name: torch.tensor(1.0)}
    pin = forge(ref, "optim-00000.safetensors", safetensors.torch.save(moments))
    with pytest.raises(CheckpointError, match="exp_avg"):
        api.load(pin, blank(make_state()))


@pytest.mark.parametrize(
    ("regions", "fault"),
    [
        ([((0, 0), (2, 2))], "4 of 6"),
        ([((0, 0), (2, 2)), ((0, 1), (2, 1))], "overlap"),
        ([((0, 0), (3, 2))], "outside"),
        ([((0, 0), (1, 3)), ((1, 0), (1, 3))], ""),
    ],
)
def test_regions_must_cover_a_tensor_exactly_once(regions, fault):
    boxes = tuple(Region(o, n, "f") for o, n in regions)
    tensor = StoredTensor("F32", (2, 3), boxes)
    assert fault in tensor.fault()
    data = encode_index({"w": tensor})
    if fault:
        with pytest.raises(CheckpointError, match="exactly once"):
            parse_index(data, name="x")
    else:
        assert parse_index(data, name="x") == {"w": tensor}


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"w": {"dtype": "X", "shape": [], "regions": []}}', '{"w": 3}', '{"w": '
     '{"dtype": "F32", "shape": [1], "regions": [{"offsets": [], "lengths": [1], "file": "f"}]}}',
     '{"w": {"dtype": "F32", "shape": [-1], "regions": []}}',
     '{"w": {"dtype": "F32", "shape": [1], "regions": [{"offsets": [0], "lengths": [1], '
     '"file": 3}]}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(text):
    with pytest.raises(CheckpointError, match="index"):
        parse_index(text.encode(), name="x")


def test_counters_are_read_without_torch(file_root):
    pin = save(file_root).pin()
    code = (
        "import sys; from planish.checkpoint.api import read_state_info\n"
        f"assert read_state_info({pin!r})['data']['next'] == 4\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_state_of_another_schema_is_refused(file_root):
    ref = save(file_root)
    manifest, text = seal("policy/1", 0, read_manifest(ref.uri).shards, {}, {})
    open_store(ref.uri).write(manifest_uri(ref.uri), text)
    with pytest.raises(CheckpointError, match="policy/1"):
        api.load(manifest.ref(ref.uri).pin(), {})
