from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.models.config import ModelConfig
from planish.models.policy import build_policy
from planish.records.rollouts import FinishReason
from planish.records.values import ValueSet
from planish.stages.train.batching import (
    gather_rows,
    plan_microbatches,
    plan_packed,
    scatter_tokens,
    selected_lengths,
    split_minibatches,
    train_batch,
)
from planish.stages.train.window_values import earlier_values, row_keys, values_to_store
from tests.unit.algorithms.batches import make_batch
from tests.unit.stages.train.runs import random_rollouts, rewards_for, split_rows


@pytest.fixture(scope="module")
def rollouts():
    policy = build_policy(ModelConfig(num_layers=1, hidden_size=16, head_dim=8), seed=0)
    return random_rollouts(policy, 1)


def test_each_row_is_prompt_then_response_with_masks_and_logprobs_in_place(rollouts):
    rewards = rewards_for(rollouts, 2)
    batch = train_batch(rollouts, rewards)
    for row in range(rollouts.num_rows):
        prompt = rollouts.prompt_tokens.row(rollouts.group_index[row]).tolist()
        response = rollouts.response_tokens.row(row).tolist()
        n, end = len(prompt), len(prompt) + len(response)
        assert batch.input_ids[row, :end].tolist() == prompt + response
        assert batch.attention_mask[row].nonzero().flatten().tolist() == list(range(end))
        assert batch.policy_mask[row].nonzero().flatten().tolist() == list(range(n, end))
        assert torch.equal(batch.policy_mask[row], batch.value_mask[row])
        logprobs = rollouts.rollout_logprobs.row(row)
        assert np.array_equal(batch.rollout_logprobs[row, n:end].numpy(), logprobs)
        assert batch.position_ids[row, :end].tolist() == list(range(end))
        assert batch.is_truncated[row].item() == (rollouts.finish[row] == FinishReason.LENGTH)
    assert batch.reward.numpy().tolist() == rewards.reward.tolist()
    assert batch.group_index.tolist() == rollouts.group_index.tolist()


def test_rows_that_are_not_kept_take_no_part(rollouts):
    keep = np.zeros(rollouts.num_rows, bool)
    keep[[2, 5]] = True
    batch = train_batch(rollouts, rewards_for(rollouts, 2, keep=keep))
    assert len(batch) == 2
    assert batch.group_index.tolist() == [0, 1]
    assert len(train_batch(rollouts, rewards_for(rollouts, 2, keep=~keep & False))) == 0


def test_tokens_before_the_window_are_context_only(rollouts):
    lengths = rollouts.response_tokens.lengths
    row = int(lengths.argmax())
    start = np.zeros(rollouts.num_rows, np.int32)
    start[row] = 2
    batch = train_batch(replace(rollouts, window_start=start), rewards_for(rollouts, 2))
    assert batch.policy_mask[row].sum() == lengths[row] - 2
    assert batch.value_mask[row].sum() == lengths[row]


def test_minibatches_hold_each_row_once_per_pass_and_depend_on_the_seed():
    parts = split_minibatches(100, 32, 2, seed=(0, 1))
    assert [len(p) for p in parts] == [25] * 8
    for half in (parts[:4], parts[4:]):
        assert sorted(np.concatenate(half).tolist()) == list(range(100))
    again = split_minibatches(100, 32, 2, seed=(0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = split_minibatches(100, 32, 2, seed=(0, 2))
    assert not np.array_equal(parts[0], other[0])
    assert split_minibatches(0, 32, 1, seed=(0,)) == []


@pytest.mark.parametrize("packs", [False, True])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    least=st.integers(0, 50),
)
@settings(deadline=None)
def test_micro_batches_cover_every_row_once_within_the_budget(packs, lengths, budget, least):
    array = np.array(lengths)
    rows = (plan_packed if packs else plan_microbatches)(array, budget, least)
    assert len(rows) >= least
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    for part in rows:
        tokens = array[part].sum() if packs else len(part) * array[part].max(initial=0)
        assert len(part) <= 1 or tokens <= budget


def test_packed_micro_batches_are_few_and_hold_as_many_tokens_each():
    plan = plan_packed(np.array([30, 10, 10, 10, 0, 20, 20]), 50)
    assert [part.tolist() for part in plan] == [[0, 1, 2], [5, 6, 3]]
    assert plan_packed(np.zeros(3, np.int64), 8) == []


def test_ranks_without_sequences_get_an_idle_row(rollouts):
    for make_plan in (plan_packed, plan_microbatches):
        plan = make_plan(np.array([5]), 100, 3)
        assert [rows.tolist() for rows in plan] == [[0], [], []]
    batch = train_batch(rollouts, rewards_for(rollouts, 2))
    idle = gather_rows(batch, plan[1], num_columns=2)
    assert idle.input_ids.shape == (1, 2)
    masks = (idle.policy_mask, idle.value_mask, idle.positive_mask, idle.attention_mask)
    assert not any(mask.any() for mask in masks)


def test_sequences_without_a_selected_token_are_in_no_micro_batch():
    rows = np.concatenate(plan_microbatches(np.array([0, 5, 0, 3]), 8))
    assert sorted(rows.tolist()) == [1, 3]
    assert plan_microbatches(np.zeros(3, np.int64), 8) == []


def test_selected_length_runs_to_the_last_selected_token():
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    assert selected_lengths(mask).tolist() == [4, 0, 5]


def test_scattered_tokens_return_to_their_places_with_gradient():
    mask = torch.tensor([[0, 1, 0], [0, 1, 1]]).bool()
    tokens = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    dense = scatter_tokens(mask, tokens)
    assert dense.tolist() == [[0, 1, 0], [0, 2, 3]]
    (dense * torch.tensor([[9.0, 5, 9], [9, 6, 7]])).sum().backward()
    assert tokens.grad.tolist() == [5, 6, 7]


def rewards_of(parts):
    moving, still = parts
    return moving.reward.tolist(), [] if still is None else still.batch.reward.tolist()


def test_rows_with_a_gradient_have_an_advantage_or_a_positive_token():
    mask = [[1, 1], [1, 1], [1, 0], [0, 1]]
    batch = make_batch(mask, advantages=[[0, 0], [0, 2], [0, 5], [0, -1]], reward=[0, 1, 2, 3])
    assert rewards_of(split_rows(batch)) == ([1, 3], [0, 2])
    positive = torch.tensor(mask).bool()
    positive[1:] = False
    imitated = batch.updated(positive_mask=positive)
    assert rewards_of(split_rows(imitated)) == ([0, 1, 3], [2])


def test_a_minibatch_without_any_gradient_keeps_its_rows():
    batch = make_batch([[1, 1], [1, 1]], reward=[1, 2])
    assert rewards_of(split_rows(batch)) == ([1, 2], [])


def test_a_penalty_gives_every_row_with_a_token_in_the_policy_loss_a_gradient():
    mask = [[1, 1], [0, 0], [1, 0], [0, 1]]
    batch = make_batch(mask, advantages=[[0, 0], [0, 2], [0, 5], [0, -1]], reward=[0, 1, 2, 3])
    assert rewards_of(split_rows(batch, has_penalty=True)) == ([0, 2, 3], [])
    positive = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]]).bool()
    imitated = batch.updated(positive_mask=positive)
    assert rewards_of(split_rows(imitated, has_penalty=True)) == ([0, 1, 2, 3], [])


