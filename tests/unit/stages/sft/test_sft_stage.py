"""The sft stage: cold start, imported models, resumed runs, and the control beside it."""

import json

import pytest
import torch

from planish.models.policy import build_policy, load_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.prompts import TraceSet
from planish.records.refs import Ref
from planish.stages.sft import control
from planish.stages.sft.config import SftConfig
from planish.stages.sft.stage import check_start, run
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


def test_cold_start_writes_version_zero_and_tells_what_it_took(file_root, tmp_path):
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


def test_second_run_repeats_the_answer_without_training(file_root, tmp_path):
    prompts, digest = write_data(file_root), make_run(file_root)
    first = start(file_root, tmp_path, digest, prompts)
    assert start(file_root, tmp_path, digest, prompts) == first
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


def test_trained_model_is_imported_as_it_is(file_root, tmp_path):
    folder, given = given_model(tmp_path)
    prompts = write_data(file_root)
    digest = make_run(file_root, model={"path": str(folder), "dtype": "bfloat16"})
    result, ref, metrics = start(file_root, tmp_path, digest, prompts)
    assert metrics == {"imported": 1.0}
    assert ref.attributes["dtype"] == "bfloat16"
    policy = load_policy(result.policy_pin)
    assert policy.version == 0
    for name, tensor in given.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor.bfloat16()), name
    assert start(file_root, tmp_path, digest, prompts)[0] == result


def test_trained_model_can_be_trained_on_by_force(file_root, tmp_path):
    folder, given = given_model(tmp_path)
    prompts = write_data(file_root)
    digest = make_run(file_root, model={"path": str(folder)}, sft={"force": True})
    result, _, metrics = start(file_root, tmp_path, digest, prompts)
    assert metrics["steps"] == 6.0
    policy = load_policy(result.policy_pin)
    assert not torch.equal(policy.model.model.norm.weight, given.model.model.norm.weight)


@pytest.mark.slow
def test_adapters_change_linear_layers_alone_and_are_merged(file_root, tmp_path):
    folder, given = given_model(tmp_path)
    prompts = write_data(file_root)
    model = {"path": str(folder), "lora_rank": 2, "lora_target_modules": ["q_proj", "up_proj"]}
    digest = make_run(file_root, model=model, sft={"force": True})
    result, _, metrics = start(file_root, tmp_path, digest, prompts)
    after, before = load_policy(result.policy_pin).model.state_dict(), given.model.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    adapted = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    assert changed == adapted
    for name in adapted:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) == 2
    assert metrics["num_trained_parameters"] == sum(2 * sum(before[n].shape) for n in adapted)


def test_missing_model_ends_with_the_code_of_a_wrong_configuration(file_root, tmp_path, caplog):
    prompts = write_data(file_root)
    digest = make_run(file_root, model={"path": str(tmp_path / "none")})
    with pytest.raises(SystemExit) as end:
        start(file_root, tmp_path, digest, prompts)
    assert end.value.code == 2
    assert "`model.path` must be an existing folder or a hub id" in caplog.text


def test_resumed_run_passes_its_pins_through(file_root, tmp_path):
    other = f"file://{tmp_path}/other"
    facts = {"version": 4, "parents": {}, "attributes": {"config_sha256": "c"}}
    pin = save_policy(layout.policy(other, 4), build_policy(tiny_model(), 5), **facts).pin()
    state = f"{layout.state(other, 64)}#sha256={'5' * 64}"
    prompts = write_data(file_root)
    digest = make_run(file_root, initial={"policy": pin, "state": state})
    result, ref, metrics = start(file_root, tmp_path, digest, prompts)
    assert result == (pin, state)
    assert ref.attributes["policy_version"] == 4
    assert metrics == {"resumed": 1.0}
    assert not (tmp_path / "root" / "policies").exists()


@pytest.mark.parametrize(
    ("accuracy", "remedy"), [(0.1, "raise `sft.max_steps`"), (0.5, "lower `sft.target_accuracy`")]
)
def test_start_outside_the_band_is_told_with_a_remedy(caplog, accuracy, remedy):
    check_start(accuracy, SftConfig())
    assert f"must lie in 0.15..0.45, got {accuracy:.3f}" in caplog.text
    assert remedy in caplog.text


def test_start_inside_the_band_is_silent(caplog):
    check_start(0.15, SftConfig())
    check_start(0.45, SftConfig(enforce_start_band=True))
    assert not caplog.records


def test_enforced_band_ends_the_run_again_when_it_is_repeated(file_root, tmp_path, caplog):
    prompts = write_data(file_root)
    digest = make_run(file_root, sft={"enforce_start_band": True, "min_start": 0.44})
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            start(file_root, tmp_path, digest, prompts)
        assert end.value.code == 2
    assert caplog.text.count("the start accuracy must lie in 0.44..0.45") >= 2
    assert read_manifest(layout.policy(file_root, 0)).attributes["metrics"]["steps"] == 6.0


def test_run_without_traces_skips_the_cold_start_with_one_line(file_root, tmp_path, caplog):
    prompts, digest = write_data(file_root), make_run(file_root)
    _, nothing = sums([])
    assert isinstance(nothing, TraceSet)
    write_set(layout.traces(file_root), nothing, parents={}, attributes={})
    first = start(file_root, tmp_path, digest, prompts)
    assert first[2] == {"cold_start_skipped": 1.0}
    told = [line for line in caplog.messages if "cold start skipped" in line]
    assert len(told) == 1
    assert "no worked traces" in told[0]
    assert "give a model" in told[0]
    untrained = build_policy(tiny_model(), seed=0).model.state_dict()
    policy = load_policy(first[0].policy_pin)
    assert all(torch.equal(policy.model.state_dict()[n], t) for n, t in untrained.items())
    assert start(file_root, tmp_path, digest, prompts) == first


@pytest.mark.slow
def test_control_learns_for_the_seconds_it_is_given(file_root, tmp_path, capsys):
    prompts, digest = write_data(file_root), make_run(file_root)
    start(file_root, tmp_path, digest, prompts)
    assert control.main(["--root", file_root, "--seconds", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {
        *("accuracy", "greedy", "learning_rate", "num_traces", "seconds", "steps")
    }
    assert found["learning_rate"] == 1e-3
    assert found["num_traces"] == 32.0
    assert found["steps"] >= 1.0
    assert 0.5 <= found["seconds"] < 30.0
    assert 0.0 <= found["accuracy"] <= 1.0


def test_control_with_no_seconds_measures_the_start_itself(file_root, tmp_path):
    prompts, digest = write_data(file_root), make_run(file_root)
    start(file_root, tmp_path, digest, prompts)
    found = control.measure_control(file_root, 0.0)
    assert found["steps"] == 0.0
    again = control.measure_control(file_root, 0.0)
    assert (found["accuracy"], found["greedy"]) == (again["accuracy"], again["greedy"])


def test_control_of_a_root_without_a_run_is_an_error(file_root):
    assert control.main(["--root", file_root, "--seconds", "1"]) == 1
