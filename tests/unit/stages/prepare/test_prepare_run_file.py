"""`run.json`: new runs, resumed runs, changed settings, other roots."""

import dataclasses
import os
import subprocess
import sys
import threading

import pytest
import torch

from planish import store
from planish.base.config import GONE, config_sha256
from planish.base.errors import ConfigError, RecordError
from planish.checkpoint import train_state as checkpoint
from planish.records import layout
from planish.records.io import write_files
from planish.run import lock, stage_log
from planish.run.lock import Holder, acquire, beat, current_holder, hand_over, is_alive, read_lock
from planish.run.stage import load_run
from planish.stages.prepare.chain import Link, count_links, find_link, read_link, record_link
from planish.stages.prepare.run_file import (
    StartPins,
    newest_version,
    open_run_file,
    read_run_file,
    start_after,
    write_run_file,
)
from planish.stages.prepare.stage import prepare
from planish.store.documents import write_json
from tests.integration.waiting import wait_for
from tests.unit.stages.prepare.test_prepare_stage import SMALL, wish

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


def test_another_configuration_lists_the_differing_keys_and_is_taken_where_it_is_allowed(file_root):
    begin(file_root)
    with pytest.raises(ConfigError) as caught:
        begin(file_root, OTHER)
    assert "`train.learning_rate`: 1e-06 -> 0.0001" in str(caught.value)
    assert "allow_config_change=true" in str(caught.value)
    assert read_run_file(file_root).config == CONFIG
    run, changed, is_new = begin(file_root, OTHER, allow_config_change=True)
    assert (changed, is_new) == (["`train.learning_rate`: 1e-06 -> 0.0001"], False)
    assert read_run_file(file_root) == run
    assert run.config == OTHER


def of_an_earlier_release(root, **changes):
    """Write the run file of a release that had more settings; returns the digest that it had."""
    tables = {section: {**CONFIG.get(section, {}), **gone} for section, gone in GONE.items()}
    run, *_ = open_run_file(root, CONFIG | tables, resume_from="", allow_config_change=False)
    raw = run.document()
    for name, value in changes.items():
        raw["config"][name.split(".")[0]][name.split(".")[1]] = value
    write_json(layout.run_file(root), raw)
    return run.sha256


@pytest.mark.parametrize("changes", [{}, {"train.commit_steps": 4}])
def test_a_run_of_an_earlier_release_goes_on_with_its_digest(file_root, changes):
    digest = of_an_earlier_release(file_root, **changes)
    config = CONFIG | {section: CONFIG.get(section, {}) for section in GONE}
    assert load_run(file_root, digest)["config"] == config
    assert config_sha256(config) == digest
    assert begin(file_root, config)[1:] == ([], False)


@pytest.mark.parametrize("section", GONE)
def test_a_setting_that_is_fixed_by_now_is_refused_by_name_where_a_run_changed_it(
    file_root, section
):
    name = sorted(GONE[section])[0]
    of_an_earlier_release(file_root, **{f"{section}.{name}": 0.7})
    with pytest.raises(ConfigError) as caught:
        begin(file_root)
    told = f"`{section}.{name}` must be {GONE[section][name]}, which this release holds fixed"
    assert str(caught.value).startswith(f"{told}, got 0.7 in `{layout.run_file(file_root)}`")


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


ROOTS = ("file_root", pytest.param("s3_root", marks=pytest.mark.server))


@pytest.fixture(params=ROOTS)
def root(request):
    return request.getfixturevalue(request.param)


def other(pid, started=1):
    return Holder("local", host="elsewhere", space=lock.process_space(), pid=pid, started=started)


def test_a_live_process_of_this_machine_is_refused_by_name(file_root):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        holder = other(child.pid, lock.process_start(child.pid))
        acquire(file_root, holder, now=1000.0)
        with pytest.raises(ConfigError, match=rf"process {child.pid} on elsewhere .* wait for"):
            acquire(file_root, current_holder(), now=10_000.0)
    finally:
        child.kill()
        child.wait()


def test_a_killed_process_loses_the_lock_at_once(root):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    holder = other(child.pid, lock.process_start(child.pid))
    acquire(root, holder, now=1000.0)
    child.kill()
    child.wait()
    assert acquire(root, current_holder(), now=1000.1).generation == 2
    assert beat(root, holder) is False


