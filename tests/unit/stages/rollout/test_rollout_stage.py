import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from planish import store
from planish.engines.sampling import request_seed
from planish.models.policy import load_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet, prompt_id
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.stream import StreamState, advance, position
from planish.run.stage import is_stopped
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.rollout import stage
from planish.stages.rollout.in_flight import InFlight
from planish.store.documents import write_json
from tests.unit.records.samples import take_groups
from tests.unit.stages.rollout.stage_run import after_iteration, easy_policy


def test_a_shard_holds_full_mixed_groups_with_their_log_probabilities(new_run):
    run = new_run()
    ref, metrics = run.call()
    rollouts = read_set(RolloutSet, ref.uri, sha256=ref.manifest_sha256)
    assert (rollouts.num_groups, rollouts.num_rows) == (6, 24)
    right = np.array(
        [r == a for r, a in zip(rollouts.response, rollouts.answer, strict=True)]
    ).reshape(6, 4)
    assert ((right.sum(1) > 0) & (right.sum(1) < 4)).all()
    assert metrics["kept_accuracy_mean"] == right.mean()
    policy = load_policy(run.policy_pin)
    for row in range(rollouts.num_rows):
        tokens = rollouts.response_tokens.row(row)
        ids = policy.tokenizer.encode_prompt(
            [{"role": "user", "content": prompt_text(rollouts, row)}]
        )
        assert rollouts.prompt_tokens.row(rollouts.group_index[row]).tolist() == ids
        whole = torch.tensor([[*ids, *tokens.tolist()]])
        with torch.inference_mode():
            logits = policy.model(input_ids=whole).logits[0, len(ids) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(-1, whole[0, len(ids) :, None])[:, 0]
        assert np.abs(expected.numpy() - rollouts.rollout_logprobs.row(row)).max() < 2e-4
        stopped = tokens[-1] == policy.tokenizer.eos_token_ids[0]
        assert rollouts.finish[row] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(tokens) == 8
        assert rollouts.response[row] == policy.tokenizer.decode(tokens.tolist())
    assert set(rollouts.policy_version.values.tolist()) == {0}


def test_columns_of_the_prompts_reach_the_verifier_and_the_reward_stage(new_run, monkeypatch):
    run = new_run()
    monkeypatch.setenv("PYTHONPATH", str(run.folder), prepend=":")
    (run.folder / "digit_reward.py").write_text(
        "def reward(response, answer, digit):\n    return float(response == digit)\n"
    )
    prompts = read_set(PromptSet, layout.prompts(run.root))
    extra = [json.dumps({"digit": answer}) for answer in prompts.answer]
    verifier = ["digit_reward:reward"] * prompts.num_rows
    for uri in store.list_uris(f"{layout.prompts(run.root)}/"):
        store.delete(uri)
    changed = replace(prompts, extra=extra, verifier=verifier)
    write_set(layout.prompts(run.root), changed, parents={}, attributes={"config_sha256": "c"})
    rollouts = read_set(RolloutSet, run.call()[0].uri, with_optional=False)
    assert rollouts.num_groups == 6
    assert [json.loads(cell)["digit"] for cell in rollouts.extra] == rollouts.answer
    rewards = score(rollouts, RewardConfig(max_response_tokens=8, overlong_buffer_tokens=0)).rewards
    right = [r == a for r, a in zip(rollouts.response, rollouts.answer, strict=True)]
    assert rewards.accuracy.tolist() == right
    assert rewards.keep.all()
    plain = replace(rollouts, extra=None, verifier=["exact"] * rollouts.num_rows)
    assert RolloutSet.concat([plain, rollouts]).extra == [""] * rollouts.num_rows + rollouts.extra


def prompt_text(rollouts, row):
    by_id = {}
    for k in range(10):
        message = [{"role": "user", "content": f"{k}+{k}="}]
        by_id[prompt_id(message, str(k % 4))] = message[0]["content"]
    return by_id[rollouts.prompt_id[row]]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("", {}),
        ("surplus", {"generation_prompts_factor": 4.0, "max_staleness": 1}),
        ("carry", {"dynamic_sampling": False, "window_tokens": 3, "temperature": 5.0}),
    ],
)
def test_a_second_call_is_already_done_only_while_all_its_sets_are_there(new_run, kind, changes):
    run = new_run(**changes)
    first, metrics = run.call()
    assert "sample_seconds" in run.log()["metrics"]
    again, numbers = run.call()
    assert again == first
    assert run.log()["already_done"] is True
    assert numbers == {k: metrics[k] for k in numbers}
    assert numbers["num_groups"] == run.attributes()["metrics"]["num_groups"] == 6
    places = [layout.rollouts(run.root, 1, 0)]
    if kind:
        places.append(getattr(layout, kind)(run.root, 1, 0))
        store.delete(f"{places[-1]}/manifest.json")
        assert run.call()[0] == first
        assert run.log()["already_done"] is False
        assert read_manifest(places[-1]).sha256 == run.attributes()[f"{kind}_sha256"]
    for place in places:
        text = store.read(f"{place}/manifest.json").decode()
        assert "seconds" not in text
        assert str(run.folder) not in text
    assert new_run(**changes).call()[0].manifest_sha256 == first.manifest_sha256


