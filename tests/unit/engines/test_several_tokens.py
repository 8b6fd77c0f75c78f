"""A step of vLLM may give a request any number of tokens; what follows its end is in no output."""

from dataclasses import replace
from types import SimpleNamespace

from planish.engines.requests import Request, Sampling
from planish.engines.stops import stop_table
from planish.engines.vllm.engine import VllmEngine, _Running
from planish.records.rollouts import FinishReason


def part(token_ids, finish_reason=None):
    """What a step of vLLM gives one request."""
    logprobs = [{token: SimpleNamespace(logprob=-0.5 * token)} for token in token_ids]
    new = SimpleNamespace(
        token_ids=token_ids, logprobs=logprobs, routed_experts=None, finish_reason=finish_reason
    )
    return SimpleNamespace(outputs=[new], finished=finish_reason is not None, num_cached_tokens=0)


def row_of(engine, **sampling):
    request = Request("r", (1, 2), Sampling(max_new_tokens=8, **sampling))
    row = _Running(request, frozenset({7}))
    engine._running["r"] = row
    return row


def test_vllm_trims_what_follows_a_stop_token_of_the_same_step():
    engine = VllmEngine()
    row = row_of(engine)
    assert engine._take(row, part([])) is None
    assert engine._take(row, part([3, 4, 5])) is None
    assert engine.stats()["tokens"] == 3
    output = engine._take(row, part([6, 7, 8, 9]))
    assert output.token_ids == [3, 4, 5, 6, 7]
    assert output.logprobs == [-1.5, -2.0, -2.5, -3.0, -3.5]
    assert output.finish_reason is FinishReason.STOP
    assert engine.stats()["tokens"] == 5
    assert not engine._running


def test_vllm_trims_what_follows_a_stop_string_and_ends_at_its_budget():
    engine = VllmEngine()
    engine._strings = stop_table(["ab"], [b"a", b"b", b"c"])
    output = engine._take(row_of(engine), part([2, 0, 1, 2]))
    assert (output.token_ids, output.finish_reason) == ([2, 0, 1], FinishReason.STOP)
    row = row_of(engine)
    row.request = replace(row.request, sampling=Sampling(max_new_tokens=3))
    output = engine._take(row, part([2, 2, 2], "length"))
    assert (output.token_ids, output.finish_reason) == ([2, 2, 2], FinishReason.LENGTH)
