"""What every engine must generate, run on every engine of the table."""

from dataclasses import replace

import numpy as np
import pytest

from planish.engines.requests import Request, Sampling
from planish.engines.weights import DictWeights
from planish.records.rollouts import FinishReason
from tests.contract.engines.conftest import has_our_noise
from tests.contract.engines.test_control import weights
from tests.unit.engines.tiny import (
    exact_logits,
    exact_logprobs,
    ids_of,
    prompt,
    reference_greedy,
    reference_logprobs,
    request,
)

DRAWS = 20_000
CHI_SQUARE_LIMIT = 5.0
"""In standard deviations above the mean of the statistic; seeds are fixed."""


def test_greedy_tokens_and_log_probabilities_equal_the_reference(new_engine, make_policy):
    policy = make_policy()
    requests = [request(i, 6 + i, temperature=0.0) for i in range(9)]
    outputs = new_engine(policy).generate(requests)
    for one, output in zip(requests, outputs, strict=True):
        budget = one.sampling.max_new_tokens
        assert output.token_ids == reference_greedy(policy, one.prompt_ids, budget)
        expected = reference_logprobs(policy, one.prompt_ids, output.token_ids)
        assert np.abs(np.array(output.logprobs) - expected).max() < 2e-4


def test_log_probabilities_are_those_of_the_sampled_distribution(new_engine, make_policy):
    """Temperature, top-k and top-p, in one batch: within 1e-4 of a forward in float64."""
    policy = make_policy()
    settings = (
        {},
        {"temperature": 0.6},
        {"temperature": 0.6, "top_k": 5},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.6, "top_k": 12, "top_p": 0.7},
    )
    requests = [request(i, 15, **settings[i % len(settings)]) for i in range(15)]
    for one, output in zip(requests, new_engine(policy).generate(requests), strict=True):
        expected = exact_logprobs(policy, one, output.token_ids)
        assert np.abs(np.array(output.logprobs) - expected).max() < 1e-4, one.sampling
        if one.sampling.top_k or one.sampling.top_p < 1.0:
            # What is cut off shows: the whole distribution gives the kept tokens less.
            whole = replace(one, sampling=replace(one.sampling, top_k=0, top_p=1.0))
            assert (exact_logprobs(policy, whole, output.token_ids) < expected - 1e-3).any()


def test_length_ends_exactly_at_the_budget(new_engine):
    outputs = new_engine().generate([request(i, n) for i, n in enumerate((1, 2, 31, 33, 64))])
    assert [o.num_tokens for o in outputs] == [1, 2, 31, 33, 64]
    assert {o.finish_reason for o in outputs} == {FinishReason.LENGTH}
    for output in outputs:
        assert len(output.token_ids) == len(output.logprobs) == len(output.versions)
        assert set(output.versions) == {0}


def test_any_end_token_ends_a_response_and_is_its_last_token(new_engine, make_policy):
    free = new_engine().generate([request(i, 30) for i in range(4)])
    policy = make_policy()
    ends = {*policy.tokenizer.eos_token_ids, free[0].token_ids[9], free[0].token_ids[4]}
    policy.tokenizer.eos_token_ids = tuple(ends)
    engine = new_engine(policy)
    cuts = [
        next((n + 1 for n, token in enumerate(one.token_ids) if token in ends), 30) for one in free
    ]
    # The first has an end token on the last place of its budget.
    budgets = [cuts[0], 30, 30, 30]
    asked = [request(i, budget, ignore_eos=False) for i, budget in enumerate(budgets)]
    for output, one, cut in zip(engine.generate(asked), free, cuts, strict=True):
        assert output.token_ids == one.token_ids[:cut]
        has_ended = one.token_ids[cut - 1] in ends
        assert output.finish_reason is (FinishReason.STOP if has_ended else FinishReason.LENGTH)
    ignoring = engine.generate([request(i, 30) for i in range(4)])
    assert ids_of(ignoring) == ids_of(free)