def test_a_later_process_with_the_same_id_is_not_the_holder():
    mine = current_holder()
    assert is_alive(mine) is True
    assert is_alive(dataclasses.replace(mine, started=mine.started + 1)) is False


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = lock.process_start(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(other(child.pid, started)) is False
    child.wait()


@pytest.mark.parametrize(("silent", "free"), [(599.0, False), (600.0, True)])
def test_where_nothing_tells_the_heartbeat_decides_after_ten_minutes(file_root, silent, free):
    holder = dataclasses.replace(other(7), space="another boot")
    acquire(file_root, holder, now=1000.0)
    if free:
        assert acquire(file_root, current_holder(), now=1000.0 + silent).generation == 2
    else:
        with pytest.raises(ConfigError, match=r"wait 1 s without a heartbeat"):
            acquire(file_root, current_holder(), now=1000.0 + silent)


def test_of_many_that_take_over_at_the_same_moment_one_wins(root):
    acquire(root, dataclasses.replace(other(1), started=1), now=0.0)
    barrier, won, lost = threading.Barrier(8), [], []

    def race(number):
        me = Holder("cluster", run_id=f"racer-{number}")
        barrier.wait()
        try:
            won.append(acquire(root, me, alive=lambda h: h.kind == "cluster").generation)
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [2]
    assert len(lost) == 7
    assert all("one run at a time" in text for text in lost)


def test_a_stage_process_holds_for_what_started_it(tmp_path):
    script = "from planish.run.lock import current_holder; print(current_holder().pid)"
    (tmp_path / "planish_probe.py").write_text(script)
    # A stage runs as `sh -ec "... kfp.dsl.executor_main ..."` below the runner.
    inner = f"{sys.executable} {tmp_path}/planish_probe.py kfp.dsl.executor_main; true"
    found = subprocess.run(
        ["sh", "-ec", inner], capture_output=True, text=True, check=True, env=_environment()
    )
    assert int(found.stdout) == os.getpid()


def test_a_program_that_is_no_stage_holds_for_itself():
    script = (
        "import os; from planish.run.lock import current_holder as h; print(h().pid, os.getpid())"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=_environment(),
    )  # fmt: skip
    pid, own = found.stdout.split()
    assert pid == own


def _environment():
    return {name: value for name, value in os.environ.items() if name != "RUN_ID"}


@pytest.mark.parametrize("text", ["[]", '{"holder": {"kind": "local"}}', '{"holder": {"x": 1}}'])
def test_a_damaged_lock_is_told_and_not_taken(file_root, text):
    uri = layout.lock_file(file_root, 1)
    store.write(uri, text.encode())
    with pytest.raises(RecordError, match="must name a holder"):
        acquire(file_root, current_holder())


def test_a_lock_without_a_word_is_free_since_its_writer_never_began(file_root):
    uri = layout.lock_file(file_root, 1)
    store.write(uri, b"")
    assert acquire(file_root, current_holder()).generation == 2


@pytest.mark.parametrize("heartbeat", [float("nan"), float("inf"), 1e12])
def test_a_heartbeat_that_can_not_be_is_no_sign_of_life(file_root, heartbeat):
    acquire(file_root, dataclasses.replace(other(7), space="another boot"), now=heartbeat)
    assert acquire(file_root, current_holder(), now=1000.0).generation == 2


def test_a_running_stage_beats_for_its_run(file_root, monkeypatch):
    monkeypatch.setattr(stage_log, "FLUSH_SECONDS", 0.02)
    acquire(file_root, current_holder(), now=1000.0)
    with stage_log.StageLog(file_root, "train", 1, 0):
        wait_for(lambda: read_lock(file_root).heartbeat_seconds != 1000.0, 60.0)
    assert read_lock(file_root).heartbeat_seconds > 1_000_000


def test_a_holder_that_hands_over_makes_room_once(root):
    first, second, third = (Holder("cluster", run_id=name) for name in "abc")
    assert not hand_over(root, first)
    acquire(root, first)
    assert hand_over(root, first)
    assert read_lock(root).generation == 1
    assert acquire(root, second, alive=lambda _: True).generation == 2
    assert not hand_over(root, first)
    with pytest.raises(ConfigError, match="run b of the cluster holds its lock"):
        acquire(root, third, alive=lambda _: True)


def take(root, index, iterations):
    link = find_link(root, index, iterations)
    record_link(root, link)
    return link


def test_the_same_run_again_keeps_its_offset(file_root):
    take(file_root, 0, 2)
    add_policy(file_root, 2)
    assert take(file_root, 1, 3) == Link(1, 2, 3)
    add_policy(file_root, 4)
    assert take(file_root, 1, 3) == Link(1, 2, 3)
    assert count_links(file_root) == 2


def test_a_run_needs_the_one_before_to_be_finished(file_root):
    take(file_root, 0, 2)
    add_policy(file_root, 1)
    with pytest.raises(ConfigError, match=r"run 0 .* must be finished .* last iteration 2"):
        find_link(file_root, 1, 2)


def test_minus_one_resumes_the_unfinished_run_and_then_adds_one(file_root):
    assert take(file_root, -1, 2) == Link(0, 0, 2)
    assert take(file_root, -1, 2) == Link(0, 0, 2)
    add_policy(file_root, 2)
    assert take(file_root, -1, 2) == Link(1, 2, 2)
    add_policy(file_root, 4)
    assert take(file_root, -1, 5) == Link(2, 4, 5)


def test_the_newest_run_may_be_made_longer_or_shorter(file_root):
    take(file_root, 0, 2)
    add_policy(file_root, 2)
    assert take(file_root, 0, 4) == Link(0, 0, 4)
    assert read_link(file_root, 0).num_iterations == 4


def test_a_link_of_a_later_release_may_say_more(file_root):
    uri = layout.chain_file(file_root, 0)
    write_json(uri, {"offset": 0, "num_iterations": 4, "resident": 2})
    assert read_link(file_root, 0) == Link(0, 0, 4)


def test_a_run_that_others_build_on_keeps_its_length(file_root):
    take(file_root, 0, 2)
    add_policy(file_root, 2)
    take(file_root, 1, 2)
    assert find_link(file_root, 0, 2) == Link(0, 0, 2)
    with pytest.raises(ConfigError, match=r"must stay 2, got 3"):
        find_link(file_root, 0, 3)


@pytest.mark.parametrize(
    ("index", "iterations", "words"),
    [(1, 2, "at most 0"), (-2, 2, "-1 or more"), (0, 0, "at least 1")],
)
def test_impossible_places_are_refused(file_root, index, iterations, words):
    with pytest.raises(ConfigError, match=words):
        find_link(file_root, index, iterations)


PENALTY = f"{SMALL} algorithm.kl_coefficient=0.04"
FIRST = "policies/00000"


def a_policy(root, version, parents):
    files = {"p": b"%d" % version}
    uri = layout.policy(root, version)
    return write_files(uri, "policy/1", files, parents=parents, attributes={})


def finish_training(root, *, names_reference=True, **facts):
    """Leave what the two iterations of a first run do."""
    first = a_policy(root, 0, {})
    name = {"reference": first.pin().removeprefix(f"{root}/")} if names_reference else {}
    state = checkpoint.save(
        layout.state(root, 2),
        {"model": {"w": torch.zeros(1)}, "extra": {"step": 2, **name, **facts}},
        parents={},
        attributes={"step": 2},
    )
    a_policy(root, 2, {"state": state.manifest_sha256})
    return first


def test_a_new_run_has_no_reference_to_look_for_and_its_plan_tells_the_penalty(file_root):
    outcome = prepare(file_root, wish(overrides=PENALTY))
    told = "| penalty | 0.04 x KL to the policy that training began with |"
    assert told in outcome.documents["summary"]
    assert "penalty" not in prepare(f"{file_root}/other", wish()).documents["summary"]


def test_chained_and_forked_runs_have_the_reference_that_the_state_names(file_root):
    prepare(file_root, wish(overrides=PENALTY))
    finish_training(file_root)
    prepare(file_root, wish(overrides=PENALTY, index=1))
    prepare(f"{file_root}/fork", wish(overrides=PENALTY, resume_from=file_root))
    store.delete(f"{file_root}/{FIRST}/manifest.json")
    for place, more in ((file_root, {"index": 1}), ("fork2", {"resume_from": file_root})):
        root = place if place == file_root else f"{file_root}/{place}"
        with pytest.raises(ConfigError, match="the reference policy of the KL penalty must be at"):
            prepare(root, wish(overrides=PENALTY, **more))


def test_a_penalty_that_comes_later_needs_a_pinned_reference(file_root):
    prepare(file_root, wish())
    first = finish_training(file_root, names_reference=False)
    prepare(file_root, wish(index=1))
    late = {"overrides": PENALTY, "index": 1, "allow_config_change": True}
    with pytest.raises(ConfigError, match="must name the reference policy"):
        prepare(file_root, wish(**late))
    late["overrides"] += f" train.reference_policy={first.pin()}"
    summary = prepare(file_root, wish(**late)).documents["summary"]
    assert f"| penalty | 0.04 x KL to `{first.pin()}` |" in summary


def test_adapters_are_those_of_the_state_that_a_run_goes_on_from(file_root):
    rank = f"{SMALL} model.lora_rank="
    prepare(file_root, wish(overrides=f"{rank}4"))
    lora = {"rank": 4, "alpha": 32.0, "target_modules": []}
    finish_training(file_root, lora=lora)
    prepare(file_root, wish(overrides=f"{rank}4", index=1))
    for place, more in ((file_root, {"index": 1}), ("fork", {"resume_from": file_root})):
        root = place if place == file_root else f"{file_root}/{place}"
        for number, words in ((8, "rank 8"), (0, "all weights")):
            changed = wish(overrides=f"{rank}{number}", allow_config_change=True, **more)
            with pytest.raises(ConfigError, match=f"rank 4, alpha.*got {words}.*undo the change"):
                prepare(root, changed)
