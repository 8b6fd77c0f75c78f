"""Sampling for a measurement: seeds, refused prompts, verifier failures."""

import numpy as np
import pytest

from planish.base.errors import EngineError, VerifierFailure
from planish.engines.measure import generate_rollouts, judge
from planish.engines.requests import ModelRef, Sampling
from planish.engines.sampling import request_seed
from planish.engines.transformers.engine import TransformersEngine
from planish.models.policy import build_policy
from planish.records.rollouts import FinishReason
from planish.verifiers import VerifierOptions
from tests.unit.engines.disagg.instances import MortalRank, disagg
from tests.unit.records import rules
from tests.unit.records.samples import rows_of
from tests.unit.tiny_run import sums, tiny_model


def sample(prompts, policy, *, num_samples=2, run_seed=7, temperature=1.0, max_rows=256):
    with TransformersEngine(max_rows=max_rows) as engine:
        engine.start(ModelRef(policy=policy))
        return generate_rollouts(
            engine,
            policy.tokenizer,
            prompts,
            num_samples=num_samples,
            sampling=Sampling(max_new_tokens=5, temperature=temperature),
            run_seed=run_seed,
        )


def test_groups_follow_the_prompts_and_hold_all_samples():
    prompts, _ = sums([(1, 2), (3, 4), (5, 6)])
    policy = build_policy(tiny_model(), seed=0)
    rollouts = sample(prompts, policy)
    rules.check(rollouts)
    assert rollouts.group_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert rollouts.sample_index.tolist() == [0, 1, 0, 1, 0, 1]
    assert rollouts.prompt_id == [i for i in prompts.prompt_id for _ in range(2)]
    assert rollouts.answer == ["3", "3", "7", "7", "11", "11"]
    for row, ids in enumerate(rows_of(rollouts.response_tokens)):
        assert rollouts.response[row] == policy.tokenizer.decode(ids)
        assert len(ids) <= 5
    expected = policy.tokenizer.encode_prompt(prompts.messages[1])
    assert rollouts.prompt_tokens.row(1).tolist() == expected


def test_a_measurement_says_how_far_it_has_come(monkeypatch, caplog):
    monkeypatch.setattr("planish.engines.base.LINE_SECONDS", 0.0)
    caplog.set_level("INFO", "planish.engines.base")
    prompts, _ = sums([(1, 2), (3, 4)])
    sample(prompts, build_policy(tiny_model(), seed=0), max_rows=1)
    told = [line for line in caplog.messages if line.startswith("generating")]
    assert [line.split()[1:3] for line in told] == [
        [f"done={done}", "goal=4"] for done in range(1, 5)
    ]


def test_noise_depends_on_run_seed_prompt_and_sample_only():
    prompts, _ = sums([(1, 2), (3, 4), (5, 6)])
    policy = build_policy(tiny_model(), seed=0)
    everything = sample(prompts, policy, num_samples=3)
    alone = sample(prompts.take([2]), policy, num_samples=2, max_rows=1)
    assert alone.response == everything.response[6:8]
    again = sample(prompts, policy, num_samples=3, run_seed=8)
    assert again.response != everything.response
    assert request_seed(7, 0, "a", 1) != request_seed(7, 1, "a", 1)


def test_greedy_samples_of_a_prompt_are_equal():
    prompts, _ = sums([(1, 2), (3, 4)])
    rollouts = sample(prompts, build_policy(tiny_model(), seed=0), temperature=0.0)
    assert rollouts.response[0] == rollouts.response[1]
    assert rollouts.response[2] == rollouts.response[3]


def test_prompt_that_does_not_fit_the_model_is_an_aborted_row_without_tokens():
    prompts, _ = sums([(1, 2), (10**60, 4)])
    rollouts = sample(prompts, build_policy(tiny_model(), seed=0))
    rules.check(rollouts)
    assert rollouts.finish[2:].tolist() == [FinishReason.ABORT] * 2
    assert rollouts.response_tokens.lengths[2:].tolist() == [0, 0]
    assert (rollouts.finish[:2] <= FinishReason.LENGTH).all()
    assert [v.accuracy for v in judge(rollouts, VerifierOptions())][2:] == [0.0, 0.0]


def measure_apart(policy, prompts, losses):
    """Measure on attention and experts apart; ranks die with the beginning of some questions.

    Args:
        policy: with experts.
        prompts: of the measurement.
        losses: rank that dies in each call of `generate`, -1 for none.
    """
    ranks = []

    def launcher(number):
        ranks.append(MortalRank(number))
        return ranks[-1]

    with disagg(policy, 3, 1, launcher=launcher) as engine:
        generate, pending = engine.generate, list(losses)

        def generate_and_lose(requests):
            if pending and (rank := pending.pop(0)) >= 0:
                ranks[rank].die()
            return generate(requests)

        engine.generate = generate_and_lose
        return generate_rollouts(
            engine,
            policy.tokenizer,
            prompts,
            num_samples=2,
            sampling=Sampling(max_new_tokens=5),
            run_seed=7,
        )


def test_responses_that_a_rank_took_with_it_are_asked_again():
    prompts, _ = sums([(1, 2), (3, 4), (5, 6)])
    policy = build_policy(tiny_model().model_copy(update={"num_experts": 4}), seed=0)
    whole = sample(prompts, policy)
    rollouts = measure_apart(policy, prompts, [1, -1])
    assert rollouts.response == whole.response
    assert rollouts.finish.tolist() == whole.finish.tolist()
    assert measure_apart(policy, prompts, [1, 2]).response == whole.response


@pytest.mark.slow
def test_a_measurement_whose_responses_stay_lost_fails(monkeypatch):
    prompts, _ = sums([(1, 2), (3, 4), (5, 6)])
    policy = build_policy(tiny_model().model_copy(update={"num_experts": 4}), seed=0)
    monkeypatch.setattr("planish.engines.measure.MOST_REPEATS", 1)
    with pytest.raises(EngineError, match=r"got \d of 6 lost after 1 repeats .*rank 2 is lost"):
        measure_apart(policy, prompts, [1, 2])


def test_verifier_that_fails_too_often_ends_the_measurement():
    prompts, _ = sums([(1, 2), (3, 4)])
    rollouts = sample(prompts, build_policy(tiny_model(), seed=0))
    rollouts.answer[0] = "not a number"
    with pytest.raises(VerifierFailure, match=r"at most 1\.0% of verifications.*got 1 of 4"):
        judge(rollouts, VerifierOptions())
    verdicts = judge(rollouts, VerifierOptions(), max_error_rate=0.25)
    assert np.flatnonzero([v.error for v in verdicts]).tolist() == [0]
