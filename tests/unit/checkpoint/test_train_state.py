"""Train states: checkpoints with a manifest, their round trips and their damage."""

import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from planish import store
from planish.base.errors import CheckpointError, CheckpointIncomplete, LayoutMismatch, RecordError
from planish.checkpoint import api as checkpoint
from planish.checkpoint import train_state as api
from planish.records import layout
from planish.records.manifest import manifest_uri, read_manifest, seal
from tests.processes import python

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


def test_saving_over_another_state_replaces_it_whole(file_root):
    state = make_state()
    before = save(file_root)
    ref = save(file_root, state={"model": {"w": torch.ones(2)}, "extra": {}})
    assert api.parts(ref.pin()) == {"model"}
    with pytest.raises(LayoutMismatch, match=r"a\.weight"):
        api.load(ref.pin(), blank(state))
    with pytest.raises(RecordError, match="sha256"):
        api.load(before.pin(), blank(state))


def test_a_save_that_fails_leaves_the_state_that_it_would_have_replaced(file_root):
    ref = save(file_root)
    with pytest.raises(TypeError, match="not_data"):
        save(file_root, state=make_state() | {"extra": {"not_data": object()}})
    assert api.load(ref.pin(), blank(make_state())) == make_state()["extra"]
    assert api.latest(file_root) == ref


def test_a_record_whose_checkpoint_was_replaced_before_the_new_record_came_is_not_the_latest(
    file_root,
):
    before = save(file_root, step=2)
    ref = save(file_root, step=3)
    # What a kill between the commit and the new manifest leaves.
    roles = {"policy": {"model": {"w": torch.ones(2)}}}
    checkpoint.save(ref.uri, roles, "plain", False, step=3, overwrite=True)
    with pytest.raises(CheckpointError, match="it was overwritten"):
        api.load(ref.pin(), blank(make_state()))
    assert api.latest(file_root) == before


def test_a_critic_is_a_role_of_the_same_checkpoint(file_root):
    state = make_state() | {"critic": {"head": torch.ones(3)}, "critic_optimizer": {}}
    pin = save(file_root, state=state).pin()
    assert api.parts(pin) == {"model", "optimizer", "random", "critic"}
    assert api.open_checkpoint(pin).commit.roles == ("critic", "policy")
    target = {"critic": {"head": torch.zeros(3)}}
    with pytest.raises(LayoutMismatch, match="`model`, `optimizer`"):
        api.load(pin, target)
    api.load(pin, target, strict=False)
    assert target["critic"]["head"].tolist() == [1, 1, 1]


def test_load_refuses_a_state_without_manifest(file_root):
    ref = save(file_root)
    store.delete(manifest_uri(ref.uri))
    for call in (lambda: api.load(ref.pin(), {}), lambda: api.read_state_info(ref.pin())):
        with pytest.raises(CheckpointIncomplete, match="never finished"):
            call()


def test_latest_is_the_highest_finished_step(file_root):
    assert api.latest(file_root) is None
    save(file_root, step=8)
    newest = save(file_root, step=24)
    save(file_root, step=16)
    unfinished = save(file_root, step=40)
    store.delete(manifest_uri(unfinished.uri))
    assert api.latest(file_root) == newest


@pytest.mark.parametrize(
    "file", ["policy.model/00000-0.safetensors", "global.bin", "policy.extra/shared.bin", "COMMIT"]
)
def test_a_file_that_became_a_pickle_is_refused_and_never_run(file_root, file, capsys):
    ref = save(file_root)
    (place,) = (uri for uri in store.list_uris(ref.uri) if uri.endswith(file))
    path = Path(place.removeprefix("file://"))
    path.unlink()
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        api.load(ref.pin(), blank(make_state()))
    assert "PICKLE RAN" not in capsys.readouterr().out


class Bomb:
    def __reduce__(self):
        return (exec, ("print('PICKLE RAN')",))


@pytest.mark.slow
def test_counters_are_read_without_torch(file_root):
    pin = save(file_root).pin()
    code = (
        "import sys; from planish.checkpoint.train_state import read_state_info\n"
        f"assert read_state_info({pin!r})['data']['next'] == 4\n"
        "assert 'torch' not in sys.modules"
    )
    assert python("-c", code).returncode == 0


def test_a_state_of_another_schema_is_refused(file_root):
    ref = save(file_root)
    manifest, text = seal("policy/1", 0, read_manifest(ref.uri).shards, {}, {})
    store.write(manifest_uri(ref.uri), text)
    with pytest.raises(CheckpointError, match="policy/1"):
        api.load(manifest.ref(ref.uri).pin(), {})


@pytest.mark.parametrize(("hours", "stays"), [(2.0, False), (0.5, True)])
@pytest.mark.parametrize("step", [2, 4])
def test_what_killed_saves_of_other_steps_have_left_goes_at_a_commit(tmp_path, step, hours, stays):
    root = f"file://{tmp_path}"
    kept = save(root, 1)
    left = tmp_path / "states" / f"step-{step:08d}" / f"a-{'0' * 26}" / "data" / "0.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"0")
    at = time.time() - 3600 * hours
    os.utime(left, (at, at))
    save(root, 3)
    assert left.exists() == stays
    assert api.read_state_info(kept.pin())
