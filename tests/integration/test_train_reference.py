"""A KL penalty on real files: its reference from the first iteration through chains and forks."""

import json
from dataclasses import replace

import pytest

from planish import store
from planish.base.config import config_sha256
from planish.checkpoint import train_state as api
from planish.checkpoint.convert import export_hf
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.records.reports import UpdateReport, read_report
from tests.integration.test_train_critic import critic_config, train_windows
from tests.integration.test_train_processes import largest_difference, trained_by_one_and_two
from tests.integration.test_train_stage import train_all
from tests.rounding import STEPS
from tests.unit.stages.train.runs import (
    add_iteration,
    start_run,
    tiny_config,
    train_once,
)


def penalised(coefficient=0.5, algorithm="grpo", **train):
    config = tiny_config(algorithm, **train)
    if coefficient:
        config["algorithm"]["kl_coefficient"] = coefficient
    return config


def reconfigured(tiny, config):
    """The same run under another configuration, as with `allow_config_change`."""
    document = json.dumps({"config": config}).encode()
    store.write(layout.run_file(tiny.root), document)
    return replace(tiny, config=config, digest=config_sha256(config))


def report_of(tiny, iteration):
    return read_report(UpdateReport, layout.update(tiny.root, iteration))


def export(tiny, state_pin):
    """Export the policy after the first iteration, as the checkpoint stage does."""
    place, facts = layout.policy(tiny.root, 1), {"policy_version": 1}
    pin = api.checkpoint_pin(state_pin)
    return export_hf.export(pin, place, policy=tiny.policy_pin, parents={}, attributes=facts)


def reference_of(pin):
    return api.read_state_info(pin).get("reference")


def test_a_fresh_run_is_at_its_reference_and_then_moves_away_from_it(file_root, tmp_path):
    tiny = start_run(file_root, penalised())
    first, second = train_all(tiny, tmp_path, (1, 2))
    steps = [step["reference_kl"] for k in (1, 2) for step in report_of(tiny, k).minibatches]
    assert abs(steps[0]) < 1e-6
    assert min(steps[1:]) > 1e-5
    # Every mini-batch of the second iteration is farther away than the first two were.
    assert min(steps[4:]) > max(steps[:2])
    metrics = json.loads((tmp_path / "2" / "metrics").read_text())
    assert metrics["reference_kl"] == pytest.approx(sum(steps[4:]) / 4)
    assert reference_of(first) == reference_of(second)
    assert f"{file_root}/{reference_of(second)}" == tiny.policy_pin
    parents = read_manifest(parse_pin(second)[0]).parents
    assert parents["reference"] == parse_pin(tiny.policy_pin)[1]


def test_later_iterations_keep_the_first_policy_whatever_policy_sampled(file_root, tmp_path):
    tiny = start_run(file_root, penalised())
    (first,) = train_all(tiny, tmp_path, (1,))
    # As in a run, the policy of iteration 2 is not that of iteration 1.
    ref = export(tiny, first)
    moved = replace(tiny, policy_pin=ref.pin())
    rewards = add_iteration(tiny, 2)
    second = train_once(moved, 2, first, rewards, tmp_path / "2")
    assert reference_of(second) == reference_of(first)
    assert report_of(tiny, 2).minibatches[0]["reference_kl"] > 1e-5


def test_a_fork_keeps_the_reference_of_the_other_root_and_passes_it_on(tmp_path):
    old = start_run(f"file://{tmp_path}/old", penalised())
    state, going_on = train_all(old, tmp_path / "old-out", (1, 2))
    fork = start_run(f"file://{tmp_path}/fork", penalised())
    # It goes on where the other was after one iteration; prompts are numbered on.
    forked = train_all(replace(fork, policy_pin=old.policy_pin), tmp_path / "out", (2, 3), state)
    assert [reference_of(pin) for pin in forked] == [old.policy_pin] * 2
    assert reference_of(going_on) == old.policy_pin.removeprefix(f"{old.root}/")
    assert report_of(fork, 2).minibatches == report_of(old, 2).minibatches


def test_an_iteration_without_a_penalty_passes_the_reference_on(file_root, tmp_path):
    tiny = start_run(file_root, penalised())
    (first,) = train_all(tiny, tmp_path, (1,))
    (second,) = train_all(reconfigured(tiny, penalised(0.0)), tmp_path / "off", (2,), first)
    (third,) = train_all(reconfigured(tiny, penalised()), tmp_path / "on", (3,), second)
    assert reference_of(first) == reference_of(second) == reference_of(third)
    assert "reference" not in read_manifest(parse_pin(second)[0]).parents
    assert "reference_kl" not in report_of(tiny, 2).scalars
    assert "reference_kl" in report_of(tiny, 3).scalars


def test_value_pretraining_only_names_the_reference_and_windows_are_held_near_it(
    file_root, tmp_path
):
    config = critic_config("tppo", pretrain_iterations=1)
    config["algorithm"]["kl_coefficient"] = 0.5
    tiny = start_run(file_root, config)
    first, second = train_windows(tiny, tmp_path, (1, 2))
    assert f"{file_root}/{reference_of(first)}" == tiny.policy_pin
    assert reference_of(second) == reference_of(first)
    assert all("reference_kl" not in step for step in report_of(tiny, 1).minibatches)
    steps = [step["reference_kl"] for step in report_of(tiny, 2).minibatches]
    # The policy has stood still so far.
    assert abs(steps[0]) < 1e-6
    assert min(steps[1:]) > 1e-5


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """Two iterations with a penalty, trained by one process and by two."""
    config = penalised(tokens_per_microbatch=96)
    return trained_by_one_and_two(tmp_path_factory, "penalised", config)


def test_two_processes_have_losses_divergence_and_weights_of_one(one_and_two):
    (_, pin, steps, tensors), (_, other_pin, others, moved) = (one_and_two[k] for k in (1, 2))
    for one, two in zip(steps, others, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "grad_norm", "entropy", "approx_kl", "reference_kl"):
            assert two[name] == pytest.approx(one[name], abs=STEPS, rel=STEPS), name
    assert abs(others[0]["reference_kl"]) < STEPS < others[-1]["reference_kl"]
    difference = largest_difference(tensors, moved)
    print(f"largest difference of weights and moments with a penalty {difference:.2e}")
    assert difference < STEPS
    assert reference_of(pin) == reference_of(other_pin)
