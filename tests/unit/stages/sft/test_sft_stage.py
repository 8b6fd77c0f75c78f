"""The sft stage: cold start, imported models, resumed runs, and the control beside it."""

import itertools
import json

import numpy as np
import pytest
import torch

from planish.base.errors import ConfigError
from planish.models.policy import build_policy, load_policy, save_policy
from planish.models.tokens import character_tokenizer
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.prompts import TraceSet
from planish.records.refs import Ref
from planish.stages.sft import control
from planish.stages.sft.config import SftConfig
from planish.stages.sft.stage import check_start, run
from planish.stages.sft.traces import EncodedTraces, encode_traces, minibatches, probe_rows
from planish.stages.sft.training import train_steps, train_until
from tests.unit.tiny_run import artifact, make_run, sums, tiny_model, write_data


def start(root, tmp_path, digest, prompts):
    result = run(
        root=root,
        config_sha256=digest,
        prompts=artifact(tmp_path, "prompts", prompts),
        policy=artifact(tmp_path, "policy"),
        metrics=artifact(tmp_path, "metrics"),
    )
    folder = tmp_path / "artifacts"
    ref = Ref.from_json((folder / "policy").read_text())
    return result, ref, json.loads((folder / "metrics").read_text())


@pytest.fixture
def begin(file_root, tmp_path):
    """Call the stage on written data, in a run with these tables."""
    prompts = write_data(file_root)
    return lambda **tables: start(file_root, tmp_path, make_run(file_root, **tables), prompts)


def test_cold_start_writes_version_zero_tells_what_it_took_and_is_not_repeated(file_root, tmp_path):
    prompts, digest = write_data(file_root), make_run(file_root)
    result, ref, metrics = start(file_root, tmp_path, digest, prompts)
    assert ref.uri == layout.policy(file_root, 0)
    assert result == (ref.pin(), "")
    assert metrics["steps"] == 6.0
    assert metrics["num_probes"] == 4.0
    assert metrics["num_traces"] == 32.0
    manifest = read_manifest(ref.uri)
    assert manifest.parents == {
        "prompts": prompts.manifest_sha256,
        "traces": read_manifest(layout.traces(file_root)).sha256,
    }
    assert manifest.attributes["config_sha256"] == digest
    policy = load_policy(result.policy_pin)
    assert policy.version == 0
    untrained = build_policy(tiny_model(), seed=0)
    assert not torch.equal(
        policy.model.model.embed_tokens.weight, untrained.model.model.embed_tokens.weight
    )
    assert start(file_root, tmp_path, digest, prompts) == (result, ref, metrics)
    log = json.loads((tmp_path / "root" / "logs" / "00000-sft-00.json").read_text())
    assert log["already_done"] is True


def test_two_roots_give_equal_bits_and_another_seed_other_ones(tmp_path):
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        root = f"file://{tmp_path / name}/root"
        (tmp_path / name).mkdir()
        prompts, digest = write_data(root), make_run(root, run={"seed": seed})
        digests.append(start(root, tmp_path / name, digest, prompts)[1].manifest_sha256)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def given_model(tmp_path):
    policy = build_policy(tiny_model(), seed=5)
    save_policy((tmp_path / "given").as_uri(), policy, version=9, parents={}, attributes={})
    return tmp_path / "given", policy


def test_trained_model_is_imported_as_it_is(begin, tmp_path):
    folder, given = given_model(tmp_path)
    model = {"path": str(folder), "dtype": "bfloat16"}
    result, ref, metrics = begin(model=model)
    assert metrics == {"imported": 1.0}
    assert ref.attributes["dtype"] == "bfloat16"
    policy = load_policy(result.policy_pin)
    assert policy.version == 0
    for name, tensor in given.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor.bfloat16()), name
    assert begin(model=model)[0] == result


def test_trained_model_can_be_trained_on_by_force(begin, tmp_path):
    folder, given = given_model(tmp_path)
    result, _, metrics = begin(model={"path": str(folder)}, sft={"force": True})
    assert metrics["steps"] == 6.0
    policy = load_policy(result.policy_pin)
    assert not torch.equal(policy.model.model.norm.weight, given.model.model.norm.weight)


@pytest.mark.slow
def test_adapters_change_linear_layers_alone_and_are_merged(begin, tmp_path):
    folder, given = given_model(tmp_path)
    model = {"path": str(folder), "lora_rank": 2, "lora_target_modules": ["q_proj", "up_proj"]}
    result, _, metrics = begin(model=model, sft={"force": True})
    after, before = load_policy(result.policy_pin).model.state_dict(), given.model.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    adapted = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    assert changed == adapted
    for name in adapted:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) == 2
    assert metrics["num_trained_parameters"] == sum(2 * sum(before[n].shape) for n in adapted)


