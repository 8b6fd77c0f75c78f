"""The prepare stage finds out whether a KL penalty has its reference before anything is spent."""

import pytest
import torch

from planish import store
from planish.base.errors import ConfigError
from planish.checkpoint import train_state as checkpoint
from planish.records import layout
from planish.records.io import write_files
from planish.stages.prepare.stage import prepare
from tests.unit.stages.prepare.test_prepare_stage import SMALL, wish

PENALTY = f"{SMALL} algorithm.kl_coefficient=0.04"
FIRST = "policies/00000"


def a_policy(root, version, parents):
    files = {"p": b"%d" % version}
    uri = layout.policy(root, version)
    return write_files(uri, "policy/1", files, parents=parents, attributes={})


def finish(root, *, names_reference=True, **facts):
    """Leave what the two iterations of a first run do."""
    first = a_policy(root, 0, {})
    name = {"reference": first.pin().removeprefix(f"{root}/")} if names_reference else {}
    state = checkpoint.save(
        layout.state(root, 2),
        {"model": {"w": torch.zeros(1)}, "extra": {"step": 2, **name, **facts}},
        parents={},
        attributes={"step": 2},
    )
    a_policy(root, 2, {"state": state.manifest_sha256})
    return first


def test_a_new_run_has_no_reference_to_look_for_and_its_plan_tells_the_penalty(file_root):
    outcome = prepare(file_root, wish(overrides=PENALTY))
    told = "| penalty | 0.04 x KL to the policy that training began with |"
    assert told in outcome.documents["summary"]
    assert "penalty" not in prepare(f"{file_root}/other", wish()).documents["summary"]


def test_chained_and_forked_runs_have_the_reference_that_the_state_names(file_root):
    prepare(file_root, wish(overrides=PENALTY))
    finish(file_root)
    prepare(file_root, wish(overrides=PENALTY, index=1))
    prepare(f"{file_root}/fork", wish(overrides=PENALTY, resume_from=file_root))
    store.delete(f"{file_root}/{FIRST}/manifest.json")
    for place, more in ((file_root, {"index": 1}), ("fork2", {"resume_from": file_root})):
        root = place if place == file_root else f"{file_root}/{place}"
        with pytest.raises(ConfigError, match="the reference policy of the KL penalty must be at"):
            prepare(root, wish(overrides=PENALTY, **more))


def test_a_penalty_that_comes_later_needs_a_pinned_reference(file_root):
    prepare(file_root, wish())
    first = finish(file_root, names_reference=False)
    prepare(file_root, wish(index=1))
    late = {"overrides": PENALTY, "index": 1, "allow_config_change": True}
    with pytest.raises(ConfigError, match="must name the reference policy"):
        prepare(file_root, wish(**late))
    late["overrides"] += f" train.reference_policy={first.pin()}"
    summary = prepare(file_root, wish(**late)).documents["summary"]
    assert f"| penalty | 0.04 x KL to `{first.pin()}` |" in summary


def test_adapters_are_those_of_the_state_that_a_run_goes_on_from(file_root):
    rank = f"{SMALL} model.lora_rank="
    prepare(file_root, wish(overrides=f"{rank}4"))
    lora = {"rank": 4, "alpha": 32.0, "target_modules": []}
    finish(file_root, lora=lora)
    prepare(file_root, wish(overrides=f"{rank}4", index=1))
    for place, more in ((file_root, {"index": 1}), ("fork", {"resume_from": file_root})):
        root = place if place == file_root else f"{file_root}/{place}"
        for number, words in ((8, "rank 8"), (0, "all weights")):
            changed = wish(overrides=f"{rank}{number}", allow_config_change=True, **more)
            with pytest.raises(ConfigError, match=f"rank 4, alpha.*got {words}.*undo the change"):
                prepare(root, changed)
