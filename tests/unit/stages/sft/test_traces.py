"""Worked traces as tokens, and the order of mini-batches."""

import itertools

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.models.tokens import character_tokenizer
from planish.stages.sft.traces import EncodedTraces, encode_traces, minibatches, probe_rows
from tests.unit.tiny_run import sums

TOKENIZER = character_tokenizer("0123456789+-=")
PAIRS = [(a, b) for a in range(1, 5) for b in range(5)]


def test_trace_is_prompt_then_response_then_end_token():
    _, traces = sums([(1, 2)])
    encoded = encode_traces(traces, TOKENIZER)
    assert encoded.tokens[0].tolist() == [1, 5, 14, 6, 16, 16, 7, 2]
    assert encoded.prompt_lengths.tolist() == [5]
    assert encoded.lengths.tolist() == [8]


def test_mask_covers_the_response_with_its_end_and_nothing_else():
    tokens = [np.array([1, 5, 6, 2]), np.array([1, 7, 2, 3, 4, 5])]
    ids, select = EncodedTraces(tokens, np.array([2, 5])).batch([0, 1])
    assert ids.tolist() == [[1, 5, 6, 2, 0, 0], [1, 7, 2, 3, 4, 5]]
    assert select.astype(int).tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]


def test_probe_prompts_and_surplus_traces_are_left_out_by_id():
    prompts, traces = sums(PAIRS)
    held = frozenset(prompts.prompt_id[:3])
    assert len(encode_traces(traces, TOKENIZER, without=held).tokens) == len(PAIRS) - 3
    few = encode_traces(traces, TOKENIZER, max_traces=4)
    everything = encode_traces(traces, TOKENIZER)
    assert [t.tolist() for t in few.tokens] == [t.tolist() for t in everything.tokens[:4]]


def test_order_of_the_input_does_not_matter():
    _, traces = sums(PAIRS)
    _, backwards = sums(PAIRS[::-1])
    left, right = encode_traces(traces, TOKENIZER), encode_traces(backwards, TOKENIZER)
    assert [t.tolist() for t in left.tokens] == [t.tolist() for t in right.tokens]


def test_traces_that_do_not_fit_the_model_are_left_out():
    _, traces = sums([(1, 2), (100, 200)])
    assert len(encode_traces(traces, TOKENIZER, max_tokens=8).tokens) == 1


def test_no_trace_left_says_how_many_were_left_out():
    prompts, traces = sums([(1, 2), (100, 200)])
    with pytest.raises(ConfigError, match="got none of 2 after leaving out 1 probe prompts and 1"):
        encode_traces(traces, TOKENIZER, without=frozenset([prompts.prompt_id[0]]), max_tokens=8)


def test_probe_rows_are_the_first_by_id_and_at_most_half():
    prompts, _ = sums(PAIRS)
    rows = probe_rows(prompts, 5)
    chosen = {prompts.prompt_id[row] for row in rows}
    assert chosen == set(sorted(prompts.prompt_id)[:5])
    assert rows == sorted(rows)
    assert len(probe_rows(prompts, 1000)) == len(PAIRS) // 2
    assert probe_rows(prompts.take([0]), 3) == [0]


def test_each_epoch_holds_every_row_once_in_batches_of_similar_length():
    lengths = np.array([9, 3, 7, 3, 9, 5, 7, 1, 5, 1])
    batches = list(itertools.islice(minibatches(lengths, 4, seed=0), 6))
    for epoch in (batches[:3], batches[3:]):
        assert sorted(itertools.chain(*epoch)) == list(range(10))
        spans = sorted((min(lengths[b]), max(lengths[b])) for b in epoch)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert sorted(len(b) for b in batches[:3]) == [2, 4, 4]


def test_order_is_a_function_of_the_seed_and_changes_between_epochs():
    lengths = np.full(64, 5)
    first, again, other = (
        list(itertools.islice(minibatches(lengths, 8, seed=s), 16)) for s in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[:8] != first[8:]
