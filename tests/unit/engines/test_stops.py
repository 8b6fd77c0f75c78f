"""Stop strings: the automaton over tokens, and responses that end by it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.engines.requests import FinishReason, Request, Sampling
from planish.engines.stops import stop_table
from planish.engines.transformers.engine import TransformersEngine
from planish.models.policy import Policy, save_policy
from planish.models.tokens import MAX_STOP_BYTES, Tokenizer
from tests.rounding import GRADIENTS
from tests.unit.engines.tiny import family_policy, prompt, qwen3_policy, start

pytestmark = pytest.mark.slow

LETTERS = st.text("abc", min_size=1, max_size=4)


@given(
    strings=st.lists(LETTERS, min_size=1, max_size=4),
    vocabulary=st.lists(st.text("abc", max_size=5), min_size=1, max_size=8),
    data=st.data(),
)
@example(strings=["abab", "ba"], vocabulary=["ab", "a", "b"], data=None)
@settings(max_examples=300, deadline=None)
def test_a_string_is_found_at_the_token_that_completes_it(strings, vocabulary, data):
    picks = [0, 1, 2, 0, 0] if data is None else data.draw(
        st.lists(st.integers(0, len(vocabulary) - 1), max_size=12)
    )  # fmt: skip
    try:
        table = stop_table(strings, [text.encode() for text in vocabulary])
    except ConfigError:
        joined = "".join(vocabulary[token] for token in picks)
        assert not all(string in joined for string in strings)
        return
    state, text = 0, ""
    for token in picks:
        state = table.advance(state, [token])
        text += vocabulary[token]
        assert table.complete[state] == any(s in text for s in strings)


def test_a_string_may_be_cut_within_a_character():
    euro = "\u20ac".encode()
    table = stop_table(["\u20ac"], [euro[:1], euro[1:], b"x"])
    assert table.complete[table.advance(0, [0, 1])]
    assert not table.complete[table.advance(0, [0, 2, 1])]
    # Tokens beyond the table have no text.
    assert table.complete[table.advance(0, [0, 99, 1])]


@pytest.mark.parametrize(
    "strings", [["a", ""], ["a" * (MAX_STOP_BYTES + 1)], ["a" * 200, "b" * 57]]
)
def test_strings_that_can_not_be_used_are_refused(strings):
    with pytest.raises(ConfigError, match="must not be empty and have at most 256 bytes"):
        stop_table(strings, [b"a"])


@pytest.mark.parametrize(
    ("strings", "vocabulary", "unspelled"),
    [
        (["ab", "ac"], ["a", "b"], "['ac']"),
        (["bb"], ["ab", "c"], "['bb']"),
        (["b"], ["", "a"], "['b']"),
        (["aa"], ["a"], ""),
        (["aab", "c"], ["ab", "c"], "['aab']"),
        (["bab"], ["ab", "c"], ""),
        (["ab", "bc"], ["ab", "c"], ""),
        (["a", "ax"], ["a", "b"], "['ax']"),
        (["yz", "xyz"], ["xyz"], ""),
    ],
)
def test_strings_that_no_tokens_spell_are_refused(strings, vocabulary, unspelled):
    tokens = [text.encode() for text in vocabulary]
    if not unspelled:
        stop_table(strings, tokens)
        return
    with pytest.raises(ConfigError) as caught:
        stop_table(strings, tokens)
    assert f"tokens of this policy spell, got {unspelled}, which no" in str(caught.value)


def stopping(policy: Policy, *strings: str) -> Policy:
    return Policy(policy.model, Tokenizer(policy.tokenizer.backend, stop_strings=strings))


def requests(count: int, **sampling) -> list[Request]:
    return [
        Request(f"r{i}", prompt(i), Sampling(40, seed=70 + i, **sampling)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen3_policy()


def cut_by_text(policy: Policy, ids, strings) -> int:
    """Tokens up to the one whose text completes a string, found by decoding every beginning."""
    for count in range(1, len(ids) + 1):
        text = policy.tokenizer.decode(ids[:count])
        if any(string in text for string in strings):
            return count
    return len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "GPT2"])
def test_responses_end_with_the_string_whatever_the_decoder(policy, family):
    served = policy if family == "Qwen3" else family_policy(family)
    whole = start(served).generate(requests(64))
    texts = [served.tokenizer.decode(o.token_ids) for o in whole]
    strings = (texts[3][4:6], texts[10][7:9])
    outputs = start(stopping(served, *strings)).generate(requests(64))
    ended = 0
    for output, plain in zip(outputs, whole, strict=True):
        cut = cut_by_text(served, plain.token_ids, strings)
        assert output.token_ids == plain.token_ids[:cut]
        np.testing.assert_allclose(output.logprobs, plain.logprobs[:cut], atol=GRADIENTS)
        text = served.tokenizer.decode(output.token_ids)
        if any(string in text for string in strings):
            ended += 1
            assert output.finish_reason is FinishReason.STOP
        else:
            assert output.finish_reason is plain.finish_reason
    assert ended >= 2


def test_a_string_is_found_across_windows(policy):
    whole = start(policy).generate(requests(32))
    longest = max(range(32), key=lambda row: whole[row].num_tokens)
    target = policy.tokenizer.decode(whole[longest].token_ids)[6:10]
    engine = start(stopping(policy, target))
    expected = engine.generate(requests(32))
    assert policy.tokenizer.decode(expected[longest].token_ids).endswith(target)
    prefixes: dict[str, tuple[int, ...]] = {one.request_id: () for one in requests(32)}
    reasons: dict[str, FinishReason] = {}
    while len(reasons) < 32:
        going = [
            replace(
                one,
                sampling=replace(one.sampling, max_new_tokens=min(7, 40 - len(prefix))),
                response_prefix=prefix,
            )
            for one in requests(32)
            for prefix in [prefixes[one.request_id]]
            if one.request_id not in reasons
        ]
        for output in engine.generate(going):
            prefixes[output.request_id] += tuple(output.token_ids)
            is_whole = len(prefixes[output.request_id]) == 40
            if is_whole or output.finish_reason is not FinishReason.LENGTH:
                reasons[output.request_id] = output.finish_reason
    for result in expected:
        assert list(prefixes[result.request_id]) == result.token_ids
        assert reasons[result.request_id] is result.finish_reason


def test_rows_that_change_places_keep_their_states(policy):
    whole = start(policy, max_rows=64).generate(requests(48))
    target = policy.tokenizer.decode(whole[7].token_ids)[5:8]
    many = start(stopping(policy, target), max_rows=64).generate(requests(48))
    few = start(stopping(policy, target), max_rows=3).generate(requests(48))
    assert many[7].num_tokens < whole[7].num_tokens
    assert [(o.num_tokens, o.finish_reason) for o in many] == [
        (o.num_tokens, o.finish_reason) for o in few
    ]


def test_an_export_names_its_strings_and_an_engine_of_it_keeps_them(tmp_path, policy):
    whole = start(policy).generate(requests(8))
    target = policy.tokenizer.decode(whole[1].token_ids)[3:5]
    ref = save_policy(
        f"file://{tmp_path}/p", stopping(policy, target), version=0, parents={}, attributes={}
    )
    from planish.engines.requests import ModelRef

    engine = TransformersEngine(max_rows=8)
    engine.start(ModelRef(pin=ref.pin()))
    output = engine.generate(requests(8))[1]
    assert policy.tokenizer.decode(output.token_ids).endswith(target)
    assert output.finish_reason is FinishReason.STOP
