"""From record sets to losses: cases in which the ids or the lengths of a response mislead."""

import numpy as np
import pytest
import torch

from planish.algorithms.tppo import Tppo, TppoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason
from planish.stages.train.batching import train_batch
from tests.unit.records.samples import build_rollouts

PADDING = 0
"""The id that `train_batch` pads with; here it is the end token too, and an ordinary one."""


def rollouts(responses, finish, window_start=None):
    """One group per response, prompts of two tokens."""
    start = np.array(window_start or [0] * len(responses), np.int32)
    prompts = [[5, PADDING]] * len(responses)
    return build_rollouts(prompts, responses, finish=finish, window_start=start)


def rewards(accuracy, reward, *, has_reward=None):
    rows = len(accuracy)
    known = np.ones(rows, bool) if has_reward is None else np.array(has_reward)
    return RewardSet(
        accuracy=np.array(accuracy, np.float32),
        outcome=np.array(reward, np.float32),
        length_penalty=np.zeros(rows, np.float32),
        reward=np.array(reward, np.float32),
        has_reward=known,
        keep=np.ones(rows, bool),
        extracted=["1"] * rows,
    )


def test_masks_come_from_lengths_where_padding_and_end_token_share_an_id():
    made = rollouts([[7, PADDING, 8, PADDING], [PADDING]], [FinishReason.STOP] * 2)
    batch = train_batch(made, rewards([1, 0], [1.0, -1.0]))
    assert batch.attention_mask.sum(1).tolist() == [6, 3]
    filled = Vapo(VapoConfig(whiten_advantages=False)).advantages(batch)
    assert filled.policy_mask.sum(1).tolist() == [4, 1]
    # The reward sits on the end token itself, which trains like any other.
    assert filled.advantages[0, 2:].tolist() == pytest.approx([0.95**3, 0.95**2, 0.95, 1.0])
    assert filled.advantages[1].tolist() == [0, 0, -1, 0, 0, 0]


def test_every_way_to_end_is_finished_and_a_window_is_not():
    finish = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.WINDOW]
    batch = train_batch(
        rollouts([[7, 8], [7, 8], [7, 8]], finish),
        rewards([1, 1, 0], [1.0, 0.0, 0.0], has_reward=[True, True, False]),
    )
    assert batch.is_finished.tolist() == [True, True, False]
    assert batch.is_truncated.tolist() == [False, True, False]
    filled = Tppo(TppoConfig(window_tokens=2, ignored_tail_tokens=1)).advantages(batch)
    assert filled.policy_mask.sum(1).tolist() == [2, 2, 1]
    assert filled.value_mask.any(1).tolist() == [True, True, False]
    # A truncated response that is right counts as right; its reward, here 0, is the target.
    assert filled.positive_mask.any(1).tolist() == [True, True, False]
    assert filled.returns[:, 2:].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_a_continued_response_trains_on_its_window_and_its_critic_on_all_of_it():
    made = rollouts([[1, 2, 3, 4, 5]], [FinishReason.STOP], window_start=[4])
    batch = train_batch(made, rewards([1], [1.0])).updated(values=torch.full((1, 7), 0.25))
    algorithm = Tppo(TppoConfig(window_tokens=4, ignored_tail_tokens=3, whiten_advantages=False))
    filled = algorithm.advantages(batch)
    assert filled.advantages[0].tolist() == [0, 0, 0, 0, 0, 0, 0.75]
    assert filled.returns[0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert algorithm.counts(filled) == {"tokens": 1.0, "sequences": 1.0, "positive_tokens": 5.0}
    assert algorithm.value_counts(filled) == {"tokens": 5.0, "sequences": 1.0}


def test_a_batch_of_cut_responses_alone_has_no_value_step_and_no_positive_tokens():
    made = rollouts([[1, 2, 3, 4]] * 2, [FinishReason.WINDOW] * 2)
    batch = train_batch(made, rewards([0, 0], [0.0, 0.0], has_reward=[False, False]))
    algorithm = Tppo(TppoConfig(window_tokens=4, ignored_tail_tokens=1))
    filled = algorithm.advantages(batch)
    assert algorithm.counts(filled) == {"tokens": 6.0, "sequences": 2.0, "positive_tokens": 0.0}
    assert not any(algorithm.value_counts(filled).values())
