"""The train stage on real files: resume, repetition, interruption, bad input."""

import json

import numpy as np
import pytest
import torch

from planish import store
from planish.checkpoint import train_state as api
from planish.checkpoint.adapters.placement import TYPES
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.refs import parse_pin
from planish.records.reports import UpdateReport, read_report
from planish.run.stage import mark_stopped
from planish.stages.export.stage import run as run_export
from tests.golden.write import ALGORITHMS, LOSSES, golden_losses
from tests.integration import programs
from tests.rounding import STEPS, VALUES
from tests.unit.stages.train.runs import (
    add_iteration,
    artifact,
    random_rollouts,
    start_run,
    train_once,
)


def all_tensors(pin):
    """Every tensor of a state, loaded into one process."""
    names = {(role, api.KINDS[name]): part for part, (role, name) in api.PARTS.items()}
    tensors = api.open_checkpoint(pin).metadata.tensors
    state: dict = {}
    for spec in (tensors.spec(row) for row in range(len(tensors))):
        blank = torch.zeros(spec.shape, dtype=TYPES[spec.dtype])
        fqn = spec.fqn.removeprefix("random.") if spec.kind == "extra" else spec.fqn
        state.setdefault(names[spec.role, spec.kind], {})[fqn] = blank
    api.load(pin, state)
    return {f"{part}.{name}": t for part, values in state.items() for name, t in values.items()}


def train_all(tiny, folder, iterations, state_pin=""):
    pins = []
    for iteration in iterations:
        rewards = add_iteration(tiny, iteration)
        state_pin = train_once(tiny, iteration, state_pin, rewards, folder / str(iteration))
        pins.append(state_pin)
    return pins


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ten_steps_give_the_golden_losses_and_gradient_norms(algorithm, file_root):
    wanted = np.loadtxt(LOSSES / f"{algorithm}.txt")
    seen = np.array(
        [
            [float(x) for x in line.split()]
            for line in golden_losses(algorithm, file_root).splitlines()
        ]
    )
    assert wanted.shape == (10, 5 if algorithm in ("vapo", "tppo") else 3)
    np.testing.assert_allclose(seen, wanted, rtol=STEPS, atol=VALUES)


def test_state_report_and_cursor_after_two_iterations(file_root, tmp_path):
    tiny = start_run(file_root)
    pins = train_all(tiny, tmp_path, (1, 2))
    info = api.read_state_info(pins[1])
    assert (info["step"], info["updates"], info["iterations"]) == (8, 8, 2)
    assert info["policy_version"] == 2
    assert info["data"] == {"next": 16, "pending": []}
    assert parse_pin(pins[1])[0] == layout.state(file_root, 8)
    assert api.latest(file_root).pin() == pins[1]
    report = read_report(UpdateReport, layout.update(file_root, 2))
    assert len(report.minibatches) == 4
    assert report.scalars["num_rollouts"] == 32
    assert report.attributes["iteration"] == 2
    parents = read_manifest(parse_pin(pins[1])[0]).parents
    assert parents["state"] == parse_pin(pins[0])[1]
    metrics = json.loads((tmp_path / "2" / "metrics").read_text())
    assert metrics["step"] == 8.0
    assert metrics["tokens_per_second"] > 0


def test_a_new_process_that_resumes_arrives_at_the_bytes_of_going_on(file_root, tmp_path):
    tiny = start_run(file_root)
    first, second = train_all(tiny, tmp_path / "out", (1, 2))
    for uri in store.list_uris(layout.state(tiny.root, 8)):
        store.delete(uri)
    assert parse_pin(run_stage(tiny, 2, first, tmp_path / "again"))[1] == parse_pin(second)[1]


def run_stage(tiny, iteration, state_pin, out):
    """Run the stage in a process of its own; return the pin of its state."""
    words = stage_words(tiny, iteration, state_pin, out)
    code, told = programs.run("planish.run", *words)
    assert code == 0, told[-3000:]
    return json.loads((out / "values").read_text())["state_pin"]


def stage_words(tiny, iteration, state_pin, out):
    rewards = read_manifest(layout.rewards(tiny.root, iteration)).ref(
        layout.rewards(tiny.root, iteration)
    )
    options = {
        "root": tiny.root, "config-sha256": tiny.digest, "number": iteration, "offset": 0,
        "num-shards": 2, "policy-pin": tiny.policy_pin, "state-pin": state_pin,
        "rewards": artifact(out, "rewards", rewards).path, "state": str(out / "state"),
        "metrics": str(out / "metrics"), "values": str(out / "values"),
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in options.items())]


