"""The rollout stage with windows, on a real engine."""

import re
import shutil

import numpy as np
import pytest
import torch

from planish import store
from planish.models.policy import save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet, prompt_id
from planish.records.rollouts import FinishReason, RolloutSet
from planish.store.documents import write_json
from tests.unit.stages.rollout.stage_run import after_iteration, easy_policy

WINDOWS = {"dynamic_sampling": False, "window_tokens": 3, "temperature": 5.0}


def rows_of(run, number, shard=0, place=layout.rollouts):
    """Return the set, and its row numbers by (ordinal, sample)."""
    uri = place(run.root, number, shard)
    rollouts, manifest = read_set(RolloutSet, uri), read_manifest(uri)
    ordinals = manifest.attributes["ordinals"]
    keys = zip(rollouts.group_index.tolist(), rollouts.sample_index.tolist(), strict=True)
    return rollouts, {(ordinals[g], s): row for row, (g, s) in enumerate(keys)}


@pytest.mark.slow
def test_windows_under_one_policy_give_the_tokens_of_whole_responses(new_run):
    whole = new_run(**{**WINDOWS, "window_tokens": 0})
    whole.call()
    expected = read_set(RolloutSet, layout.rollouts(whole.root, 1, 0))
    run = new_run(**WINDOWS)
    seen, state, lengths, tokenizer = {}, "", [], easy_policy().tokenizer
    for number in range(1, 5):
        run.call(state_pin=state, number=number)
        rollouts, rows = rows_of(run, number)
        for key, row in rows.items():
            start = int(rollouts.window_start[row])
            text = tokenizer.decode(rollouts.response_tokens.row(row).tolist())
            assert rollouts.response[row] == text
            parts = seen.setdefault(key, ([], []))
            assert rollouts.response_tokens.row(row).tolist()[:start] == parts[0]
            parts[0].extend(rollouts.response_tokens.row(row).tolist()[start:])
            parts[1].extend(rollouts.rollout_logprobs.row(row).tolist()[start:])
            assert rollouts.policy_version.row(row)[start:].tolist() == [number - 1] * (
                len(parts[0]) - start
            )
            if rollouts.finish[row] == FinishReason.LENGTH:
                assert len(parts[0]) == 8
        state = after_iteration(run, number, 1)
    for row in range(expected.num_rows):
        key = (int(expected.group_index[row]), int(expected.sample_index[row]))
        tokens = expected.response_tokens.row(row).tolist()
        assert seen[key][0] == tokens
        assert np.abs(seen[key][1] - expected.rollout_logprobs.row(row)).max() < 1e-5
        lengths.append(len(tokens))
    # the case is worth something: some responses took one window, some all of them
    assert min(lengths) <= 3
    assert max(lengths) == 8


@pytest.mark.parametrize("unfinished", ["train", "hold", "hold_group"])
def test_a_window_for_the_longest_response_gives_the_set_without_windows(new_run, unfinished):
    whole = new_run(**{**WINDOWS, "window_tokens": 0})
    run = new_run(**{**WINDOWS, "window_tokens": 8, "unfinished": unfinished})
    for shard in range(2):
        expected, _ = whole.call(shard, 2)
        ref, metrics = run.call(shard, 2)
        assert read_set(RolloutSet, ref.uri) == read_set(RolloutSet, expected.uri)
        theirs = whole.attributes(shard=shard)
        assert run.attributes(shard=shard)["consumed"] == theirs["consumed"]
        for name in (
            *("decode_iterations", "slot_utilisation", "num_generated_tokens", "num_kept_tokens"),
            *("accuracy_mean", "response_length_mean", "truncated_frac", "num_live_slots"),
            *("num_groups", "num_generated_groups", "num_continued", "staleness_max"),
        ):
            assert metrics[name] == theirs["metrics"][name], name
        assert metrics["num_carried"] == 0
        assert read_set(RolloutSet, layout.carry(run.root, 1, shard)).num_rows == 0


def test_a_stopped_iteration_leaves_the_carry_to_the_state_before(new_run):
    run = new_run(**WINDOWS)
    run.call()
    state = after_iteration(run, 1, 1)
    write_json(layout.stop_file(run.root), {})
    ref, metrics = run.call(state_pin=state, number=2)
    assert ref.attributes["num_rows"] == 0
    assert metrics == {}
    attributes = run.attributes(2)
    assert (attributes["consumed"], attributes["carry_sha256"]) == ([], "")
    assert attributes["carry_sources"] == [run.attributes(1)["carry_sha256"]]
    store.delete(layout.stop_file(run.root))
    store.delete(layout.stopped_file(run.root, 2))
    _, numbers = run.call(state_pin=state, number=2)
    assert numbers["num_continued"] == run.attributes(1)["metrics"]["num_carried"] > 0


def test_a_fork_goes_on_with_the_responses_of_the_other_root(new_run):
    run, fork = new_run(**WINDOWS), new_run(**{**WINDOWS, "temperature": 1.9})
    run.call()
    state = after_iteration(run, 1, 1)
    _, metrics = fork.call(state_pin=state, number=1)
    assert metrics["num_continued"] == run.attributes(1)["metrics"]["num_carried"] > 0


