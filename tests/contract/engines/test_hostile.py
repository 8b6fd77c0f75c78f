"""One bad request ends alone, with a text: what is in flight beside it goes on, on every engine."""

import math
from dataclasses import replace

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.records.rollouts import FinishReason
from tests.contract.engines.test_control import poll_all
from tests.unit.engines.tiny import exact_logprobs, ids_of, request

HUGE = 10**5000
"""Python refuses to write it as text."""
SERVED = {
    "seed": [0, 2**63 - 1],
    "temperature": [0, 1e-4, 0.003, 3, 1e4],
    "top_p": [1, 1e-300],
    "top_k": [1, 10**6, 2**63 - 1],
    "max_new_tokens": [1, 2**63 - 1],
}
REFUSED = {
    "max_new_tokens": [0, -1, 2**63, HUGE, 2.0, True, "3", None, math.nan],
    "temperature": [
        *(-1, -1e-9, 1e-5, 1e-40, 1e5, math.nan, math.inf, -math.inf, HUGE, "1", None, True),
    ],
    "top_p": [0, -0.1, 1.0001, math.nan, math.inf, "1", None, True],
    "top_k": [-3, -1, 2**63, HUGE, 1.5, "4", None, False],
    "seed": [-1, 2**63, 2**64, HUGE, 0.5, "7", None],
    "ignore_eos": [1, None, "no"],
    "want_routing": [True, 1, "yes"],
}  # fmt: skip
STRANGE = {
    "prompt_ids": [
        *([5, 6], "ab", None, np.array([5, 6]), (5, 6.0), (5, None), (True,), (-1,), (HUGE,)),
    ],
    "response_prefix": [[5], (54,), (np.int64(5),), ("a",), None, (2**63,)],
    "sampling": [None, {}, 3],
}  # fmt: skip


def bad_requests():
    """Every refused value, each in a request that is right but for it, with the field's name."""
    base = request(0, 6)
    for field, values in REFUSED.items():
        for number, value in enumerate(values):
            sampling = replace(base.sampling, **{field: value})
            yield field, replace(base, request_id=f"{field}-{number}", sampling=sampling)
    for field, values in STRANGE.items():
        for number, value in enumerate(values):
            yield field, replace(base, request_id=f"{field}-{number}", **{field: value})


def test_each_bad_value_ends_its_own_request_and_none_in_flight(new_engine):
    engine = new_engine()
    good = [request(i, 40) for i in range(1, 4)]
    expected = ids_of(engine.generate(good))
    engine.submit(good)
    engine.poll(0.0)
    bad = {one.request_id: field for field, one in bad_requests()}
    told = {}
    for _, one in bad_requests():
        engine.submit([one])
        told.update((o.request_id, o) for o in engine.poll(0.0))
        assert engine.state == "running"
    done = {**told, **poll_all(engine, len(bad) + len(good) - len(told))}
    assert [done[one.request_id].token_ids for one in good] == expected
    for name, field in bad.items():
        output = done[name]
        assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, [])
        assert not output.is_lost
        named = "token ids must lie in" in output.error or f"`{field}` must be" in output.error
        assert named, (name, output.error)
    assert engine.state == "ready"


def test_a_call_that_is_wrong_as_a_whole_changes_nothing(new_engine):
    engine = new_engine()
    good = request(1, 20)
    expected = ids_of(engine.generate([good]))
    engine.submit([good])
    engine.poll(0.0)
    for name in (None, 5, b"r", ("r",)):
        with pytest.raises(ConfigError, match="`request_id` must be a text"):
            engine.submit([request(2, 3), replace(good, request_id=name)])
    assert [one.request_id for one in engine.abort(["r2", "x"])] == []
    assert [poll_all(engine, 1)["r1"].token_ids] == expected
    assert engine.generate([replace(good, request_id="")])[0].num_tokens == 20


def test_values_at_the_borders_are_served_truly(new_engine):
    engine = new_engine(max_model_len=64)
    base = request(3, 8)
    asked = []
    for name, values in SERVED.items():
        for value in values:
            sampling = replace(base.sampling, **{name: value})
            asked.append(replace(base, request_id=f"{name}-{value}", sampling=sampling))
    outputs = {o.request_id: o for o in engine.generate(asked)}
    assert not [o.error for o in outputs.values() if o.error]
    greedy = outputs["temperature-0"].token_ids
    for name in ("temperature-0.0001", "top_k-1", "top_p-1e-300"):
        assert outputs[name].token_ids == greedy
        assert np.abs(outputs[name].logprobs).max() < 1e-3
    # Far from 1 every token has the same share; nothing is raised or lowered to a limit.
    assert np.allclose(outputs["temperature-10000.0"].logprobs, -math.log(54), atol=0.01)
    assert outputs[f"max_new_tokens-{2**63 - 1}"].num_tokens == 64 - len(base.prompt_ids)


@pytest.mark.parametrize("temperature", [0.001, 0.004, 3.0])
def test_every_temperature_is_sampled_at_as_it_is(new_engine, make_policy, temperature):
    """Logits as small as .004: a temperature that is moved to .01 or 2 shows in each token."""
    policy = make_policy()
    policy.model.model.norm.weight.data.mul_(temperature / 3)
    asked = [request(i, 10, temperature=temperature) for i in range(3)]
    for one, output in zip(asked, new_engine(policy).generate(asked), strict=True):
        expected = exact_logprobs(policy, one, output.token_ids)
        assert expected.min() < -0.1
        assert np.abs(np.array(output.logprobs) - expected).max() < 2e-4
