"""The prepare stage as a whole, on real stores."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from planish import store
from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import write_files
from planish.run.avoid import AvoidedNode, avoid, node_affinity
from planish.run.chain import Chain, with_settings
from planish.run.lock import Holder, acquire, current_holder
from planish.run.stage import PathArtifact
from planish.stages.prepare.chain import Link
from planish.stages.prepare.plan import RunPlan
from planish.stages.prepare.run_file import open_run_file
from planish.stages.prepare.stage import Wish, liveness, prepare, run
from planish.submit.root import stop
from tests.unit.stages.prepare.test_prepare_cluster import FakeCluster

SMALL = "rollout.prompts_per_iteration=8 train.rollouts_per_minibatch=64"


def wish(**changes):
    facts = {
        "preset": "dapo-tiny",
        "config": "",
        "overrides": SMALL,
        "model": "",
        "dataset": "",
        "seed": 3,
        "chain": "",
        "num_iterations": 2,
        "num_shards": 2,
        "requests": "",
        "max_avoided_nodes": 0,
    }
    settings = {name: changes.pop(name) for name in [*changes] if name in Chain.model_fields}
    return Wish(**{**facts, "chain": with_settings("", **settings), **changes})


def finish(root, version):
    state = write_files(
        *(layout.state(root, 16 * version), "train-state/1", {"s": str(version).encode()}),
        parents={},
        attributes={},
    )
    return state, write_files(
        *(layout.policy(root, version), "policy/1", {"p": str(version).encode()}),
        parents={"state": state.manifest_sha256},
        attributes={},
    )


def run_stage(folder, root, **changes):
    """Run the stage as its component does; returns (values, summary, its metadata)."""
    folder.mkdir(exist_ok=True)
    summary = PathArtifact(f"{folder}/s.md")
    values = run(root=root, summary=summary, **wish(**changes)._asdict())
    return values, Path(summary.path).read_text(), summary.metadata


def test_a_new_run_is_planned_and_written(file_root, tmp_path):
    values, summary, metrics = run_stage(tmp_path / "a", file_root + "/")
    document = json.loads(store.read(layout.run_file(file_root)))
    assert values == (document["config_sha256"], 0, 0, {}, True)
    assert document["config"]["run"]["seed"] == 3
    assert document["preset"] == "dapo-tiny"
    assert "| kind | new run |" in summary
    assert "| iterations | 1 to 2 (0 already finished) |" in summary
    assert "| batch | 8 prompts x 8 = 64 rollouts an iteration |" in summary
    assert "| updates | 1 optimizer step an iteration |" in summary
    passes = {"overrides": f"{SMALL} train.num_passes=3"}
    other = run_stage(tmp_path / "b", f"{file_root}/other", **passes)[1]
    assert "| updates | 3 optimizer steps an iteration |" in other
    assert metrics["offset"] == 0.0
    assert metrics["num_iterations"] == 2.0
    assert metrics["lock_generation"] == 1.0


def test_a_finished_run_is_told_apart_from_one_with_work_left(file_root, tmp_path):
    run_stage(tmp_path / "a", file_root)
    finish(file_root, 1)
    finish(file_root, 2)
    values, summary, _ = run_stage(tmp_path / "b", file_root)
    assert (values.unfinished, "| kind | goes on" in summary) == (True, True)
    store.write(f"{layout.evaluation(file_root, 2)}/{layout.REPORT}", b"{}")
    values, summary, _ = run_stage(tmp_path / "c", file_root)
    assert (values.unfinished, "| kind | done: every iteration" in summary) == (False, True)
    # A longer chain and a setting that has changed are work.
    assert run_stage(tmp_path / "d", file_root, runs=2)[0].unfinished
    run_file, _, is_new = open_run_file(
        file_root, wish().configuration(), resume_from="", allow_config_change=False
    )
    done = RunPlan(file_root, run_file, Link(0, 0, 2), 1, is_new, 2, is_evaluated=True)
    assert done.is_done
    assert not replace(done, changed=["evaluate.num_samples: 4 to 2"]).is_done


def test_what_this_machine_lacks_is_told_before_the_run(file_root, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="must be 0 or 1 outside a cluster, got 2"):
        prepare(file_root, wish(overrides=f"{SMALL} train.num_nodes=2"))
    with pytest.raises(ConfigError, match="`max_avoided_nodes` must be 0 or more, got -1"):
        prepare(file_root, wish(max_avoided_nodes=-1))
    assert not store.exists(layout.run_file(file_root))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ('train.trainer="megatron"', r"'megatron' must find .*planish\[megatron\]"),
        ('engine.name="vllm"', r"'vllm' must find .*planish\[rollout\].*`make engines`"),
        ('engine.name="vllm_disagg" model.num_experts=4', "`engine.name` = 'vllm_disagg' must"),
        ('engine.name="disagg" engine.transport="nixl" model.num_experts=4', "'nixl_cu13'"),
    ],
)
def test_a_package_that_this_machine_lacks_is_told_before_the_cold_start(
    setting, told, file_root, monkeypatch
):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("planish.base.parallel.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=told):
        prepare(file_root, wish(overrides=f"{SMALL} {setting}"))
    assert not store.exists(layout.run_file(file_root))


def test_the_same_command_again_changes_nothing(file_root, tmp_path):
    first, _, _ = run_stage(tmp_path / "a", file_root)
    before = store.read(layout.run_file(file_root))
    finish(file_root, 1)
    second, summary, metrics = run_stage(tmp_path / "b", file_root)
    assert second == first
    assert store.read(layout.run_file(file_root)) == before
    assert "goes on with a run that is here" in summary
    assert "1 to 2 (1 already finished)" in summary
    assert metrics["lock_generation"] == 1.0


def test_the_next_run_of_a_chain_starts_where_the_last_one_ended(file_root, tmp_path):
    run_stage(tmp_path / "a", file_root)
    finish(file_root, 1)
    state, policy = finish(file_root, 2)
    values, summary, _ = run_stage(tmp_path / "b", file_root, index=1, num_iterations=3)
    assert values[1:3] == (2, 1)
    assert "| iterations | 3 to 5 (0 already finished) |" in summary
    assert "run 1 of a chain" in summary
    document = json.loads(store.read(layout.run_file(file_root)))
    assert document["initial"] == {"policy": policy.pin(), "state": state.pin()}
    assert document["origin"] == {"policy": "", "state": ""}
    assert run_stage(tmp_path / "b", file_root, index=-1)[0][1:3] == (2, 1)
    again, _, _ = run_stage(tmp_path / "c", file_root)
    assert again[1:3] == (0, 0)
    document = json.loads(store.read(layout.run_file(file_root)))
    assert document["initial"] == {"policy": "", "state": ""}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": "train.learning_rat=1"}, "did you mean `learning_rate`"),
        ({"overrides": SMALL, "num_shards": 9}, "1 to `rollout.prompts_per_iteration` (8)"),
        ({"resume_from": "file:///nowhere/at/all"}, "`resume_from` must be the root of a run"),
        ({"index": 3}, "`chain_index` must be at most"),
        ({"preset": "nope"}, "a preset must be one of"),
    ],
)
def test_what_the_user_must_mend_ends_with_exit_code_two(file_root, tmp_path, changes, words):
    with pytest.raises(SystemExit) as caught:
        run_stage(tmp_path / "a", file_root, **changes)
    assert caught.value.code == 2
    log = json.loads(store.read(layout.stage_log(file_root, "prepare", 0, 0)))
    assert log["state"] == "failed"
    assert words in log["error"]
    assert not store.exists(layout.run_file(file_root))


BAD_ROW = "line 2 (answer_is_no_text)"
BAD_VERIFIER = "raised ZeroDivisionError: division by zero, called with the answer of line 1"


@pytest.mark.parametrize(
    ("answer", "function", "words"),
    [({"n": 2}, "right", BAD_ROW), (2, "wrong", BAD_VERIFIER)],
    ids=["data", "verifier"],
)
def test_bad_data_and_a_bad_verifier_end_the_run_before_it_begins(
    file_root, tmp_path, monkeypatch, answer, function, words
):
    module = f"of_{tmp_path.name}"
    text = "def right(response, answer): return 1\ndef wrong(response, answer): return 1 / 0\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = [{"prompt": "0+1=", "answer": 1}, {"prompt": "0+2=", "answer": answer}]
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = f"{SMALL} curate.verifier={module}:{function}"
    settings = {"dataset": str(data), "overrides": overrides}
    with pytest.raises(SystemExit) as caught:
        run_stage(tmp_path / "a", file_root, **settings)
    assert caught.value.code == 2
    log = json.loads(store.read(layout.stage_log(file_root, "prepare", 0, 0)))
    assert words in log["error"]
    assert not store.exists(layout.run_file(file_root))
    # What was mended is enough: the same root takes the run then.
    data.write_text(data.read_text().replace('{"n": 2}', "2"))
    settings["overrides"] = settings["overrides"].replace(":wrong", ":right")
    run_stage(tmp_path / "a", file_root, **settings)
    assert store.exists(layout.run_file(file_root))


@pytest.mark.parametrize("root", ["nowhere", "file://relative/x", "file:///a/../b", "s3://"])
def test_a_root_that_cannot_be_is_refused(tmp_path, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run_stage(tmp_path / "a", root)
    assert caught.value.code == 2


def test_a_cluster_that_is_too_small_ends_the_run(file_root):
    requests = json.dumps({"pod": {"nvidia.com/gpu": "8"}, "total": {}})
    small = FakeCluster(machines=({"cpu": "4"},))
    with pytest.raises(ConfigError, match=r"a node with `nvidia\.com/gpu` must exist"):
        prepare(file_root, wish(requests=requests), api=small)
    outcome = prepare(file_root, wish(requests=requests, assume_autoscaling=True), api=small)
    assert "## Warnings" in outcome.documents["summary"]


def test_the_plan_says_what_each_stage_holds(file_root, tmp_path):
    stages = {name: {"gpus": 8, "memory": "64Gi"} for name in ("train", "rollout")}
    requests = json.dumps({"pod": {}, "total": {}, "stages": stages})
    with pytest.raises(ConfigError, match=r"`model.path` must name a model in pods with GPUs"):
        prepare(file_root, wish(requests=requests), api=FakeCluster())
    assert not store.exists(layout.run_file(file_root))
    policy = build_policy(ModelConfig(num_layers=1, hidden_size=16, head_dim=8), seed=1)
    save_policy(f"file://{tmp_path}/model", policy, version=0, parents={}, attributes={})
    named = wish(requests=requests, model=f"{tmp_path}/model")
    text = prepare(file_root, named, api=FakeCluster()).documents["summary"]
    assert "| - train on each of 8 GPUs | " in text
    assert "| - rollout on each of 8 GPUs | 9.7 MiB of 68.5 GiB at most |" in text


def test_the_cluster_tells_whether_the_run_of_a_lock_lives(file_root):
    alive = liveness(FakeCluster())
    assert alive(Holder("cluster", run_id="alive")) is True
    assert alive(Holder("cluster", run_id="ended")) is False
    assert alive(current_holder()) is True
    assert liveness(None)(Holder("cluster", run_id="alive")) is None
    acquire(file_root, Holder("cluster", run_id="ended"))
    assert prepare(file_root, wish(), api=FakeCluster()).metrics["lock_generation"] == 2.0


def test_a_run_keeps_away_from_as_many_nodes_as_it_is_told_to(file_root, tmp_path):
    for seconds, name in ((30.0, "node-a"), (10.0, "node-c"), (20.0, "node-b")):
        avoid(file_root, AvoidedNode(name, "monitor_check", "run-a", 4, seconds))
    assert run_stage(tmp_path / "a", file_root)[0].node_affinity == {}
    values, summary, metrics = run_stage(tmp_path / "b", file_root, max_avoided_nodes=2)
    assert values.node_affinity == node_affinity(["node-b", "node-c"])
    assert "| keeps away from | `node-c`, `node-b` |" in summary
    assert metrics["avoided_nodes"] == 2.0


def test_a_pipeline_that_keeps_away_from_none_refuses_a_root_whose_nodes_a_person_named(file_root):
    cluster = FakeCluster()
    avoid(file_root, AvoidedNode("node-2", "monitor_check"))
    assert prepare(file_root, wish(), api=cluster).metrics["avoided_nodes"] == 0.0
    avoid(file_root, AvoidedNode("node-3", "operator"))
    with pytest.raises(ConfigError, match=r"keeps away from no node, but node-3 .*--max-restarts"):
        prepare(file_root, wish(), api=cluster)
    assert prepare(file_root, wish(max_avoided_nodes=2), api=cluster).metrics["avoided_nodes"] == 2


def test_a_run_on_a_root_that_was_stopped_says_how_to_go_on(file_root):
    prepare(file_root, wish())
    stop(file_root)
    with pytest.raises(ConfigError, match=rf"`planish stop {file_root} --undo`"):
        prepare(file_root, wish())
    stop(file_root, undo=True)
    prepare(file_root, wish())


def test_nodes_of_the_root_that_a_run_starts_from_are_avoided_too(tmp_path):
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    run_stage(tmp_path / "a", old)
    finish(old, 1)
    for root in (old, new):
        avoid(root, AvoidedNode("node-3", "operator"))
    avoid(old, AvoidedNode("node-4", "operator"))
    values, told, _ = run_stage(tmp_path / "b", new, resume_from=f"{old}/", max_avoided_nodes=5)
    assert f"new run from the newest policy of `{old}`" in told
    assert values.node_affinity == node_affinity(["node-3", "node-4"])


@pytest.mark.server
def test_a_missing_bucket_and_refused_keys_are_told_apart(minio, monkeypatch):
    with pytest.raises(ConfigError, match="bucket 'no-such-bucket' must exist"):
        prepare("s3://no-such-bucket/run", wish())
    secret = os.environ["MINIO_SECRET_KEY"]
    monkeypatch.setenv("MINIO_SECRET_KEY", "wrong-secret-of-mine")
    with pytest.raises(Exception, match="MINIO_SECRET_KEY") as refused:
        prepare("s3://no-such-bucket/run", wish())
    assert not re.search(f"wrong-secret-of-mine|{re.escape(secret)}", str(refused.value))


@pytest.mark.slow
def test_a_store_that_does_not_answer_ends_with_code_seventy_five(
    tmp_path, monkeypatch, closed_port
):
    monkeypatch.setenv("MINIO_ENDPOINT", f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("MINIO_ACCESS_KEY", "a-key-of-mine")
    monkeypatch.setenv("MINIO_SECRET_KEY", "a-secret-of-mine")
    monkeypatch.setenv("MINIO_SECURE", "0")
    monkeypatch.setenv("MINIO_RETRY_SECONDS", "1")
    with pytest.raises(SystemExit) as caught:
        run_stage(tmp_path / "a", "s3://bucket/run")
    assert caught.value.code == 75


@pytest.mark.server
def test_a_run_in_a_bucket_writes_the_same_run_file(s3_root, file_root):
    prepare(f"{s3_root}/run", wish())
    prepare(file_root, wish())
    documents = [store.read(layout.run_file(root)) for root in (f"{s3_root}/run", file_root)]
    assert documents[0] == documents[1]
