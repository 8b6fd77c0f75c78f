"""Scalars of an evaluation from judged rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from planish.records.ragged import Ragged
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.evaluate.score import Judged, scalars
from planish.verifiers.verdict import Verdict, failed, not_found, right, wrong


def rollouts_of(lengths, num_samples, finish):
    count = len(lengths)
    groups = np.repeat(np.arange(count // num_samples, dtype=np.int32), num_samples)
    samples = np.tile(np.arange(num_samples, dtype=np.int32), count // num_samples)
    rows = [[1] * n for n in lengths]
    ids = [f"{group:016x}" for group in groups]
    found = RolloutSet(
        group_index=groups,
        sample_index=samples,
        prompt_tokens=Ragged.from_lists([[1]] * (count // num_samples), np.int32),
        response_tokens=Ragged.from_lists(rows, np.int32),
        rollout_logprobs=Ragged.from_lists([[-1.0] * n for n in lengths], np.float32),
        policy_version=Ragged.from_lists([[0] * n for n in lengths], np.int32),
        window_start=np.zeros(count, np.int32),
        finish=np.array(finish, np.int8),
        rollout_id=[f"{i}-{s:03d}" for i, s in zip(ids, samples, strict=True)],
        prompt_id=ids,
        response=[""] * count,
        answer=["7"] * count,
        verifier=["trace"] * count,
    )
    found.validate()
    return found


def judged():
    """Two prompts of three samples: right, wrong, invalid; then right, right, verifier error."""
    stop, length, abort = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
    verdicts = [right("7"), wrong("8"), not_found(), right("7"), right("7"), failed("9")]
    finish = [stop, stop, length, stop, stop, abort]
    return Judged(rollouts_of([2, 2, 4, 3, 3, 0], 3, finish), verdicts, 3)


def test_scalars_by_hand():
    found = scalars(judged(), None, [0, 1], EvaluateConfig(pass_at=[1, 2, 32]), seed=0)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["accuracy_standard_error"] == pytest.approx((2 / 3 / 3) ** 0.5 / 2)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert "pass@32" not in found
    assert found["cons@3"] == pytest.approx(1.0)
    assert found["invalid_fraction"] == pytest.approx(1 / 6)
    assert found["truncated_fraction"] == pytest.approx(1 / 6)
    assert found["refused_fraction"] == pytest.approx(1 / 6)
    assert found["verifier_errors"] == 1.0
    assert found["verifier_timeouts"] == 0.0
    assert found["response_length_mean"] == pytest.approx(14 / 6)
    assert found["num_generated_tokens"] == 14.0
    assert (found["num_prompts"], found["num_samples"]) == (2.0, 3.0)
    assert "greedy" not in found


def test_scalars_of_some_prompts_see_only_their_rows():
    greedy = Judged(rollouts_of([2, 2], 1, [0, 0]), [wrong("8"), right("7")], 1)
    found = scalars(judged(), greedy, [1], EvaluateConfig(), seed=0)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["greedy"] == 1.0
    assert found["num_generated_tokens"] == 6.0
    assert found["invalid_fraction"] == 0.0


def test_one_sample_has_no_standard_error():
    one = Judged(rollouts_of([2, 2], 1, [0, 0]), [right("7"), wrong("8")], 1)
    found = scalars(one, None, [0, 1], EvaluateConfig(), seed=0)
    assert "accuracy_standard_error" not in found
    assert found["accuracy"] == 0.5


def test_answers_of_failed_verifiers_are_invalid():
    assert judged().answers() == [["7", "8", None], ["7", "7", None]]
    assert Verdict(accuracy=0.0, extracted="9", error=True) == failed("9")


def test_evaluate_defaults_are_the_published_ones():
    config = EvaluateConfig()
    assert (config.num_samples, config.temperature, config.top_p) == (32, 1.0, 0.7)


@pytest.mark.parametrize("pass_at", [[0], [1, 1], [-1]])
def test_pass_at_must_hold_different_positive_numbers(pass_at):
    with pytest.raises(ValueError, match="different numbers of at least 1"):
        EvaluateConfig(pass_at=pass_at)
