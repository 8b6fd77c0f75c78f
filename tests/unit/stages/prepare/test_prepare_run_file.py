"""`run.json`: new runs, resumed runs, changed settings, other roots."""

import json

import pytest

from planish import store
from planish.base.errors import ConfigError, RecordError
from planish.records import layout
from planish.records.io import write_files
from planish.stages.prepare.run_file import (
    StartPins,
    newest_version,
    open_run_file,
    read_run_file,
    start_after,
    write_run_file,
)

CONFIG = {"run": {"seed": 0}, "train": {"learning_rate": 1e-6}}
OTHER = {"run": {"seed": 0}, "train": {"learning_rate": 1e-4}}


def begin(root, config=CONFIG, **options):
    options = {"resume_from": "", "allow_config_change": False, **options}
    run, changed, is_new = open_run_file(root, config, **options)
    write_run_file(root, run)
    return run, changed, is_new


def add_policy(root, version, state=None):
    parents = {} if state is None else {"state": state.manifest_sha256}
    files = {"a": f"weights {version}".encode()}
    attributes = {"policy_version": version}
    return write_files(
        layout.policy(root, version), "policy/1", files, parents=parents, attributes=attributes
    )


def add_state(root, step):
    files = {"s": f"state {step}".encode()}
    return write_files(
        layout.state(root, step), "train-state/1", files, parents={}, attributes={"step": step}
    )


def test_a_new_root_starts_supervised(file_root):
    run, changed, is_new = begin(file_root)
    assert (run.initial, changed, is_new) == (StartPins("", ""), [], True)
    document = json.loads(store.read(layout.run_file(file_root)))
    assert document["config"] == CONFIG
    assert document["config_sha256"] == run.sha256
    assert document["initial"] == {"policy": "", "state": ""}
    assert read_run_file(file_root) == run


def test_another_configuration_lists_the_differing_keys(file_root):
    begin(file_root)
    with pytest.raises(ConfigError) as caught:
        begin(file_root, OTHER)
    assert "`train.learning_rate`: 1e-06 -> 0.0001" in str(caught.value)
    assert "allow_config_change=true" in str(caught.value)
    assert read_run_file(file_root).config == CONFIG


def test_a_run_goes_on_on_other_machines_without_being_asked(file_root):
    table = {**CONFIG["train"], "num_nodes": 0}
    first, _, _ = begin(
        file_root, {**CONFIG, "train": {**table, "trainer": "megatron", "tensor_parallel": 2}}
    )
    elsewhere = {**CONFIG, "train": {**table, "trainer": "fsdp2", "num_nodes": 3}}
    run, changed, is_new = begin(file_root, elsewhere)
    assert (run.sha256, is_new) == (first.sha256, False)
    assert changed == [
        "`train.num_nodes`: 0 -> 3",
        "`train.tensor_parallel`: 2 -> '(absent)'",
        "`train.trainer`: 'megatron' -> 'fsdp2'",
    ]
    assert read_run_file(file_root).config == elsewhere
    with pytest.raises(ConfigError, match=r"differs in `train.learning_rate`: [^`]* undo"):
        begin(file_root, {**OTHER, "train": {**elsewhere["train"], **OTHER["train"]}})


def test_an_allowed_change_is_listed_and_written(file_root):
    begin(file_root)
    run, changed, is_new = begin(file_root, OTHER, allow_config_change=True)
    assert changed == ["`train.learning_rate`: 1e-06 -> 0.0001"]
    assert not is_new
    assert read_run_file(file_root) == run
    assert run.config == OTHER


def test_a_run_can_start_from_the_newest_policy_of_another(tmp_path):
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    begin(old)
    add_policy(old, 0)
    states = [add_state(old, step) for step in (16, 32)]
    add_policy(old, 1, states[0])
    newest = add_policy(old, 2, states[1])
    run, _, is_new = begin(new, resume_from=f"{old}/")
    assert is_new
    assert run.initial == StartPins(newest.pin(), states[1].pin()) == run.origin
    assert run.resumed_from == old
    again, _, is_new = begin(new, resume_from=old)
    assert (again, is_new) == (run, False)
    assert begin(new)[0] == run


