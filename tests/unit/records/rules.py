"""The rules of each record set, which the code that makes it keeps; `check` asserts all of them."""

import re
from itertools import pairwise

import numpy as np

from planish.records import (
    FinishReason,
    PromptSet,
    Ragged,
    RewardSet,
    RolloutSet,
    TraceSet,
    ValueSet,
    WaitingSet,
)
from planish.records.rollouts import VERDICT


def check(record):
    """Assert types, lengths and values of every column."""
    for spec in record.COLUMNS:
        data = getattr(record, spec.name)
        if data is None and spec.optional:
            continue
        rows = record.num_rows
        if isinstance(record, RolloutSet) and spec.name == "prompt_tokens":
            rows = record.num_groups
        assert len(data) == rows, spec.name
        if spec.kind.startswith("list<"):
            assert str(data.values.dtype) in spec.kind[len("list<") : -1].split("|"), spec.name
            assert (data.offsets[0], data.offsets[-1]) == (0, len(data.values)), spec.name
            assert (data.lengths >= 0).all(), spec.name
        elif spec.kind == "text":
            assert all(isinstance(cell.encode("utf-8"), bytes) for cell in data), spec.name
        elif spec.kind == "messages":
            for messages in data:
                assert messages
                assert all(message.keys() == {"role", "content"} for message in messages)
        else:
            assert data.dtype == np.dtype(spec.kind), spec.name
    record.check_finite()
    for name in ("prompt_tokens", "response_tokens", "policy_version"):
        if isinstance(tokens := getattr(record, name, None), Ragged):
            assert (tokens.values >= 0).all(), name
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in getattr(record, "prompt_id", ()))
    _RULES[type(record)](record)


def _prompts(record):
    assert len(set(record.prompt_id)) == record.num_rows
    assert not ((record.pass_rate < 0) | (record.pass_rate > 1)).any()


def _rewards(record):
    assert np.isin(record.accuracy, (0, 1)).all()
    assert (record.length_penalty <= 0).all()
    assert np.allclose(record.reward, record.outcome + record.length_penalty, atol=1e-5, rtol=0)


def _values(record):
    keys = list(zip(record.ordinal.tolist(), record.sample_index.tolist(), strict=True))
    assert all((0, 0) <= one < other for one, other in pairwise([*keys, (np.inf, 0)]))


def _waiting(record):
    assert (record.prompt_tokens.lengths > 0).all()
    assert (record.response_tokens.lengths > 0).all()
    for numbers in (record.values, record.returns):
        assert np.array_equal(numbers.lengths, record.response_tokens.lengths)


def _rollouts(record):
    groups, samples = record.group_index, record.sample_index
    step = np.diff(groups)
    assert (step >= 0).all()
    assert (samples >= 0).all()
    assert (np.diff(samples)[step == 0] > 0).all()
    assert np.array_equal(np.unique(groups), np.arange(record.num_groups))
    lengths = record.response_tokens.lengths
    assert np.array_equal(record.rollout_logprobs.lengths, lengths)
    assert np.array_equal(record.policy_version.lengths, lengths)
    assert (record.rollout_logprobs.values <= 1e-3).all()
    assert ((record.window_start >= 0) & (record.window_start <= lengths)).all()
    assert np.isin(record.finish, list(FinishReason)).all()
    ids = record.prompt_id
    assert record.rollout_id == [f"{p}-{n:03d}" for p, n in zip(ids, samples, strict=True)]
    assert len(set(zip(ids, groups.tolist(), strict=True))) == record.num_groups
    assert (record.routing is None) == (record.experts_per_token is None)
    if record.routing is not None:
        per_token = set(record.experts_per_token.tolist())
        choices = set((record.routing.lengths / record.num_tokens()).tolist())
        assert len(per_token) == len(choices) == 1
        assert choices.pop() % per_token.pop() == 0
        assert (record.routing.values >= -1).all()
    assert len({getattr(record, name) is None for name in VERDICT}) == 1
    if record.accuracy is not None:
        blank = np.isnan(record.accuracy)
        assert np.array_equal(blank, np.isnan(record.score))
        assert np.isin(record.accuracy[~blank], (0, 1)).all()
        assert ((record.score[~blank] >= 0) & (record.score[~blank] <= 1)).all()


_RULES = {
    PromptSet: _prompts,
    TraceSet: lambda record: None,
    RewardSet: _rewards,
    RolloutSet: _rollouts,
    ValueSet: _values,
    WaitingSet: _waiting,
}