def test_a_finished_task_is_free_and_returns_the_same_state(file_root, tmp_path):
    tiny = start_run(file_root)
    rewards = add_iteration(tiny, 1)
    first = train_once(tiny, 1, "", rewards, tmp_path / "1")
    log = layout.stage_log(tiny.root, "train", 1, 0)
    again = train_once(tiny, 1, "", rewards, tmp_path / "2")
    assert again == first
    entry = json.loads(store.read(log))
    assert entry["already_done"] is True
    assert entry["metrics"]["step"] == 4.0


def test_an_iteration_without_rollouts_advances_cursor_and_step_but_no_weight(file_root, tmp_path):
    tiny = start_run(file_root)
    (first,) = train_all(tiny, tmp_path, (1,))
    rewards = add_iteration(tiny, 2, keep_none=True)
    second = train_once(tiny, 2, first, rewards, tmp_path / "2")
    info = api.read_state_info(second)
    assert (info["step"], info["updates"]) == (5, 4)
    assert info["data"]["next"] == 16
    before, after = all_tensors(first), all_tensors(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_stopped_iteration_passes_state_and_policy_through(file_root, tmp_path):
    tiny = start_run(file_root)
    (first,) = train_all(tiny, tmp_path, (1,))
    rewards = add_iteration(tiny, 2)
    store.write(layout.stop_file(file_root), b"{}")
    assert mark_stopped(file_root, 2)
    assert train_once(tiny, 2, first, rewards, tmp_path / "2") == first
    assert train_once(tiny, 2, "", rewards, tmp_path / "3") == ""
    policy = artifact(tmp_path / "4", "policy")
    result = run_export(
        tiny.root, tiny.digest, 2, 0, tiny.policy_pin, artifact(tmp_path / "2", "state"), policy
    )  # fmt: skip
    assert result.policy_pin == tiny.policy_pin


def test_checkpoint_stage_exports_the_trained_weights_once(file_root, tmp_path):
    tiny = start_run(file_root)
    (state_pin,) = train_all(tiny, tmp_path, (1,))

    def export(name):
        policy = artifact(tmp_path / name, "policy")
        found = run_export(
            tiny.root, tiny.digest, 1, 0, tiny.policy_pin, artifact(tmp_path / "1", "state"), policy
        )  # fmt: skip
        assert policy.metadata["policy_version"] == 1
        assert policy.metadata["policy_bytes"] > 10_000
        return found.policy_pin

    pin = export("a")
    policy = load_policy(pin)
    assert policy.version == 1
    tensors = all_tensors(state_pin)
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, tensors[f"model.{name}"]), name
    assert not torch.equal(policy.model.lm_head.weight, tiny.policy.model.lm_head.weight)
    assert export("b") == pin


def failing(tiny, iteration, state_pin, rewards, folder):
    with pytest.raises(SystemExit) as caught:
        train_once(tiny, iteration, state_pin, rewards, folder)
    log = layout.stage_log(tiny.root, "train", iteration, 0)
    return caught.value.code, json.loads(store.read(log))["error"]


def test_rewards_of_other_rollouts_are_refused(file_root, tmp_path):
    tiny = start_run(file_root)
    rewards = add_iteration(tiny, 1)
    other = random_rollouts(tiny.policy, 99)
    write_set(layout.rollouts(file_root, 1, 1), other, parents={}, attributes={})
    code, error = failing(tiny, 1, "", rewards, tmp_path)
    assert code == 1
    assert "run the reward stage of iteration 1 again" in error


def test_a_prompt_consumed_twice_is_refused(file_root, tmp_path):
    tiny = start_run(file_root)
    (first,) = train_all(tiny, tmp_path, (1,))
    sets = add_iteration(tiny, 1), add_iteration(tiny, 2)
    for shard in range(2):
        made = random_rollouts(tiny.policy, 200 + shard)
        write_set(
            layout.rollouts(file_root, 2, shard), made, parents={}, attributes={"consumed": [0, 1]}
        )
    parents = {
        f"rollouts-{s:02d}": read_manifest(layout.rollouts(file_root, 2, s)).sha256 for s in (0, 1)
    }
    from planish.records.io import read_set
    from planish.records.rewards import RewardSet

    rewards = write_set(
        f"{file_root}/other", read_set(RewardSet, sets[1].uri), parents=parents, attributes={}
    )
    code, error = failing(tiny, 2, first, rewards, tmp_path / "2")
    assert code == 1
    assert "consumed once" in error