def test_a_stop_string_over_two_tokens_ends_a_response_at_its_last_token(new_engine, make_policy):
    free = new_engine().generate([request(0, 30)])[0]
    policy = make_policy()
    text = policy.tokenizer.decode(free.token_ids[6:8])
    policy.tokenizer.stop_strings = (text,)
    engine = new_engine(policy)
    ends = policy.tokenizer.eos_token_ids
    output = engine.generate([request(0, 30, ignore_eos=False)])[0]
    cut = next(
        n
        for n in range(1, 31)
        if text in policy.tokenizer.decode(free.token_ids[:n]) or free.token_ids[n - 1] in ends
    )
    assert output.token_ids == free.token_ids[:cut]
    assert output.finish_reason is FinishReason.STOP
    assert engine.generate([request(0, 30)])[0].token_ids == free.token_ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_partial_and_continued_equals_uninterrupted(new_engine, sampling):
    engine = new_engine()
    if not has_our_noise(engine) and sampling.get("temperature") != 0.0:
        pytest.skip("this engine promises it for greedy sampling only")
    whole = engine.generate([request(i, 40, **sampling) for i in range(5)])
    joined = [[] for _ in whole]
    logprobs = [[] for _ in whole]
    for window in (1, 7, 32):
        parts = engine.generate(
            [request(i, window, prefix=tuple(joined[i]), **sampling) for i in range(5)]
        )
        for index, part in enumerate(parts):
            joined[index] += part.token_ids
            logprobs[index] += part.logprobs
    assert joined == ids_of(whole)
    for parts, output in zip(logprobs, whole, strict=True):
        assert np.abs(np.array(parts) - output.logprobs).max() < 2e-4