def test_resumed_run_passes_its_pins_through(begin, tmp_path):
    other = f"file://{tmp_path}/other"
    facts = {"version": 4, "parents": {}, "attributes": {"config_sha256": "c"}}
    pin = save_policy(layout.policy(other, 4), build_policy(tiny_model(), 5), **facts).pin()
    state = f"{layout.state(other, 64)}#sha256={'5' * 64}"
    result, ref, metrics = begin(initial={"policy": pin, "state": state})
    assert result == (pin, state)
    assert ref.attributes["policy_version"] == 4
    assert metrics == {"resumed": 1.0}
    assert not (tmp_path / "root" / "policies").exists()


@pytest.mark.parametrize(
    ("accuracy", "remedy"), [(0.1, "raise `sft.max_steps`"), (0.5, "lower `sft.target_accuracy`")]
)
def test_start_outside_the_band_alone_is_told_with_a_remedy(caplog, accuracy, remedy):
    check_start(0.15)
    check_start(0.45)
    assert not caplog.records
    check_start(accuracy)
    assert f"must lie in 0.15..0.45, got {accuracy:.3f}" in caplog.text
    assert remedy in caplog.text


def test_run_without_traces_skips_the_cold_start_with_one_line(begin, file_root, caplog):
    _, nothing = sums([])
    assert isinstance(nothing, TraceSet)
    write_set(layout.traces(file_root), nothing, parents={}, attributes={})
    first = begin()
    assert first[2] == {"cold_start_skipped": 1.0}
    told = [line for line in caplog.messages if "cold start skipped" in line]
    assert len(told) == 1
    assert "no worked traces" in told[0]
    assert "give a model" in told[0]
    untrained = build_policy(tiny_model(), seed=0).model.state_dict()
    policy = load_policy(first[0].policy_pin)
    assert all(torch.equal(policy.model.state_dict()[n], t) for n, t in untrained.items())
    assert begin() == first


@pytest.mark.slow
def test_control_learns_for_the_seconds_it_is_given(begin, file_root, capsys):
    begin()
    assert control.main(file_root, "0.5") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {
        *("accuracy", "greedy", "learning_rate", "num_traces", "seconds", "steps")
    }
    assert found["learning_rate"] == 1e-3
    assert found["num_traces"] == 32.0
    assert found["steps"] >= 1.0
    assert 0.5 <= found["seconds"] < 30.0
    assert 0.0 <= found["accuracy"] <= 1.0


def test_control_with_no_seconds_measures_the_start_itself(begin, file_root):
    begin()
    found = control.measure_control(file_root, 0.0)
    assert found["steps"] == 0.0
    again = control.measure_control(file_root, 0.0)
    assert (found["accuracy"], found["greedy"]) == (again["accuracy"], again["greedy"])


def test_control_of_a_root_without_a_run_is_an_error(file_root):
    assert control.main(file_root, "1") == 1


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
def test_loss_falls():
    losses = [step.loss for step in take(*prepared(), 60)]
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])


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


TOKENIZER = character_tokenizer("0123456789+-=")
ROW_PAIRS = [(a, b) for a in range(1, 5) for b in range(5)]


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
    prompts, traces = sums(ROW_PAIRS)
    held = frozenset(prompts.prompt_id[:3])
    assert len(encode_traces(traces, TOKENIZER, without=held).tokens) == len(ROW_PAIRS) - 3
    few = encode_traces(traces, TOKENIZER, max_traces=4)
    everything = encode_traces(traces, TOKENIZER)
    assert [t.tolist() for t in few.tokens] == [t.tolist() for t in everything.tokens[:4]]


def test_order_of_the_input_does_not_matter():
    _, traces = sums(ROW_PAIRS)
    _, backwards = sums(ROW_PAIRS[::-1])
    left, right = encode_traces(traces, TOKENIZER), encode_traces(backwards, TOKENIZER)
    assert [t.tolist() for t in left.tokens] == [t.tolist() for t in right.tokens]


def test_no_trace_left_says_how_many_were_left_out():
    prompts, traces = sums([(1, 2), (100, 200)])
    with pytest.raises(ConfigError, match="got none of 2 after leaving out 1 probe prompts and 1"):
        encode_traces(traces, TOKENIZER, without=frozenset([prompts.prompt_id[0]]), max_tokens=8)


def test_probe_rows_are_the_first_by_id_and_at_most_half():
    prompts, _ = sums(ROW_PAIRS)
    rows = probe_rows(prompts, 5)
    chosen = {prompts.prompt_id[row] for row in rows}
    assert chosen == set(sorted(prompts.prompt_id)[:5])
    assert rows == sorted(rows)
    assert len(probe_rows(prompts, 1000)) == len(ROW_PAIRS) // 2
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