NONE = ValueSet.from_rows({})
ORDINALS = [10, 3, 7, 20]


@pytest.fixture(scope="module")
def windowed(rollouts):
    """Four groups of four; the even samples are cut, and went on from token 1."""
    finish = np.where(rollouts.sample_index % 2 == 0, FinishReason.WINDOW, FinishReason.STOP)
    start = np.where(rollouts.response_tokens.lengths > 1, 1, 0)
    return replace(rollouts, finish=finish.astype(np.int8), window_start=start.astype(np.int32))


def counted(batch):
    """Values that tell row and column: 100 x row + column."""
    rows, columns = batch.values.shape
    return (100.0 * torch.arange(rows)[:, None] + torch.arange(columns)) * batch.value_mask


def cut_rows(rollouts):
    """Return the keys of rollouts, and which of them a window cut."""
    return row_keys(rollouts, ORDINALS), rollouts.finish == FinishReason.WINDOW


def test_rows_are_known_by_the_ordinal_of_their_prompt_and_their_sample(windowed):
    keys = row_keys(windowed, ORDINALS)
    assert keys[:5] == [(10, 0), (10, 1), (10, 2), (10, 3), (3, 0)]
    assert keys[-1] == (20, 3)


def test_values_of_cut_responses_are_stored_one_per_token_so_far(windowed):
    rewards = rewards_for(windowed, 2)
    batch = train_batch(windowed, rewards)
    stored = values_to_store(batch, counted(batch), *cut_rows(windowed), rewards, NONE)
    rows = stored.to_rows()
    assert stored.ordinal.tolist() == [3, 3, 7, 7, 10, 10, 20, 20]
    assert {sample for _, sample in rows} == {0, 2}
    for row in range(0, 16, 2):
        key = row_keys(windowed, ORDINALS)[row]
        start = len(windowed.prompt_tokens.row(windowed.group_index[row]))
        length = windowed.response_tokens.lengths[row]
        assert rows[key].tolist() == [100 * row + start + k for k in range(length)]


def test_stored_values_come_back_in_their_columns_and_all_others_are_unknown(windowed):
    rewards = rewards_for(windowed, 2)
    batch = train_batch(windowed, rewards)
    keys = row_keys(windowed, ORDINALS)
    row = int(np.argmax(windowed.window_start))
    stored = ValueSet.from_rows({keys[row]: np.array([0.25], np.float32)})
    found = earlier_values(batch, keys, rewards, stored)
    assert (~found.isnan()).sum() == 1
    prompt = len(windowed.prompt_tokens.row(windowed.group_index[row]))
    assert found[row, prompt] == 0.25


def test_rows_that_wait_or_take_no_part_keep_what_was_stored_and_finished_ones_vanish(windowed):
    keep = np.ones(16, bool)
    keep[0] = False
    rewards = rewards_for(windowed, 2, keep=keep)
    batch = train_batch(windowed, rewards)
    old = np.array([9.0], np.float32)
    stored = ValueSet.from_rows({(10, 0): old, (10, 1): old, (10, 2): old, (99, 5): old})
    rows = values_to_store(batch, counted(batch), *cut_rows(windowed), rewards, stored).to_rows()
    assert rows[10, 0].tolist() == [9.0]
    assert rows[99, 5].tolist() == [9.0]
    assert (10, 1) not in rows
    assert rows[10, 2].tolist() != [9.0]
    assert len(rows[10, 2]) == windowed.response_tokens.lengths[2]


def test_an_empty_batch_keeps_what_was_stored(windowed):
    rewards = rewards_for(windowed, 2, keep=np.zeros(16, bool))
    batch = train_batch(windowed, rewards)
    stored = ValueSet.from_rows({(10, 0): np.array([9.0], np.float32)})
    found = values_to_store(batch, None, *cut_rows(windowed), rewards, stored)
    assert found == stored