def test_an_idle_engine_gives_the_bits_of_a_new_one(new_engine):
    used = new_engine()
    if not has_our_noise(used):
        pytest.skip("this engine keeps prefixes, and does not promise it")
    calls = [request(i, 30) for i in range(9)]
    used.generate([request(20 + i, 80) for i in range(3)])
    used.submit([request(30 + i, 40) for i in range(6)])
    used.poll(0.0)
    used.abort(None)
    for ours, fresh in zip(used.generate(calls), new_engine().generate(calls), strict=True):
        assert (ours.token_ids, ours.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_outputs_do_not_depend_on_the_rows_beside_them(new_engine):
    requests = [request(i, 5 + 7 * (i % 5)) for i in range(17)]
    together = ids_of(new_engine(max_rows=5).generate(requests))
    alone = new_engine(max_rows=1)
    assert together == [alone.generate([one])[0].token_ids for one in requests]
    backwards = new_engine(max_rows=17).generate(requests[::-1])
    assert together == ids_of(backwards)[::-1]


def test_seeds_and_windows_have_noise_of_their_own_and_equal_calls_equal_bits(new_engine):
    engine = new_engine()
    outputs = [engine.generate([request(0, 20, seed=seed)])[0] for seed in (7, 8, 7)]
    assert outputs[0].token_ids == outputs[2].token_ids != outputs[1].token_ids
    calls = [request(i, 12) for i in range(6)]
    first = engine.generate(calls)
    parts = [request(i, 12, prefix=tuple(o.token_ids)) for i, o in enumerate(first)]
    second = engine.generate(parts)
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))
    assert ids_of(engine.generate(parts)) == ids_of(second)
    fresh = [new_engine().generate(calls) for _ in range(2)]
    assert [o.logprobs for o in fresh[0]] == [o.logprobs for o in fresh[1]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_have_the_frequencies_of_the_softmax(new_engine, make_policy, temperature):
    engine = new_engine(max_rows=256)
    ids = prompt(3, 9)
    sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
    outputs = engine.generate(
        [Request(f"r{i}", ids, Sampling(**sampling, seed=i)) for i in range(DRAWS)]
    )
    scaled = exact_logits(make_policy(), ids)[-1] / temperature
    wanted = np.exp(scaled - np.logaddexp.reduce(scaled)) * DRAWS
    seen = np.bincount([o.token_ids[0] for o in outputs], minlength=len(wanted))
    common = wanted >= 5
    wanted = np.append(wanted[common], wanted[~common].sum())
    seen = np.append(seen[common], seen[~common].sum())
    freedom = len(wanted) - 1
    statistic = float(((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    assert abs(statistic - freedom) < CHI_SQUARE_LIMIT * np.sqrt(2 * freedom)


def test_a_prompt_of_one_token_works(new_engine, make_policy):
    policy = make_policy()
    one = Request("r", (7,), Sampling(max_new_tokens=6, temperature=0.0, ignore_eos=True))
    output = new_engine(policy).generate([one])[0]
    assert output.token_ids == reference_greedy(policy, (7,), 6)


def test_a_request_that_does_not_fit_fails_alone(new_engine):
    engine = new_engine(max_model_len=20)
    long = Request("long", prompt(1, 20), Sampling(max_new_tokens=3))
    strange = Request("strange", (5, 5000), Sampling(max_new_tokens=3))
    outputs = engine.generate([request(0, 3), long, strange, request(1, 3)])
    reasons = [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
    assert [o.finish_reason for o in outputs] == reasons
    assert "must be shorter than 20 tokens, got 20" in outputs[1].error
    assert outputs[1].token_ids == outputs[1].logprobs == []
    assert engine.state == "ready"
    # The limit of the model ends a response.
    one = Request("r", prompt(1, 15), Sampling(max_new_tokens=50, ignore_eos=True))
    (output,) = engine.generate([one])
    assert (output.num_tokens, output.finish_reason) == (5, FinishReason.LENGTH)


def test_non_finite_logits_fail_one_request_and_no_other(new_engine, make_policy):
    policy = make_policy()
    engine = new_engine(policy, max_rows=2)
    plain = [request(i, 12) for i in range(1, 6)]
    expected = ids_of(engine.generate(plain))
    poison = 4
    policy.model.model.embed_tokens.weight.data[poison] = float("nan")
    policy.model.lm_head.weight = type(policy.model.lm_head.weight)(
        policy.model.lm_head.weight.detach().nan_to_num(0.0)
    )
    policy.model.config.tie_word_embeddings = False
    clean = [r for r in plain if poison not in r.prompt_ids]
    bad = Request("bad", (5, poison, 6), Sampling(max_new_tokens=9))
    engine = new_engine(policy, max_rows=2)
    outputs = {o.request_id: o for o in engine.generate([bad, *clean])}
    assert outputs["bad"].finish_reason is FinishReason.ABORT
    assert outputs["bad"].token_ids == []
    assert "must be finite" in outputs["bad"].error
    for one, tokens in zip(plain, expected, strict=True):
        if one in clean and poison not in tokens:
            assert outputs[one.request_id].finish_reason is FinishReason.LENGTH
            assert outputs[one.request_id].num_tokens == 12


def test_a_router_that_is_not_finite_fails_requests_and_gives_no_token(new_engine, make_policy):
    policy = make_policy()
    good = weights(policy)
    routers = [name for name in good.names() if name.endswith("mlp.gate.weight")]
    if not routers:
        pytest.skip("a dense policy has no routers")
    tensors = {name: good.read(name).clone() for name in good.names()}
    tensors[routers[-1]][1, 0] = float("nan")
    engine = new_engine(policy)
    requests = [request(i, 12, temperature=0.0) for i in range(6)]
    before = ids_of(engine.generate(requests))
    engine.update_weights(DictWeights(tensors), 1)
    for output in engine.generate(requests):
        assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, [])
        assert "must be finite" in output.error
    # Nothing of it stays in the engine.
    engine.update_weights(good, 2)
    assert ids_of(engine.generate(requests)) == before
