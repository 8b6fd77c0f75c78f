from dataclasses import replace

import numpy as np
import pytest
import torch

from planish.models.config import ModelConfig
from planish.models.policy import build_policy
from planish.records.rollouts import FinishReason
from planish.records.values import ValueSet
from planish.stages.train.batching import train_batch
from planish.stages.train.window_values import earlier_values, row_keys, values_to_store
from tests.unit.stages.train.runs import random_rollouts, rewards_for

NONE = ValueSet.from_rows({})
ORDINALS = [10, 3, 7, 20]


@pytest.fixture(scope="module")
def rollouts():
    """Four groups of four; the even samples are cut, and went on from token 1."""
    policy = build_policy(ModelConfig(num_layers=1, hidden_size=16, head_dim=8), seed=0)
    made = random_rollouts(policy, 1)
    finish = np.where(made.sample_index % 2 == 0, FinishReason.WINDOW, FinishReason.STOP)
    start = np.where(made.response_tokens.lengths > 1, 1, 0)
    return replace(made, finish=finish.astype(np.int8), window_start=start.astype(np.int32))


def counted(batch):
    """Values that tell row and column: 100 x row + column."""
    rows, columns = batch.values.shape
    return (100.0 * torch.arange(rows)[:, None] + torch.arange(columns)) * batch.value_mask


def test_rows_are_known_by_the_ordinal_of_their_prompt_and_their_sample(rollouts):
    keys = row_keys(rollouts, ORDINALS)
    assert keys[:5] == [(10, 0), (10, 1), (10, 2), (10, 3), (3, 0)]
    assert keys[-1] == (20, 3)


def test_values_of_cut_responses_are_stored_one_per_token_so_far(rollouts):
    rewards = rewards_for(rollouts, 2)
    batch = train_batch(rollouts, rewards)
    stored = values_to_store(batch, counted(batch), rollouts, rewards, ORDINALS, NONE)
    rows = stored.to_rows()
    assert stored.ordinal.tolist() == [3, 3, 7, 7, 10, 10, 20, 20]
    assert {sample for _, sample in rows} == {0, 2}
    for row in range(0, 16, 2):
        key = row_keys(rollouts, ORDINALS)[row]
        start = len(rollouts.prompt_tokens.row(rollouts.group_index[row]))
        length = rollouts.response_tokens.lengths[row]
        assert rows[key].tolist() == [100 * row + start + k for k in range(length)]


def test_stored_values_come_back_in_their_columns_and_all_others_are_unknown(rollouts):
    rewards = rewards_for(rollouts, 2)
    batch = train_batch(rollouts, rewards)
    keys = row_keys(rollouts, ORDINALS)
    row = int(np.argmax(rollouts.window_start))
    stored = ValueSet.from_rows({keys[row]: np.array([0.25], np.float32)})
    found = earlier_values(batch, rollouts, rewards, ORDINALS, stored)
    assert (~found.isnan()).sum() == 1
    prompt = len(rollouts.prompt_tokens.row(rollouts.group_index[row]))
    assert found[row, prompt] == 0.25


def test_rows_that_wait_or_take_no_part_keep_what_was_stored_and_finished_ones_vanish(rollouts):
    keep = np.ones(16, bool)
    keep[0] = False
    rewards = rewards_for(rollouts, 2, keep=keep)
    batch = train_batch(rollouts, rewards)
    old = np.array([9.0], np.float32)
    stored = ValueSet.from_rows({(10, 0): old, (10, 1): old, (10, 2): old, (99, 5): old})
    rows = values_to_store(batch, counted(batch), rollouts, rewards, ORDINALS, stored).to_rows()
    assert rows[10, 0].tolist() == [9.0]
    assert rows[99, 5].tolist() == [9.0]
    assert (10, 1) not in rows
    assert rows[10, 2].tolist() != [9.0]
    assert len(rows[10, 2]) == rollouts.response_tokens.lengths[2]


def test_an_empty_batch_keeps_what_was_stored(rollouts):
    rewards = rewards_for(rollouts, 2, keep=np.zeros(16, bool))
    batch = train_batch(rollouts, rewards)
    stored = ValueSet.from_rows({(10, 0): np.array([9.0], np.float32)})
    found = values_to_store(batch, None, rollouts, rewards, ORDINALS, stored)
    assert found == stored
