"""The experts of each token through windows, surplus, kills and retries, on a real engine."""

import numpy as np
import pytest
import torch

from planish.models.policy import load_policy, save_policy
from planish.records import layout
from planish.records.io import read_set
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.rollout.groups import Slot
from tests.unit.records.samples import take_groups
from tests.unit.stages.rollout.stage_run import after_iteration, easy_policy
from tests.unit.stages.rollout.test_commits import Killed, kill_after

KEPT = {"keep_routing": True}
WINDOWS = {"dynamic_sampling": False, "window_tokens": 3, "temperature": 5.0, **KEPT}
MOST_BORDERS = 0.02
"""Share of choices that may differ: two experts whose scores are equal up to rounding."""


@pytest.fixture
def experts_run(new_run):
    """A run whose policy has four experts, two for each token."""

    def make(**changes):
        run = new_run(**changes)
        serve(run, 0)
        return run

    return make


def serve(run, version, spaces=0):
    """Let a policy with experts sample next."""
    uri = f"{run.root}/experts/{version}"
    policy = easy_policy(spaces, num_experts=4)
    run.policy_pin = save_policy(uri, policy, version=version, parents={}, attributes={}).pin()


def plain_routing(pin, ids):
    """Return [tokens, layers, k] of a forward over all tokens."""
    model, chosen = load_policy(pin).model, []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, given: chosen.append(given[2]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(chosen, 1).numpy()


def share_of_others(rollouts, row, pin):
    """Return the share of choices that a plain forward does not make; the last token has none."""
    routing = rollouts.routing_of(row)
    group = int(rollouts.group_index[row])
    ids = [*rollouts.prompt_tokens.row(group).tolist(), *rollouts.response_tokens.row(row).tolist()]
    assert routing.shape == (len(ids), 1, 2)
    assert (routing[-1] == -1).all()
    expected = plain_routing(pin, ids[:-1])
    return float((np.sort(routing[:-1], -1) != np.sort(expected, -1)).mean())


@pytest.mark.slow
def test_whole_responses_keep_the_experts_of_prompt_and_response(experts_run):
    run = experts_run(**KEPT)
    ref, _ = run.call()
    rollouts = read_set(RolloutSet, ref.uri)
    assert rollouts.routing.values.dtype == np.int8
    shares = [share_of_others(rollouts, r, run.policy_pin) for r in range(rollouts.num_rows)]
    assert np.mean(shares) < MOST_BORDERS
    replayed = experts_run(tables={"train": {"replay_routing": True}})
    assert read_set(RolloutSet, replayed.call()[0].uri) == rollouts
    plain = experts_run()
    other = read_set(RolloutSet, plain.call()[0].uri)
    assert other.routing is None
    without = read_set(RolloutSet, ref.uri, with_optional=False)
    assert without == other


@pytest.mark.slow
def test_tokens_of_earlier_windows_keep_their_experts(experts_run):
    run = experts_run(**WINDOWS)
    before, state, num_longer = {}, "", 0
    for number in (1, 2, 3):
        run.call(state_pin=state, number=number)
        rollouts = read_set(RolloutSet, layout.rollouts(run.root, number, 0))
        ordinals = run.attributes(number)["ordinals"]
        for row in range(rollouts.num_rows):
            key = ordinals[rollouts.group_index[row]], int(rollouts.sample_index[row])
            routing = rollouts.routing_of(row)
            assert len(routing) == rollouts.num_tokens()[row]
            assert (routing[-1] == -1).all()
            assert (routing[:-1] >= 0).all()
            if key in before:
                num_longer += 1
                known = before[key][:-1]
                assert (routing[: len(known)] == known).all()
            if rollouts.finish[row] == FinishReason.WINDOW:
                before[key] = routing
        state = after_iteration(run, number, 1)
        serve(run, number, spaces=number)
    assert num_longer > 10


@pytest.mark.slow
@pytest.mark.parametrize("changes", [KEPT, WINDOWS], ids=["whole", "windows"])
def test_a_kill_after_a_commit_changes_no_digest(experts_run, changes):
    changes = {**changes, "commit_steps": 1, "max_rows": 8}
    digest = experts_run(**changes).call()[0].manifest_sha256
    for number in (1, 3):
        run = experts_run(**changes)
        patch = kill_after(number)
        with pytest.raises(Killed):
            run.call()
        patch.undo()
        assert run.call()[0].manifest_sha256 == digest


@pytest.mark.slow
def test_surplus_groups_bring_their_experts_along(experts_run):
    run = experts_run(generation_prompts_factor=4.0, max_staleness=1, **KEPT)
    run.call()
    surplus = read_set(RolloutSet, layout.surplus(run.root, 1, 0))
    assert surplus.routing is not None
    state = after_iteration(run, 1, 1)
    serve(run, 1)
    _, metrics = run.call(state_pin=state, number=2)
    used = int(metrics["ds/surplus_used"])
    assert used > 0
    made = take_groups(read_set(RolloutSet, layout.rollouts(run.root, 2, 0)), range(used))
    ordinals = np.argsort(run_ordinals(run))
    assert made == take_groups(surplus, ordinals[:used])


def run_ordinals(run):
    from planish.records.io import read_manifest

    return read_manifest(layout.surplus(run.root, 1, 0)).attributes["ordinals"]


def test_what_was_sampled_before_it_was_asked_for_is_unknown():
    old = Slot(0).extended([5, 6], [-0.5, -0.1], [0, 0], FinishReason.WINDOW)
    # Three prompt tokens and two of the response before, then two new ones: six inputs.
    routing = np.arange(12, dtype=np.int8).reshape(6, 1, 2)
    slot = old.extended([7, 8], [-0.2, -0.3], [1, 1], FinishReason.WINDOW, routing)
    assert slot.routing[:, 0, 0].tolist() == [-1, -1, -1, -1, 8, 10, -1]
    further = np.full((8, 1, 2), 3, np.int8)
    again = slot.extended([9, 2], [-0.2, -0.3], [2, 2], FinishReason.STOP, further)
    assert again.routing[:, 0, 0].tolist() == [-1, -1, -1, -1, 8, 10, 3, 3, -1]
    silent = slot.extended([9], [-0.2], [2], FinishReason.STOP)
    assert silent.routing[:, 0, 0].tolist() == [-1, -1, -1, -1, 8, 10, -1, -1]
    assert slot.extended([], [], [], FinishReason.WINDOW, routing).routing is slot.routing