def test_rollouts_of_a_release_that_named_the_policys_manifest_are_already_done(new_run):
    run = new_run()
    first, _ = run.call()
    manifest, rollouts = read_manifest(first.uri), read_set(RolloutSet, first.uri)
    parents = {**manifest.parents, "policy": "ab" * 32}
    older = write_set(first.uri, rollouts, parents=parents, attributes=manifest.attributes)
    second, _ = run.call()
    assert second.manifest_sha256 == older.manifest_sha256 != first.manifest_sha256


def test_another_cursor_is_not_already_done(new_run, monkeypatch):
    run = new_run()
    first, _ = run.call()
    data = StreamState({"next": 7, "pending": [2]})
    monkeypatch.setattr(stage, "read_data", lambda pin: data)
    second, _ = run.call()
    assert second.manifest_sha256 != first.manifest_sha256
    assert run.attributes()["consumed"][0] == 2
    assert run.attributes()["cursor"] == {"next": 7, "pending": [2]}


def test_shards_share_the_groups_and_consume_every_ordinal_once(new_run):
    run = new_run(prompts_per_iteration=7)
    sets = [run.call(shard, 3)[0] for shard in range(3)]
    assert [ref.attributes["num_rows"] for ref in sets] == [12, 8, 8]
    consumed = [run.attributes(shard=s)["consumed"] for s in range(3)]
    assert all(k % 3 == s for s in range(3) for k in consumed[s])
    everything = [k for part in consumed for k in part]
    cursor = advance({"next": 0, "pending": []}, everything)
    surplus = sum(run.attributes(shard=s)["metrics"]["ds/surplus"] for s in range(3))
    generated = sum(run.attributes(shard=s)["metrics"]["num_generated_groups"] for s in range(3))
    assert len(everything) + surplus == generated
    # what is neither consumed nor below the highest ordinal comes again
    assert set(cursor["pending"]).isdisjoint(everything)


def test_the_seed_of_a_response_is_that_of_its_prompt_ordinal_and_sample(new_run):
    run = new_run(dynamic_sampling=False)
    ref, _ = run.call()
    rollouts = read_set(RolloutSet, ref.uri)
    from planish.engines import open_engine
    from planish.engines.config import EngineConfig
    from planish.engines.requests import ModelRef, Request, Sampling

    row = position(2, 10, 3)
    assert rollouts.prompt_id[8].startswith(rollouts.prompt_id[8])
    key = f"{rollouts.prompt_id[8]}/2"
    sampling = Sampling(max_new_tokens=8, seed=request_seed(3, 1, key, 1))
    prompt = tuple(rollouts.prompt_tokens.row(2).tolist())
    with open_engine(EngineConfig(), ModelRef(pin=run.policy_pin)) as engine:
        output = engine.generate([Request("x", prompt, sampling)])[0]
    assert output.token_ids == rollouts.response_tokens.row(9).tolist()
    asked = read_set(PromptSet, layout.prompts(run.root)).prompt_id[row]
    assert rollouts.prompt_id[8] == asked


def test_a_stopped_run_writes_an_empty_set_and_consumes_nothing(new_run):
    run = new_run()
    write_json(layout.stop_file(run.root), {})
    ref, metrics = run.call()
    assert ref.attributes["num_rows"] == 0
    assert read_set(RolloutSet, ref.uri).num_rows == 0
    assert run.attributes()["consumed"] == []
    assert metrics == {}
    assert is_stopped(run.root, 1)
    assert run.call()[0] == ref
    assert run.log()["already_done"] is True


def test_a_starved_shard_says_so(new_run, caplog):
    run = new_run(max_generation_rounds=1, temperature=0.01)
    ref, metrics = run.call()
    assert metrics["ds/starved"] == 1.0
    assert ref.attributes["num_rows"] < 24
    assert "dynamic_sampling_starved" in caplog.text
    assert run.attributes()["consumed"] == list(range(6))


