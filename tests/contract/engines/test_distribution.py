"""What every engine draws from: the softmax of a float64 forward, until a stop."""

from __future__ import annotations

import numpy as np
import pytest

from planish.base.errors import EngineError
from planish.engines.requests import Request, Sampling
from planish.engines.weights import DictWeights
from planish.records.rollouts import FinishReason
from tests.contract.engines.test_control import weights
from tests.unit.engines.tiny import exact_logits, ids_of, prompt, request

DRAWS = 20_000
CHI_SQUARE_LIMIT = 5.0
"""In standard deviations above the mean of the statistic; seeds are fixed."""


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_have_the_frequencies_of_the_softmax(new_engine, make_policy, temperature):
    engine = new_engine(max_rows=256)
    ids = prompt(3, 9)
    sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
    outputs = engine.generate(
        [Request(f"r{i}", "g", ids, Sampling(**sampling, seed=i)) for i in range(DRAWS)]
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


def test_seeds_give_different_responses_and_the_same_seed_the_same_one(new_engine):
    engine = new_engine()
    one = [request(0, 20, seed=seed) for seed in (7, 8, 7)]
    outputs = [engine.generate([each])[0].token_ids for each in one]
    assert outputs[0] == outputs[2] != outputs[1]


def test_windows_do_not_repeat_the_tokens_of_the_window_before(new_engine):
    engine = new_engine()
    first = engine.generate([request(i, 12) for i in range(6)])
    parts = [request(i, 12, prefix=tuple(o.token_ids)) for i, o in enumerate(first)]
    second = engine.generate(parts)
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))
    assert ids_of(engine.generate(parts)) == ids_of(second)


def test_a_stop_string_over_two_tokens_ends_a_response_at_its_last_token(new_engine, make_policy):
    free = new_engine().generate([request(0, 30)])[0]
    policy = make_policy()
    text = policy.tokenizer.decode(free.token_ids[6:8])
    policy.tokenizer.stop_strings = (text,)
    engine = new_engine(policy)
    stopping, ignoring = request(0, 30, ignore_eos=False), request(0, 30)
    ends = policy.tokenizer.eos_token_ids
    output = engine.generate([stopping])[0]
    whole = policy.tokenizer.decode(free.token_ids)
    cut = next(
        n
        for n in range(1, 31)
        if text in policy.tokenizer.decode(free.token_ids[:n]) or free.token_ids[n - 1] in ends
    )
    assert text in whole
    assert output.token_ids == free.token_ids[:cut]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_string == (None if free.token_ids[cut - 1] in ends else text)
    assert engine.generate([ignoring])[0].token_ids == free.token_ids


def test_two_policies_that_take_turns_stay_what_they_are(new_engine, make_policy):
    requests = [request(i, 12, temperature=0.0) for i in range(4)]
    fresh = [ids_of(new_engine(make_policy(seed)).generate(requests)) for seed in (0, 1)]
    engine = new_engine(make_policy(0))
    for version, seed in enumerate((1, 0, 1, 0, 0, 1), start=1):
        engine.update_weights(weights(make_policy(seed)), version)
        outputs = engine.generate(requests)
        assert ids_of(outputs) == fresh[seed]
        assert {v for output in outputs for v in output.versions} == {version}


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_lack_a_part_leave_the_engine_as_it_was(new_engine, make_policy, change):
    engine = new_engine()
    before = ids_of(engine.generate([request(0, 12)]))
    good = weights(make_policy(1))
    tensors = {name: good.read(name) for name in good.names()}
    # Of a policy with experts this is a matrix of the last expert.
    name = [n for n in tensors if n.endswith("down_proj.weight")][-1]
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    with pytest.raises(EngineError, match=f"weights must fit the model.*{name}"):
        engine.update_weights(DictWeights(tensors), 1)
    assert (engine.state, engine.version()) == ("ready", 0)
    assert ids_of(engine.generate([request(0, 12)])) == before
