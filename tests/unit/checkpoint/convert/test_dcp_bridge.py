"""Torch's own checkpoints: read without running them, written so that torch loads them."""

import collections
import os
import pickle
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from planish.base.errors import CheckpointCorrupt, CheckpointIncomplete
from planish.checkpoint import api
from planish.checkpoint.adapters.gathering import OPTIMIZER
from planish.checkpoint.convert import dcp_bridge
from planish.checkpoint.convert.dcp_bridge import export_dcp, import_dcp
from planish.checkpoint.convert.dcp_pickle import read_dcp_metadata
from planish.checkpoint.convert.diff import diff
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.small_objects import decode_extra
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.loading.slices import SliceReader
from tests.thin import examples
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import stored, tiny_model, write_checkpoint


def state():
    torch.manual_seed(3)
    return {
        "model": {
            "w": torch.randn(4, 6).t(), "b": torch.randn(5).to(torch.bfloat16),
            "f8": torch.randn(3).to(torch.float8_e4m3fn), "flag": torch.tensor([True, False]),
            "view": torch.randn(100, 7)[3:9, 2:], "empty": torch.zeros(0, 3),
        },
        "optim": {
            "state": {"w": {"exp_avg": torch.randn(6, 4), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": ["w"]}],
        },
    }  # fmt: skip


def save(folder, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=folder, no_dist=True)


def load(folder, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(value, checkpoint_id=folder, no_dist=True)


def raw(tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(RAW[tensor.element_size()]).reshape(tuple(tensor.shape))


def test_a_folder_of_torch_becomes_a_checkpoint_with_every_bit(tmp_path):
    value = state()
    save(tmp_path / "dcp", value)
    info = import_dcp(tmp_path / "dcp", damage.fresh(), step=12)
    opened = open_state(info.pin)
    assert (info.step, opened.commit.step) == (12, 12)
    reader = SliceReader(opened)
    for name, tensor in value["model"].items():
        assert np.array_equal(reader.read(stored(reader, name)), raw(tensor)), name
    for name, tensor in value["optim"]["state"]["w"].items():
        found = reader.read(stored(reader, f"w.{name}", kind="optim"))
        assert np.array_equal(found, raw(tensor)), name
    key = opened.metadata.objects["main"]["shared"]
    (group,) = decode_extra(reader.reader.read_file(key))["optimizer"]["groups"]
    assert group == {"params": ["w"], "options": {"lr": 0.125, "betas": (0.9, 0.95)}}


@pytest.mark.parametrize("is_flat", [False, True])
def test_an_imported_optimizer_goes_on_with_its_groups_and_its_steps(tmp_path, is_flat):
    def made(rates):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": rates[1], "weight_decay": 0.3}]
        return model, torch.optim.AdamW(groups, lr=rates[0], betas=(0.8, 0.99))

    model, optimizer = made((0.01, 0.02))
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    save(tmp_path / "dcp", {"model": weights, "optim": states, "step": 7})
    place = f"{tmp_path}/imported"
    assert api.import_dcp(tmp_path / "dcp", place).step == 7
    again, fresh = made((0.5, 0.6))
    for group in fresh.param_groups:
        group["weight_decay"], group["betas"] = 0.7, (0.1, 0.2)
    api.load(place, {"model": again, "optimizer": fresh})
    assert [(g["lr"], g["weight_decay"], tuple(g["betas"])) for g in fresh.param_groups] == [
        (0.01, 0.01, (0.8, 0.99)),
        (0.02, 0.3, (0.8, 0.99)),
    ]
    assert {float(state["step"]) for state in fresh.state.values()} == {3.0}
    for one, other in ((model, optimizer), (again, fresh)):
        one.zero_grad()
        one(torch.ones(1, 3)).sum().backward()
        other.step()
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_an_optimizer_that_knows_parameters_by_number_is_kept_and_told(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path / "dcp", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    opened = open_state(import_dcp(tmp_path / "dcp", damage.fresh()).pin)
    shared = decode_extra(
        SliceReader(opened).reader.read_file(opened.metadata.objects["main"]["shared"])
    )
    assert shared["dcp"]["optimizer.param_groups.0.lr"] == 0.1
    assert "optimizer_not_named groups=[[0, 1]]" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1 << 28, 64])
def test_torch_loads_what_is_written_for_it_and_it_comes_back_equal(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(dcp_bridge, "CHUNK_BYTES", chunk)

    def columns(spec, rank):
        step = -(-spec.shape[-1] // 2) if spec.shape else 1
        start = min(rank * step, spec.shape[-1]) if spec.shape else 0
        stop = min(start + step, spec.shape[-1]) if spec.shape else 0
        zeros = (0,) * (len(spec.shape) - 1)
        whole = (Box((), ()),)
        cut = (Box((*zeros, start), (*spec.shape[:-1], stop - start)),)
        return cut if spec.shape else whole

    tensors = tiny_model()
    place = write_checkpoint(damage.fresh(), tensors, columns, num_ranks=2, extra=False)
    export_dcp(place, tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    wanted = {"model": {}, "optim": {"state": collections.defaultdict(dict)}}
    for spec in tensors:
        empty = torch.zeros(spec.shape)
        if spec.kind == "model":
            wanted["model"][spec.fqn] = empty
        elif "." in spec.fqn:
            parameter, _, name = spec.fqn.rpartition(".")
            wanted["optim"]["state"][parameter][name] = empty
        else:
            wanted["optim"][spec.fqn] = empty
    load(tmp_path / "dcp", wanted)
    for spec, array in tensors.items():
        parameter, _, name = spec.fqn.rpartition(".")
        seen = (
            wanted["model"][spec.fqn] if spec.kind == "model"
            else wanted["optim"]["state"][parameter][name] if parameter
            else wanted["optim"][name]
        )  # fmt: skip
        assert np.array_equal(raw(seen), array), spec.fqn
    again = import_dcp(tmp_path / "dcp", damage.fresh())
    assert diff(place, again.pin).is_equal


def test_shared_values_travel_both_ways(tmp_path):
    save(tmp_path / "a", state())
    first = import_dcp(tmp_path / "a", damage.fresh())
    export_dcp(first.pin, tmp_path / "b")
    assert (
        f"shared.{OPTIMIZER}" in read_dcp_metadata((tmp_path / "b/.metadata").read_bytes()).values
    )
    second = import_dcp(tmp_path / "b", damage.fresh())
    assert diff(first.pin, second.pin).values == ["main"]
    assert diff(first.pin, second.pin).differing == []


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("/tmp/planish-must-not-exist",)


HOSTILE = {
    "a function": pickle.dumps(Bomb()),
    "a class in a record": pickle.dumps({"state_dict_metadata": Bomb()}),
    "other metadata": pickle.dumps({"state_dict_metadata": {}, "storage_data": {}}),
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02Pname\n.",
    "a far memo": b"\x80\x04}r\xff\xff\xff\x7f.",
    "deep tuples": b"\x80\x04)" + b"\x85" * 50_000 + b".",
    "eval by name": b"\x80\x04cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    "an attribute of a name": b"\x80\x04\x8c\x05torch\x8c\x0fserialization.os\x93.",
    "nothing": b"",
    "text": b"hello",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_metadata_names_is_run(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointCorrupt, match=r"nothing in it has been run|must hold"):
        import_dcp(tmp_path, damage.fresh())
    assert not os.path.exists("/tmp/planish-must-not-exist")


@pytest.fixture(scope="module")
def real_metadata(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    save(folder, state())
    return (folder / ".metadata").read_bytes()


@pytest.mark.slow
@settings(max_examples=examples(400))
@given(data=st.data())
def test_mutated_metadata_gives_our_error_or_plain_records(real_metadata, data):
    changed = bytearray(real_metadata)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    stop = data.draw(st.integers(0, len(changed)))
    try:
        found = read_dcp_metadata(bytes(changed[: stop or None]))
    except CheckpointCorrupt:
        return
    assert all(type(side) is int for tensor in found.tensors.values() for side in tensor.shape)


def test_a_value_that_needs_code_is_refused(tmp_path):
    save(tmp_path, {"model": {"w": torch.zeros(2)}, "hook": Bomb})
    with pytest.raises(CheckpointCorrupt, match="`hook` must hold plain values"):
        import_dcp(tmp_path, damage.fresh())


def test_missing_short_and_strange_files_are_told(tmp_path):
    with pytest.raises(CheckpointIncomplete, match="no DCP checkpoint"):
        import_dcp(tmp_path, damage.fresh())
    for harm, error, text in (
        (lambda p: p.unlink(), CheckpointIncomplete, "must be there"),
        (lambda p: p.write_bytes(p.read_bytes()[:2000]), CheckpointIncomplete, "bytes, got 2000"),
        (lambda p: p.write_bytes(bytes(p.stat().st_size)), CheckpointCorrupt, "must be a saved"),
    ):
        folder = tmp_path / "dcp"
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, {"model": state()["model"]})
        harm(folder / "__0_0.distcp")
        with pytest.raises(error, match=text):
            import_dcp(folder, damage.fresh())


def test_files_outside_of_the_folder_are_never_opened(tmp_path, real_metadata):
    (tmp_path / ".metadata").write_bytes(
        real_metadata.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0c../../passwd")
    )
    with pytest.raises(CheckpointCorrupt, match="in a file of the folder"):
        import_dcp(tmp_path, damage.fresh())