def test_a_run_can_start_from_any_earlier_policy_or_state_of_another(tmp_path):
    old = f"file://{tmp_path}/old"
    begin(old)
    states = [add_state(old, step) for step in (16, 32)]
    first = add_policy(old, 1, states[0])
    add_policy(old, 2, states[1])
    for name, pin in (("a", first.pin()), ("b", states[0].pin())):
        run, _, is_new = begin(f"file://{tmp_path}/{name}", resume_from=pin)
        assert (is_new, run.resumed_from) == (True, pin)
        assert run.initial == run.origin == StartPins(first.pin(), states[0].pin())
        assert begin(f"file://{tmp_path}/{name}", resume_from=pin)[0] == run


def test_a_pin_to_resume_from_that_names_nothing_is_refused(tmp_path):
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    begin(old)
    alone = add_state(old, 16)
    digest = f"#sha256={'0' * 64}"
    for pin, words in (
        (f"{old}/policies/00001{digest}", "must name what is there"),
        (f"{alone.uri}{digest}", "must name what is there"),
        (alone.pin(), "a policy was exported from"),
        (f"{old}/iterations/00001/rollouts/00{digest}", "or the pin of one of its policies"),
        (f"{alone.uri}#sha256=12", "or the pin of one of its policies"),
        (f"{old}/policies/{digest}", "or the pin of one of its policies"),
    ):
        with pytest.raises(ConfigError, match=words):
            begin(new, resume_from=pin)
    assert read_run_file(new) is None


def test_a_run_that_only_began_hands_on_its_own_start(tmp_path):
    roots = [f"file://{tmp_path}/{name}" for name in "abc"]
    begin(roots[0])
    policy = add_policy(roots[0], 0)
    begin(roots[1], resume_from=roots[0])
    assert begin(roots[2], resume_from=roots[1])[0].initial == StartPins(policy.pin(), "")


def test_resuming_needs_a_run_a_policy_and_the_same_configuration(tmp_path):
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    with pytest.raises(ConfigError, match=r"`resume_from` must be the root of a run"):
        begin(new, resume_from=old)
    begin(old)
    with pytest.raises(ConfigError, match=r"finished policy, but .* has none"):
        begin(new, resume_from=old)
    add_policy(old, 0)
    with pytest.raises(ConfigError, match=r"`train.learning_rate`: 1e-06 -> 0.0001"):
        begin(new, OTHER, resume_from=old)
    _, changed, _ = begin(new, OTHER, resume_from=old, allow_config_change=True)
    assert len(changed) == 1


def test_a_root_keeps_the_run_that_it_came_from(tmp_path):
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    begin(new)
    with pytest.raises(ConfigError, match=r"must stay ''"):
        begin(new, resume_from=old)
    assert not begin(new, resume_from=new)[2]


def test_the_state_of_a_policy_is_found_by_digest(file_root):
    states = [add_state(file_root, step) for step in (16, 32, 48)]
    policy = add_policy(file_root, 2, states[1])
    assert start_after(file_root, 2) == StartPins(policy.pin(), states[1].pin())
    assert newest_version(file_root) == 2
    assert newest_version(f"{file_root}-none") is None


def test_a_policy_whose_state_is_gone_is_told(file_root):
    state = add_state(file_root, 16)
    add_policy(file_root, 1, state)
    store.delete(f"{state.uri}/manifest.json")
    with pytest.raises(RecordError, match=r"train state .* restore it"):
        start_after(file_root, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"config": {"run": 5}, "code_version": "1"}', "the tables of a configuration, got "),
        ('{"config": {}, "code_version": ""}', "got resumed_from: "),
        (
            '{"config": {}, "code_version": "", "resumed_from": "", "origin": {"policy": "x"}, '
            '"initial": {}}',
            "got origin.policy: ",
        ),
    ],
)
def test_a_damaged_run_file_is_told(file_root, text, words):
    store.write(layout.run_file(file_root), text.encode())
    with pytest.raises(ConfigError, match=rf"run\.json. must hold config.*{words}"):
        read_run_file(file_root)
