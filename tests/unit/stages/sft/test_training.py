"""Supervised steps: loss, warm-up, equal bits, numbers that are not finite."""

import itertools

import pytest
import torch

from planish.base.errors import ConfigError
from planish.models.policy import build_policy
from planish.stages.sft.config import SftConfig
from planish.stages.sft.traces import encode_traces
from planish.stages.sft.training import train_steps, train_until
from tests.unit.tiny_run import sums, tiny_model

PAIRS = [(a, b) for a in range(1, 6) for b in range(6)]
CONFIG = SftConfig(traces_per_minibatch=10, warmup_steps=2, max_response_tokens=6)


def prepared(seed=0):
    policy = build_policy(tiny_model(), seed)
    _, traces = sums(PAIRS)
    return policy, encode_traces(traces, policy.tokenizer)


def take(policy, traces, count, *, config=CONFIG, learning_rate=5e-3, warmup_steps=2, seed=0):
    steps = train_steps(
        policy, traces, config, seed=seed, learning_rate=learning_rate, warmup_steps=warmup_steps
    )
    return list(itertools.islice(steps, count))


def test_first_loss_is_the_mean_over_response_tokens_of_the_untrained_policy():
    policy, traces = prepared()
    config = CONFIG.model_copy(update={"traces_per_minibatch": 30})
    total = count = 0.0
    with torch.no_grad():
        for ids, start in zip(traces.tokens, traces.prompt_lengths, strict=True):
            tokens = torch.from_numpy(ids)
            logprobs = torch.log_softmax(policy.model(tokens[None]).logits[0], -1)
            for place in range(int(start), len(tokens)):
                total -= logprobs[place - 1, tokens[place]].item()
                count += 1
    step = take(policy, traces, 1, config=config)[0]
    assert step.num_tokens == count
    assert step.loss == pytest.approx(total / count, rel=1e-5)
    assert not step.skipped


@pytest.mark.slow
def test_loss_falls_and_equal_seeds_give_equal_bits():
    first, traces = prepared()
    second, _ = prepared()
    left, right = take(first, traces, 60), take(second, traces, 60)
    assert [s.loss for s in left] == [s.loss for s in right]
    assert sum(s.loss for s in left[-6:]) < 0.5 * sum(s.loss for s in left[:6])
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_of_gradients_can_be_switched_off():
    losses = []
    for clip in (None, 1e9, 1e-6):
        policy, traces = prepared()
        config = CONFIG.model_copy(update={"grad_clip": clip})
        losses.append([step.loss for step in take(policy, traces, 4, config=config)])
    assert losses[0] == losses[1] != losses[2]


def test_first_step_of_the_warm_up_moves_weights_by_its_share_of_the_learning_rate():
    # AdamW's first step has the size of the learning rate wherever the gradient is not tiny.
    policy, traces = prepared()
    before = policy.model.model.norm.weight.detach().clone()
    take(policy, traces, 1, learning_rate=1e-2, warmup_steps=4)
    moved = (policy.model.model.norm.weight - before).abs().max().item()
    assert moved == pytest.approx(1e-2 / 4, rel=1e-3)


def test_learning_rate_that_explodes_ends_with_a_remedy():
    policy, traces = prepared()
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match=r"in 3 steps up to step 3; lower the learning rate"):
        take(policy, traces, 10)


def test_step_with_a_number_that_is_not_finite_changes_no_weight():
    policy, traces = prepared()
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("inf")
    before = [p.detach().clone() for p in policy.model.parameters()]
    step = take(policy, traces, 1)[0]
    assert step.skipped
    for old, new in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_training_ends_at_the_first_measurement_that_reaches_the_target():
    policy, traces = prepared()
    config = CONFIG.model_copy(
        update={"measure_every": 2, "measure_after": 3, "target_accuracy": 0.5, "max_steps": 50}
    )
    values = iter([0.1, 0.4, 0.5, 0.9])
    found = train_until(policy, traces, config, seed=0, measure=lambda: next(values))
    assert found["steps"] == 8.0
    assert found["accuracy"] == 0.5
    assert found["skipped_steps"] == 0.0
    assert found["num_trained_tokens"] > 0


def test_training_ends_at_the_cap_with_a_last_measurement():
    policy, traces = prepared()
    config = CONFIG.model_copy(update={"measure_every": 4, "max_steps": 5})
    seen = []
    found = train_until(policy, traces, config, seed=0, measure=lambda: seen.append(1) or 0.0)
    assert found["steps"] == 5.0
    assert len(seen) == 2


def test_band_with_its_ends_exchanged_is_refused():
    with pytest.raises(ValueError, match="`min_start` must not exceed `max_start`"):
        SftConfig(min_start=0.5, max_start=0.4)