def test_prompts_beyond_the_limit_are_passed_over(new_run):
    run = new_run(**WINDOWS, max_prompt_tokens=5)
    asks = [[{"role": "user", "content": f"{k}+{k}="}] for k in (1, 22, 3, 44, 5)]
    prompts = PromptSet(
        prompt_id=[prompt_id(m, "1") for m in asks],
        messages=asks,
        answer=["1"] * 5,
        verifier=["exact"] * 5,
        source=["sums"] * 5,
        pass_rate=np.full(5, np.nan, np.float32),
    )
    write_set(layout.prompts(run.root), prompts, parents={}, attributes={})
    _, metrics = run.call()
    assert metrics["num_live_slots"] == 24
    assert metrics["num_drawn_groups"] == 6
    dropped = int(metrics["group_dropped_incomplete"])
    assert dropped >= 2
    consumed = run.attributes()["consumed"]
    assert consumed == list(range(6 + dropped))
    assert not {"22+22=", "44+44="} & set(run.attributes()["ordinals"])


def gone(run, state):
    shutil.rmtree(run.folder / "root" / "iterations" / "00001" / "carry")


def damaged(run, state):
    path = run.folder / "root" / "iterations" / "00001" / "carry" / "00" / "manifest.json"
    path.write_text(path.read_text().replace('"drawn"', '"brawn"'))


@pytest.mark.parametrize(
    ("changes", "harm", "code", "words"),
    [
        ({"window_tokens": 0}, None, 2, "`rollout.window_tokens` must be above 0 while responses"),
        ({"max_response_tokens": 3, "window_tokens": 2}, None, 2, "got 3 and 3 tokens for prompt"),
        (
            {"max_response_tokens": 1020},
            None,
            2,
            r"1024 tokens, got 5 \+ .*= 1020; lower .*prompt \w",
        ),
        ({}, gone, None, "carry/00` must hold a finished set"),
        ({}, damaged, None, "carry/00.* sha256"),
    ],
)
def test_responses_that_can_not_go_on_end_the_stage(new_run, changes, harm, code, words, caplog):
    first = new_run(**WINDOWS)
    first.call()
    state = after_iteration(first, 1, 1)
    if harm:
        harm(first, state)
    run = new_run(**{**WINDOWS, **changes})
    with pytest.raises(SystemExit) as caught:
        run.call(state_pin=state)
    assert caught.value.code == code or code is None
    assert re.search(words, caplog.text)


def test_no_prompt_within_the_limit_ends_with_code_two(new_run, caplog):
    run = new_run(**WINDOWS, max_prompt_tokens=4)
    with pytest.raises(SystemExit) as caught:
        run.call()
    assert caught.value.code == 2
    assert "got 10 in a row with more" in caplog.text


def test_without_open_responses_windows_may_be_left(new_run):
    first = new_run(**{**WINDOWS, "window_tokens": 8})
    first.call()
    state = after_iteration(first, 1, 1)
    run = new_run(**{**WINDOWS, "window_tokens": 0})
    run.call(state_pin=state)
    assert run.attributes()["consumed"] == list(range(6, 12))


def test_a_response_that_fails_keeps_its_slot_and_its_tokens(new_run, caplog):
    run = new_run(**WINDOWS)
    run.call()
    before, rows = rows_of(run, 1, place=layout.carry)
    state = after_iteration(run, 1, 1)
    policy = easy_policy()
    with torch.no_grad():
        # every prompt holds "+", whose embedding poisons all that follows
        bad = policy.tokenizer.encode_prompt([{"role": "user", "content": "+"}])[-1]
        policy.model.config.tie_word_embeddings = False
        head = policy.model.lm_head.weight.detach().clone()
        policy.model.model.embed_tokens.weight[bad] = torch.nan
        policy.model.lm_head.weight = torch.nn.Parameter(head)
    uri = layout.policy(run.root, 9)
    run.policy_pin = save_policy(uri, policy, version=1, parents={}, attributes={}).pin()
    _, metrics = run.call(state_pin=state, number=2)
    assert "must be finite" in caplog.text
    assert metrics["num_failed_rows"] == metrics["num_live_slots"] == 24
    assert metrics["num_generated_tokens"] == 0
    assert "accuracy_mean" not in metrics
    after, kept = rows_of(run, 2, place=layout.carry)
    for key, row in rows.items():
        tokens = before.response_tokens.row(row).tolist()
        assert after.response_tokens.row(kept[key]).tolist() == tokens
    rollouts, given = rows_of(run, 2)
    # train keeps the values of earlier windows only of rows that it sees
    assert set(given) == set(rows)
    assert rollouts.window_start.tolist() == rollouts.response_tokens.lengths.tolist()
    good = after_iteration(run, 2, 1)
    _, numbers = run.call(state_pin=good, number=3)
    assert (numbers["num_failed_rows"], numbers["num_live_slots"]) == (0, 24)
    assert numbers["num_continued"] == len(rows)