def test_prompts_beyond_the_limit_are_dropped_and_counted(new_run, caplog):
    run = new_run(max_prompt_tokens=4, max_generation_rounds=2)
    _, metrics = run.call()
    # bos and four characters are five tokens
    assert metrics["group_dropped_incomplete"] == metrics["num_generated_groups"] == 12
    assert metrics["num_generated_tokens"] == 0
    assert run.attributes()["consumed"] == list(range(12))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_response_tokens": 1020}, r"1024 tokens, got 5 \+ .*= 1020; lower .*prompt \w"),
        ({"max_generation_rounds": 0, "temperature": 1e-4}, "in one pass over the prompts"),
        ({"starvation_policy": "raise", "max_generation_rounds": 1, "temperature": 0.01},
         "6 groups must qualify within 1"),
    ],
)  # fmt: skip
def test_impossible_settings_end_with_code_two(new_run, changes, text, caplog):
    run = new_run(**changes)
    with pytest.raises(SystemExit) as caught:
        run.call()
    assert caught.value.code == 2
    assert re.search(text, caplog.text)


def test_surplus_groups_fill_the_next_batch_first(new_run):
    run = new_run(generation_prompts_factor=4.0, max_staleness=1)
    for shard in range(2):
        run.call(shard, 2)
    sets = [read_manifest(layout.surplus(run.root, 1, s)) for s in range(2)]
    first = [run.attributes(1, s) for s in range(2)]
    for manifest, attributes in zip(sets, first, strict=True):
        assert manifest.sha256 == attributes["surplus_sha256"]
        assert set(manifest.attributes["ordinals"]) < set(attributes["consumed"])
        assert len(manifest.attributes["ordinals"]) == attributes["metrics"]["ds/surplus"]
    waiting = sorted(k for m in sets for k in m.attributes["ordinals"])
    groups = [read_set(RolloutSet, layout.surplus(run.root, 1, s)) for s in range(2)]
    pool = RolloutSet.concat(groups)
    order = np.argsort([k for m in sets for k in m.attributes["ordinals"]])
    state = after_iteration(run, 1, 2)
    refs = [run.call(shard, 3, state_pin=state, number=2)[0] for shard in range(3)]
    second = [run.attributes(2, s) for s in range(3)]
    for shard, attributes in enumerate(second):
        numbers = attributes["metrics"]
        mine = order[shard::3]
        used = int(numbers["ds/surplus_used"])
        assert used == min(2, len(mine)) > 0
        made = read_set(RolloutSet, refs[shard].uri)
        assert take_groups(made, range(used)) == take_groups(pool, mine[:used])
        assert set(take_groups(made, range(used)).policy_version.values.tolist()) == {0}
        assert numbers["num_groups"] == 2
        assert numbers["ds/surplus_taken"] == len(mine)
        # version 2 samples next: what version 0 has sampled is too old by then
        assert numbers["ds/surplus_expired"] == len(mine) - used
        assert attributes["surplus_sources"] == [m.sha256 for m in sets]
        assert not set(attributes["consumed"]) & set(waiting)
    consumed = [k for a in [*first, *second] for k in a["consumed"]]
    assert len(consumed) == len(set(consumed))
    total = sum(a["metrics"]["num_generated_groups"] for a in [*first, *second])
    assert len(consumed) == total


def test_without_reuse_nothing_new_is_written(new_run):
    run = new_run(generation_prompts_factor=4.0)
    _, metrics = run.call()
    assert metrics["ds/surplus"] > 0
    assert "ds/surplus_used" not in metrics
    assert not {"surplus_sha256", "surplus_sources"} & set(run.attributes())
    uri = layout.surplus(run.root, 1, 0) + "/manifest.json"
    assert not store.exists(uri)


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


UNCORRECTED = {"name": "vapo", "correction": "off"}


@pytest.mark.parametrize(
    ("changes", "harm", "code", "words"),
    [
        ({"window_tokens": 0}, None, 2, "`rollout.window_tokens` must be above 0 while responses"),
        ({"max_response_tokens": 3, "window_tokens": 2}, None, 2, "got 3 and 3 tokens for prompt"),
        (
            {"window_tokens": 8, "unfinished": "hold", "tables": {"algorithm": UNCORRECTED}},
            *(None, 2, "must not be 'off' while responses go on .* tokens of older policies"),
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


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_response_without_a_token_is_a_failed_one(new_run, monkeypatch, reason, caplog):
    take, emptied = InFlight._take, []

    def first_without_tokens(self, outputs):
        for output in outputs:
            if not emptied:
                emptied.append(output.request_id)
                output.token_ids, output.logprobs, output.versions = [], [], []
                output.finish_reason = reason
        return take(self, outputs)

    monkeypatch.setattr(InFlight, "_take", first_without_tokens)
    ref, metrics = new_run().call()
    assert "must have at least one token, got none from the engine" in caplog.text
    # It is tried again, and its group is whole.
    assert metrics["group_dropped_incomplete"] == 0
    assert read_set(RolloutSet, ref.uri).response_tokens.lengths.min() > 0
