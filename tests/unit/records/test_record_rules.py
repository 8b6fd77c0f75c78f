"""What each record refuses, and that it tells every fault at once."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from planish.base.errors import RecordError
from planish.records import Ragged, RolloutSet
from planish.records.prompts import prompt_id
from tests.unit.records.samples import (
    SAMPLES,
    changed,
    random_prompts,
    random_rewards,
    random_rollouts,
    random_traces,
)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_samples_are_valid_and_equal_themselves_only(kind, seed):
    record = SAMPLES[kind](seed)
    record.validate()
    assert record == SAMPLES[kind](seed)
    assert record != SAMPLES[kind](seed + 1)
    assert record != "something else"


def test_the_prompt_id_is_the_digest_of_canonical_json():
    messages = [{"content": "1+1=", "role": "user"}]
    text = b'[[{"content":"1+1=","role":"user"}],"2"]'
    assert prompt_id(messages, "2") == hashlib.sha256(text).hexdigest()[:16]
    assert prompt_id([{"role": "user", "content": "1+1="}], "2") == prompt_id(messages, "2")
    assert prompt_id(messages, "3") != prompt_id(messages, "2")


def float_array(*values):
    return np.array(values, np.float32)


PROMPTS = random_prompts(rows=2)
REWARDS = random_rewards(rows=2)
TRACES = random_traces(rows=2)


@pytest.mark.parametrize(
    ("record", "column", "value", "fault"),
    [
        (
            PROMPTS,
            "prompt_id",
            ["A" * 16, "b" * 16],
            "16 hex digits, got 'AAAAAAAAAAAAAAAA' in row 0",
        ),
        (
            PROMPTS,
            "prompt_id",
            ["b" * 16, "b" * 16],
            "must not repeat, got 'bbbbbbbbbbbbbbbb' in rows 0 and 1",
        ),
        (PROMPTS, "answer", ["1"], "`answer` must be a list of 2 texts, got 1"),
        (PROMPTS, "answer", [1, "2"], "`answer` must be text that UTF-8 can hold, got 1 in row 0"),
        (PROMPTS, "answer", ["1", "\ud800"], "UTF-8 can hold, got '\\ud800' in row 1"),
        (PROMPTS, "source", "ab", "`source` must be a list of 2 texts, got str"),
        (PROMPTS, "messages", [[]], "list of 2 lists of messages, got 1"),
        (PROMPTS, "messages", [[], [{"role": "user"}]], "in row 0"),
        (
            PROMPTS,
            "messages",
            [[{"role": "user", "content": 1}]] * 2,
            "got [{'role': 'user', 'content': 1}]",
        ),
        (
            PROMPTS,
            "pass_rate",
            float_array(0, 1.5),
            "`pass_rate` must be in 0..1 or NaN, got 1.5 in row 1",
        ),
        (PROMPTS, "pass_rate", np.zeros(2), "`pass_rate` must be [2] float32, got [2] float64"),
        (PROMPTS, "pass_rate", [0.0, 1.0], "`pass_rate` must be an array [R] float32, got list"),
        (TRACES, "prompt_id", ["x", "b" * 16], "16 hex digits, got 'x' in row 0"),
        (TRACES, "response", ["a"], "`response` must be a list of 2 texts, got 1"),
        (REWARDS, "accuracy", float_array(0, 0.5), "`accuracy` must be 0 or 1, got 0.5 in row 1"),
        (REWARDS, "length_penalty", float_array(0, 0.5), "must be 0 or less, got 0.5 in row 1"),
        (REWARDS, "reward", float_array(9, np.nan), "`reward` must be finite, got nan in row 1"),
        (REWARDS, "reward", float_array(9, 9), "`reward` must be outcome + length_penalty = "),
        (REWARDS, "keep", np.zeros(3, bool), "`keep` must be [2] bool, got [3] bool"),
    ],
)
def test_a_broken_rule_is_told_with_the_value_seen(record, column, value, fault):
    with pytest.raises(RecordError) as raised:
        changed(record, **{column: value}).validate()
    assert fault in str(raised.value)


def rollout_faults(**columns):
    with pytest.raises(RecordError) as raised:
        changed(random_rollouts(groups=2, group_size=2), **columns).validate()
    return str(raised.value)


def int_array(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (
            {"group_index": int_array(0, 0, 2, 2)},
            "must hold each of 0..1 and no other, got 2 values in 0..2",
        ),
        ({"group_index": int_array(1, 1, 0, 0)}, "must not decrease, got a fall after row 1"),
        ({"group_index": int_array(0, 0, 0, 0)}, "must hold each of 0..1"),
        (
            {"sample_index": int_array(0, 0, 0, 1)},
            "increase within a group, got [0, 0] after row 0",
        ),
        ({"sample_index": int_array(-1, 1, 0, 1)}, "must be 0 or more, got -1"),
        ({"window_start": int_array(0, 0, 0, 13)}, "in 0..response length, got 13 for"),
        ({"window_start": int_array(-1, 0, 0, 0)}, "in 0..response length, got -1 for"),
        ({"finish": np.array([0, 1, 2, 4], np.int8)}, "`finish` must be in 0..3, got 4 in row 3"),
        (
            {"prompt_id": ["a" * 16] * 3 + ["b" * 16]},
            "`prompt_id` must be equal in all rows of a group",
        ),
        ({"prompt_id": ["x"] * 4}, "16 hex digits, got 'x' in row 0"),
        ({"rollout_id": ["x"] * 4}, "got 'x' in row 0"),
        (
            {"prompt_tokens": Ragged.from_lists([[1]], np.int32)},
            "must hold each of 0..0 and no other",
        ),
        (
            {"prompt_tokens": Ragged.from_lists([[1], [-2]], np.int32)},
            "`prompt_tokens` must be 0 or more, got -2",
        ),
        ({"response_tokens": [[1]] * 4}, "`response_tokens` must be a Ragged of int32, got list"),
    ],
)
def test_a_broken_rule_of_rollouts_is_told_with_the_value_seen(columns, fault):
    assert fault in rollout_faults(**columns)


def test_log_probabilities_must_be_finite_not_positive_and_one_per_token():
    good = random_rollouts(groups=2, group_size=2)
    for bad in (np.nan, np.inf, -np.inf, 0.5):
        values = good.rollout_logprobs.values.copy()
        values[1] = bad
        spoiled = Ragged(values, good.rollout_logprobs.offsets)
        assert f"finite and 0 or less, got {np.float32(bad)} (1 values)" in rollout_faults(
            rollout_logprobs=spoiled
        )
    short = Ragged.from_lists([[-1.0]] * 4, np.float32)
    assert "one value per response token, got 1 for" in rollout_faults(rollout_logprobs=short)


def test_all_faults_are_told_in_one_message_and_many_are_counted():
    told = rollout_faults(
        finish=np.array([0, 0, 0, 9], np.int8),
        window_start=int_array(99, 0, 0, 0),
        rollout_id=["x"] * 4,
        prompt_id=["y"] * 4,
    )
    for part in ("`finish`", "`window_start`", "`prompt_id`", "and 2 more", "rollout stage"):
        assert part in told


def test_taking_groups_keeps_rows_together_and_renumbers():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = rollouts.take_groups([3, 1])
    taken.validate()
    assert taken.group_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert taken.answer == [str(r) for r in (9, 10, 11, 3, 4, 5)]
    assert taken.prompt_tokens == rollouts.prompt_tokens.take([3, 1])
    assert taken.response_tokens == rollouts.response_tokens.take([9, 10, 11, 3, 4, 5])
    assert rollouts.take_groups(np.array([False, True, False, True])).answer[:3] == ["3", "4", "5"]
    assert rollouts.take_groups([]) == RolloutSet.empty()


def test_taking_rows_drops_groups_that_become_empty():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = rollouts.take_rows([11, 0, 9])
    taken.validate()
    assert taken.answer == ["0", "9", "11"]
    assert taken.group_index.tolist() == [0, 1, 1]
    assert taken.sample_index.tolist() == [0, 0, 2]
    assert rollouts.take_rows(np.zeros(12, bool)) == RolloutSet.empty()


def test_concat_undoes_taking_apart():
    rollouts = random_rollouts(groups=5, group_size=2)
    parts = [rollouts.take_groups([0, 1]), RolloutSet.empty(), rollouts.take_groups([2, 3, 4])]
    joined = RolloutSet.concat(parts)
    joined.validate()
    assert joined == rollouts
    assert (joined.num_rows, joined.num_groups) == (10, 5)
    assert RolloutSet.concat([]) == RolloutSet.empty()


def test_prompts_can_be_taken_in_another_order():
    prompts = random_prompts(rows=5)
    taken = prompts.take([4, 0])
    assert taken.answer == ["4", "0"]
    assert np.isnan(taken.pass_rate[1])
    taken.validate()
