"""Rollouts that another network has sampled end the run, at whatever iteration they come."""

from dataclasses import replace

import numpy as np
import pytest

from planish.records.ragged import Ragged
from planish.stages.train.batching import train_batch
from tests.unit.stages.train import runs

PRETRAINED = {"name": "vapo", "lambda_alpha": 0.5, "lambda_min": 0.5}
CHAINS = {
    "dapo": ({"name": "dapo"}, {}, False),
    "bypass": ({"name": "dapo", "correction": "bypass"}, {}, False),
    "critic": (PRETRAINED, {}, False),
    "after value pretraining": (PRETRAINED, {"pretrain_iterations": 1}, False),
    "in value pretraining": (PRETRAINED, {"pretrain_iterations": 9}, False),
    "after an iteration without rollouts": ({"name": "grpo"}, {}, True),
}


def versions_of(rollouts, version):
    lengths = rollouts.response_tokens.lengths
    return Ragged.from_lists([[version] * n for n in lengths], np.int32)


@pytest.mark.parametrize("chain", CHAINS)
def test_another_network_ends_a_run_that_goes_on_from_a_state(chain, file_root, tmp_path, caplog):
    algorithm, critic, is_empty = CHAINS[chain]
    config = runs.tiny_config()
    config |= {"algorithm": algorithm, "critic": runs.TINY_CRITIC | critic}
    tiny = runs.start_run(file_root, config)
    rewards = runs.add_iteration(tiny, 1, keep_none=is_empty)
    state = runs.train_once(tiny, 1, "", rewards, tmp_path / "1")

    def other(rollouts, version):
        """Let the engine have half of the log-probability of each token."""
        half = Ragged(rollouts.rollout_logprobs.values / 2, rollouts.rollout_logprobs.offsets)
        changes = {"rollout_logprobs": half, "policy_version": versions_of(rollouts, version)}
        return replace(rollouts, **changes)

    rewards = runs.add_iteration(tiny, 2, change=lambda made: other(made, 1))
    with pytest.raises(SystemExit) as caught:
        runs.train_once(tiny, 2, state, rewards, tmp_path / "2")
    assert caught.value.code == 2
    # Those of an older policy may be as far away as they are.
    tiny = runs.start_run(f"{file_root}-old", config)
    rewards = runs.add_iteration(tiny, 1, keep_none=is_empty)
    state = runs.train_once(tiny, 1, "", rewards, tmp_path / "3")
    rewards = runs.add_iteration(tiny, 2, change=lambda made: other(made, 0))
    assert runs.train_once(tiny, 2, state, rewards, tmp_path / "4")


def test_rows_are_fresh_whose_trained_tokens_are_all_of_one_policy():
    policy = runs.build_policy(runs.ModelConfig(num_layers=1, hidden_size=16, head_dim=8), seed=0)
    rollouts = runs.random_rollouts(policy, 1)
    lengths = rollouts.response_tokens.lengths
    rows = [[3] * n for n in lengths]
    first, second = np.flatnonzero(lengths > 2)[:2]
    rows[first][-1] = rows[second][0] = 2
    starts = np.zeros(len(lengths), np.int32)
    # What an earlier policy has sampled before the window is not trained on.
    starts[second] = 1
    mixed = replace(rollouts, policy_version=Ragged.from_lists(rows, np.int32), window_start=starts)
    rewards = runs.rewards_for(rollouts, 2)
    assert train_batch(mixed, rewards).is_fresh is None
    fresh = train_batch(mixed, rewards, 3).is_fresh
    assert (~fresh).nonzero().flatten().tolist() == [first]
    assert train_batch(mixed, rewards, 2).is_fresh.sum() == 0
