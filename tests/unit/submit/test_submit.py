"""Starting, scheduling, waiting, cleaning up and stopping, against a recording API server."""

import json
import socket
import tempfile
from pathlib import Path

import pytest
import yaml

from components.pod_settings import STAGE_LABEL
from planish import store
from planish.__main__ import main
from planish.base.errors import ClusterError, ConfigError, ObjectMissing
from planish.records import layout
from planish.run.avoid import avoided
from planish.run.stage import is_stopped, mark_stopped
from planish.submit import cleanup, parameters, pipeline
from planish.submit.root import follow, logs, stop
from planish.submit.server import connect
from tests.unit.submit.kfp_server import Server


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


@pytest.fixture
def client(server):
    return connect(server.url)


@pytest.fixture(scope="module")
def package():
    found = pipeline.shipped("post-train", "cpu-tiny")
    pipeline.cut(found, 1)
    return found


@pytest.mark.parametrize(("state", "ended"), [("RUNNING", 1), ("SUCCEEDED", 0)])
def test_cleaning_up_ends_a_live_run_and_deletes_by_label(
    server, client, state, ended, monkeypatch
):
    run = server.add_run(display_name="x", state=state)
    selectors = []
    monkeypatch.setattr(
        cleanup, "delete_labelled", lambda _, s: selectors.append(s) or ["job/train-7f3a-3"]
    )
    word = "is told to end, it was" if ended else "had ended"
    told = [f"the run {run['run_id']} {word} {state}", "deleted job/train-7f3a-3"]
    assert cleanup.clean_up(client, None, run["run_id"]) == told
    assert selectors == [f"pipeline/runid={run['run_id']},{STAGE_LABEL}"]
    terminated = [r for r in server.requests if r[1].endswith(":terminate")]
    assert len(terminated) == ended


def test_parameters_are_parsed_as_their_types(package):
    pairs = ["preset=dapo-paper", "seed=-1", "chain.allow_config_change=true"]
    pairs += ["chain.resume_from=s3://b/r", "overrides=a.b=1 c.d=2"]
    assert parameters.parse_parameters(pairs, package.inputs) == {
        "preset": "dapo-paper",
        "seed": -1,
        "chain": '{"allow_config_change": true, "resume_from": "s3://b/r"}',
        "overrides": "a.b=1 c.d=2",
    }


def test_wrong_parameters_are_told_at_once(package):
    wrong = ["sed=1", "seed=1.5", "chain.allow_config_change=yes", "preset"]
    with pytest.raises(ConfigError, match=r"an integer, got '1\.5'") as caught:
        parameters.parse_parameters(wrong, package.inputs)
    for words in ("got 'sed=1'", "valid boolean, got 'yes'", "got 'preset'"):
        assert words in str(caught.value)
    assert "overrides" not in str(caught.value).replace("'overrides'", "")


def gpus(profile, *pairs):
    return [
        "submit",
        "s3://b/r",
        "--profile",
        profile,
        *(w for pair in pairs for w in ("-p", pair)),
    ]


REFUSED = [
    (["schedule", "s3://b/r"], "either --cron or"),
    (["schedule", "s3://b/r", "--cron", "0 2 * * *"], "six fields"),
    (["schedule", "s3://b/r", "--cron", "0 0 2 * * *", "--interval-seconds", "5"], "either --cron"),
    (["schedule", "s3://b/r", "--interval-seconds", "-5"], "must be positive, got -5"),
    (["upload", "rehard"], "must be one of ['post-train', 'reshard'], got 'rehard'"),
    (["upload", "reshard", "--iterations", "2"], "must be left out for reshard"),
    (["avoid", "file:///r", "a/b"], "a node must be named like the label"),
    (["avoid", "s3:/folder", "node-3"], "must begin with one of"),
    (["submit", "bucket/run"], "must be a URI"),
    (["submit", "/tmp/run"], "must be a URI"),
    (["submit", "s3://b/r", "--profile", "cpu-tny"], "did you mean `cpu-tiny`"),
    (["submit", "s3://b/r", "--iterations", "33"], "must be 1 to 32, got 33; longer training"),
    (["submit", "s3://b/r", "--iterations", "0"], "must be 1 to 32, got 0"),
    (["submit", "s3://b/r", "--gpu-memory", "0"], "must be 1 to 10000 GB, got 0"),
    (["submit", "s3://b/r", "--image", "core"], "must be REGISTRY/FOLDER of all images or NAME"),
    (["submit", "s3://b/r", "--image", "cor=x"], "got 'cor=x'"),
    (["submit", "s3://b/r", "--image", "core="], "got 'core='"),
    (["submit", "s3://b/r", "--pipeline", "/absent.yaml"], "must hold a pipeline of `python"),
    (["submit", "s3://b/r", "--toleration", "a:Never"], "an effect of"),
    (["submit", "s3://b/r", "--node-selector", "pool"], "must be KEY=VALUE, got 'pool'"),
    (["submit", "s3://b/r", "-p", "dataset=https://u:p@h/x"], "must hold no token, user or"),
    (["submit", "s3://b/r", "-p", "train.learning_rate=1"], "'-p overrides=train.learning_rate=1'"),
    (gpus("gpu-1x8", "preset=", "overrides=train.num_nodes=2"), "take the profile gpu-4x8 or"),
    (gpus("gpu-1x8", "preset=", "overrides=rollout.device=cpu"), "must be 'auto' or 'cuda'"),
    (gpus("gpu-4x8", "preset=", "overrides=train.num_processes=1"), "must be 0 or 8 in a pod of 8"),
    (gpus("cpu-tiny", "preset=dapo-qwen2.5-7b"), "fit in the 1.5 GiB that the host memory leaves"),
    (gpus("cpu-tiny", "model=Qwen/Qwen2.5-7B"), "fit in the 1.5 GiB that the host memory leaves"),
    (gpus("gpu-1x8", "preset=", "overrides=train.lerning_rate=1"), "did you mean `learning_"),
    (gpus("gpu-1x8", "preset=", "config=/absent.toml"), "must be the URI or path of a TOML file"),
    (gpus("gpu-1x8"), "must be named for pods with GPUs, got none; the default 'dapo-tiny'"),
    (gpus("gpu-4x8", "model=Qwen/Qwen2.5-7B"), "`-p preset=dapo-qwen2.5-0.5b` is the smallest"),
    (gpus("gpu-16x8", "preset=dapo-tiny"), "`model.path` must name a model in pods with GPUs"),
    (gpus("gpu-1x8", "preset=dapo-moe-tiny"), "is the smallest, or give a model"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_what_can_not_be_is_refused_before_anybody_is_asked(words, told, capsys):
    """No server is at the address."""
    host = [] if words[0] == "avoid" else ["--host", "http://127.0.0.1:9"]
    assert main([*words, *host]) == 2
    assert told in capsys.readouterr().err


def test_what_this_machine_can_not_see_is_left_to_prepare():
    def check(settings, gigabytes=80):
        gpus = pipeline.shipped("post-train", "gpu-1x8")
        pipeline.set_gpu_memory(gpus, gigabytes)
        return parameters.check_settings(settings, gpus)

    sized = {"preset": "dapo-qwen2.5-7b"}
    assert check(sized) == []
    again = {"overrides": "train.activation_checkpointing=true"}
    assert check({**sized, **again, "model": "Qwen/Qwen2.5-14B"}) == []
    (line,) = check({**sized, "model": "/cache/mine"})
    assert line.startswith("only `prepare` will count the memory of the model: ")
    (line,) = check({**sized, "config": "file:///absent/mine.toml"})
    assert line.startswith("only `prepare` will check the settings: ")
    (line,) = check({"preset": "dapo-tiny", "model": "Qwen/Qwen2.5-0.5B"})
    assert "bfloat16" in line
    big = {"preset": "dapo-qwen2.5-7b", "model": "Qwen/Qwen2.5-32B"}
    assert check(big, 250) == []
    assert "that each of 8 GPUs leaves for it" in check(big)[0]


def test_the_command_line_starts_a_run(server, capsys):
    options = ["--host", server.url, "--profile", "cpu-tiny", "--iterations", "1"]
    options += ["-p", "preset=grpo-tiny", "--image", "core=mirror/core:1"]
    code = main(["submit", "s3://bucket/run/", *options])
    body = server.posted("runs")[0]
    assert code == 0
    assert capsys.readouterr().out.strip().endswith(body_id(server))
    assert body["runtime_config"]["parameters"] == {
        "preset": "grpo-tiny",
        "root": "s3://bucket/run",
    }
    assert body["display_name"] == "run grpo-tiny #0"
    uri = "s3://bucket/run/report/report.html"
    assert body["description"] == f"The report lies at {uri} from the first iteration on."
    assert server.posted("experiments")[0]["display_name"] == "bucket"
    assert "mirror/core:1" in json.dumps(body["pipeline_spec"])


def test_a_dry_run_asks_nobody_and_prints_what_would_be_submitted(capsys):
    options = ["--profile", "cpu-tiny", "--host", "http://127.0.0.1:1", "--dry-run"]
    assert main(["submit", "s3://bucket/run/", *options, "-p", "preset=grpo-tiny"]) == 0
    told = capsys.readouterr()
    assert told.out == (pipeline._folder() / "post-train-cpu-tiny.yaml").read_text()
    assert json.loads(told.err) == {
        "name": "run grpo-tiny #0",
        "experiment": "bucket",
        "service_account": "planish-runner",
        "parameters": {"preset": "grpo-tiny", "root": "s3://bucket/run"},
    }


@pytest.fixture
def connections(monkeypatch):
    """What somebody of this process looks up or connects to; each try is refused."""
    seen = []

    def refuse(*address):
        seen.append(address)
        raise ConnectionRefusedError(111, "refused by the test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return seen


PINNED = "https://127.0.0.1:9/model.tar#sha256=" + "0" * 64


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("model=nobody/unknown", "'nobody/unknown' was not looked at, since nobody was asked"),
        ("model=s3://b/model", "'s3://b/model' was not looked at, since nobody was asked"),
        (f"model={PINNED}", f"{PINNED!r} was not looked at, since nobody was asked"),
        ("config=s3://b/mine.toml", "check the settings: 's3://b/mine.toml' was not read"),
        ("model=Qwen/Qwen2.5-7B", ""),
    ],
)
def test_a_dry_run_connects_to_nobody_and_says_what_it_left_out(setting, line, connections, capsys):
    words = ["submit", "s3://b/r", "-p", "preset=dapo-qwen2.5-0.5b", "-p", setting, "--dry-run"]
    assert main(words) == 0
    *warnings, _ = capsys.readouterr().err.splitlines()
    assert len(warnings) == bool(line)
    assert all(w.startswith("warning: only `prepare` will ") and w.endswith(line) for w in warnings)
    assert connections == []


def test_a_submission_asks_the_hub_but_fetches_no_archive(connections, package):
    def check(model):
        return parameters.check_settings({"model": model}, package)

    assert check(PINNED) == [
        f"only `prepare` will count the memory of the model: {PINNED!r} was not looked at, since "
        "its archive would have to be fetched whole"
    ]
    assert connections == []
    # That the hub is asked shows that the test sees who connects.
    assert "the hub can not be reached" in check("nobody/unknown")[0]
    assert connections


def body_id(server):
    return next(iter(server.objects["runs"]))


def test_a_schedule_runs_one_at_a_time_and_takes_the_first_unfinished_place(server):
    options = ["--host", server.url, "--profile", "cpu-tiny", "--iterations", "1"]
    assert main(["schedule", "s3://b/r", *options, "--cron", "0 0 2 * * *"]) == 0
    assert main(["schedule", "s3://b/r", *options, "--interval-seconds", "3600"]) == 0
    body, hourly = server.posted("recurringruns")
    assert body["display_name"] == "r dapo-tiny"
    assert (int(body["max_concurrency"]), body["no_catchup"], body["mode"]) == (1, True, "ENABLE")
    assert body["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * *"
    assert body["runtime_config"]["parameters"] == {"root": "s3://b/r", "chain": '{"index": -1}'}
    assert int(hourly["trigger"]["periodic_schedule"]["interval_second"]) == 3600


def test_waiting_polls_until_the_run_has_ended_or_the_time_is_over(server, client, capsys):
    run = server.add_run(display_name="x")
    server.states = ["RUNNING", "RUNNING", "FAILED"]
    assert client.wait(run["run_id"], timeout_seconds=60, poll_seconds=0) == "FAILED"
    assert [r[1] for r in server.requests].count(f"/apis/v2beta1/runs/{run['run_id']}") == 3
    server.states = ["RUNNING"]
    with pytest.raises(ClusterError, match="must end within -1 s, got state RUNNING"):
        client.wait(run["run_id"], timeout_seconds=-1, poll_seconds=0)
    server.states = ["SUCCEEDED"]
    words = ["status", run["run_id"], "--host", server.url]
    assert main(words) == 0
    assert main([*words, "--wait"]) == 0
    server.states = ["FAILED"]
    capsys.readouterr()
    assert main([*words, "--wait"]) == 1
    told = capsys.readouterr()
    assert told.out == "FAILED\n"
    assert f"`planish logs {run['run_id']}` prints" in told.err


def test_a_pipeline_is_uploaded_once_and_a_changed_one_is_another_version(server, capsys):
    words = ["upload", "--profile", "cpu-tiny", "--iterations", "1", "--host", server.url]
    for more in ([], [], ["--image", "mirror/team"]):
        assert main([*words, *more]) == 0
    first, same, other = capsys.readouterr().out.splitlines()
    assert first == same
    assert first.split()[1] == other.split()[1]
    assert first.split()[3] != other.split()[3]
    (made,) = server.posted("pipelines")
    assert made["display_name"] == "post-train-cpu-tiny"
    assert "Fill in three fields" in made["description"]
    versions = server.posted("pipelines/upload_version")
    assert [version["description"] for version in versions] == [made["description"]] * 2
    original, changed = server.files
    assert "mirror/team/core:0.1.0" in changed
    assert original == changed.replace("mirror/team", "planish")
    assert main(["upload", "reshard", "--host", server.url, "--profile", "cpu-tiny"]) == 0
    assert server.files[2] == (pipeline._folder() / "reshard-cpu-tiny.yaml").read_text()


def write_log(root, stage, lines, state, *, start=0.0):
    """Write what an attempt of the first iteration leaves."""
    uri = layout.stage_log(root, stage, 1, 0)
    store.write(uri, json.dumps({"state": state, "start_seconds": start}).encode())
    text = "".join(f"{line}\n" for line in lines)
    store.write(f"{uri.removesuffix('.json')}-0.txt", text.encode())


def test_following_yields_each_line_once_below_the_name_of_its_task(file_root):
    """Reward has ended before; train goes on, and a second task begins while it is watched."""
    write_log(file_root, "reward", ["old"], "done")
    write_log(file_root, "train", ["a", "b", "c"], "running", start=1.0)
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            write_log(file_root, "train", ["a", "b", "c", "d"], "running", start=1.0)
        elif len(looks) == 2:
            write_log(file_root, "checkpoint", ["x", "y"], "done", start=2.0)
        elif len(looks) == 3:
            # What a stage says while it ends comes after its state.
            write_log(file_root, "checkpoint", ["x", "y", "z"], "done", start=2.0)
            write_log(file_root, "train", ["a", "b", "c", "d", "e"], "done", start=1.0)

    lines = list(follow(file_root, lambda: len(looks) == 4, num_lines=2, sleep=sleep))
    train, checkpoint = "== 00001-train-00-0.txt", "== 00001-checkpoint-00-0.txt"
    assert lines == [
        f"{train} running", "b", "c", "d", f"{checkpoint} done", "x", "y",
        f"{train} done", "e", f"{checkpoint} done", "z",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "written", "shown"),
    [
        ("iterate", ["curate", "rollout", "reward", "train"], "rollout reward train"),
        ("iterate", ["rollout", "monitor_check", "evaluate"], "rollout evaluate"),
        ("monitor-check", ["train", "monitor_check"], "monitor_check"),
        ("next-run", ["report", "next"], "next"),
        ("train", ["train", "trainer"], "train"),
    ],
)  # fmt: skip
def test_logs_are_found_by_the_name_of_a_task(stage, written, shown, file_root):
    for start, name in enumerate(written):
        write_log(file_root, name, [name], "done", start=start)
    assert [line for line in logs(file_root, stage=stage) if "==" not in line] == shown.split()


def test_a_stage_without_logs_is_answered_with_those_that_have_some(file_root):
    write_log(file_root, "train", ["a"], "done")
    write_log(file_root, "curate", ["a"], "done")
    with pytest.raises(ObjectMissing, match="a log of trian, got curate, train;"):
        list(logs(file_root, stage="trian"))


def test_logs_are_followed_until_the_run_has_ended(server, file_root, capsys, monkeypatch):
    write_log(file_root, "train", ["loss=0.5"], "running")
    run = server.add_run(runtime_config={"parameters": {"root": file_root}})
    server.states = ["RUNNING", "RUNNING", "SUCCEEDED"]
    monkeypatch.setattr("planish.submit.root.LOOK_SECONDS", 0.0)
    words = ["logs", run["run_id"], "--follow", "--host", server.url]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == ["== 00001-train-00-0.txt running", "loss=0.5"]
    store.write(layout.stage_log(file_root, "report", 0, 0), b'{"state": "done"}')
    assert main(["logs", file_root, "--follow", "--stage", "train"]) == 0
    assert "loss=0.5" in capsys.readouterr().out
    assert main(["logs", file_root, "--follow", "--lines", "0"]) == 2


def test_stopping_ends_the_run_after_the_iteration_and_can_be_undone(file_root, capsys):
    store.write(layout.run_file(file_root), b"{}")
    assert not mark_stopped(file_root, 1)
    assert main(["stop", file_root]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == f"written {layout.stop_file(file_root)}"
    assert f"`planish stop {file_root} --undo`" in told
    assert not is_stopped(file_root, 1)
    assert mark_stopped(file_root, 2)
    assert mark_stopped(file_root, 3)
    assert len(stop(file_root, undo=True)) == 3
    assert not is_stopped(file_root, 2)
    assert not mark_stopped(file_root, 2)
    assert stop(file_root, undo=True) == [f"nothing to undo: no {layout.stop_file(file_root)}"]
    assert not store.exists(layout.stop_file(file_root))


@pytest.mark.parametrize("more", [[], ["--undo"]])
def test_a_root_that_is_not_there_is_not_made_by_stopping_it(file_root, more, capsys):
    assert main(["stop", f"{file_root}/typo", *more]) == 2
    assert "must hold a run, got no" in capsys.readouterr().err
    assert store.list_uris(file_root) == []


def test_a_run_is_named_by_its_id_where_the_server_knows_its_root(server, file_root, capsys):
    run = server.add_run(runtime_config={"parameters": {"root": file_root}})
    words = [run["run_id"], "--host", server.url]
    store.write(layout.run_file(file_root), b"{}")
    assert main(["stop", *words]) == 0
    assert store.exists(layout.stop_file(file_root))
    other = server.add_run(runtime_config={"parameters": {}})
    assert main(["stop", other["run_id"], "--host", server.url]) == 2
    assert "must have a parameter `root`, got none" in capsys.readouterr().err


def test_logs_are_those_of_what_failed_and_of_the_last_attempt(file_root, capsys):
    def attempt(stage, iteration, number, state, start, lines):
        uri = layout.stage_log(file_root, stage, iteration, 0)
        store.write(uri, json.dumps({"state": state, "start_seconds": start}).encode())
        text = "".join(f"{stage} {n}\n" for n in range(lines))
        store.write(f"{uri.removesuffix('.json')}-{number}.txt", text.encode())

    assert main(["logs", file_root]) == 1
    over = layout.stage_log(file_root, "reward", 2, 0)
    store.write(over, b'{"state": "running"}')
    assert main(["logs", file_root, "--stage", "reward"]) == 1
    store.write(over, b'{"state": "done"}')
    capsys.readouterr()
    assert main(["logs", file_root, "--stage", "reward"]) == 0
    assert capsys.readouterr().out == "== 00002-reward-00 done, and wrote no line\n"
    attempt("prepare", 0, 0, "done", 1.0, 1)
    attempt("rollout", 1, 0, "failed", 2.0, 3)
    attempt("train", 1, 1, "running", 3.0, 50)
    capsys.readouterr()
    assert main(["logs", file_root, "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("== 00001-rollout-00-0.txt failed", "rollout 1", "rollout 2"),
        *("== 00001-train-00-1.txt running", "train 48", "train 49"),
    ]
    assert main(["logs", file_root, "--iteration", "0"]) == 0
    assert capsys.readouterr().out == "== 00000-prepare-00-0.txt done\nprepare 0\n"
    assert main(["logs", file_root, "--stage", "train", "--lines", "0"]) == 2


def test_an_operator_names_a_node_and_takes_it_back(file_root, capsys):
    assert main(["avoid", file_root, "node-3"]) == 0
    (node,) = avoided(file_root)
    assert (node.name, node.named_by) == ("node-3", "operator")
    assert main(["avoid", file_root, "node-3"]) == 0
    uri = layout.avoided_node(file_root, "node-3")
    told = capsys.readouterr().out.splitlines()
    assert told[::2] == [f"written {uri}", f"named before: {uri}"]
    assert "--max-restarts" in told[1] == told[3]
    for expected in (f"deleted {uri}\n", f"nothing to undo: no {uri}\n"):
        assert main(["avoid", file_root, "node-3", "--undo"]) == 0
        assert capsys.readouterr().out == expected
    assert avoided(file_root) == []


def test_the_state_of_a_run_comes_with_its_tasks(server, capsys):
    failed = {"display_name": "train", "state": "FAILED", "start_time": "2026-01-01T00:00:01Z"}
    details = {"task_details": [{**failed, "error": {"message": "exit code 75"}}]}
    cause = {"error": {"message": "child 'train' failed"}}
    run = server.add_run(display_name="x", state="FAILED", run_details=details, **cause)
    assert main(["status", run["run_id"], "--host", server.url]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert (first, second) == ("FAILED", "child 'train' failed")
    row = next(line for line in rest if "train" in line)
    for words in ("FAILED", "2026-01-01 00:00:01", "exit code 75"):
        assert words in row


ALERTS = {
    "open": b'{"machine": "gpu-7", "metric": "seconds of rank 9", "kind": "slow_rank"}',
    "over": b'{"machine": "gpu-8", "metric": "cpu_usage", "state": "resolved"}',
    "torn": b'{"machine": "gpu-9", ',
    "list": b'["gpu-9"]',
    "other": b'{"machine": "gpu-9"}',
}
"""One that is open, one that is over, and what is no alert."""


def test_tasks_are_told_in_the_order_of_the_graph_without_those_of_kubeflow(
    server, file_root, capsys, package
):
    recorded = json.loads((Path(__file__).parent / "run_of_one_iteration.json").read_text())
    details = {"task_details": recorded}
    given = {"pipeline_spec": package.spec, "platform_spec": package.platform}
    facts = {"state": "RUNNING", "run_details": details}
    parameters = {"parameters": {"root": file_root}}
    log = layout.stage_log(file_root, "train", 1, 0)
    store.write(log, b'{"state": "running", "start_seconds": 5.0}')
    store.write(f"{log.removesuffix('.json')}-0.txt", b"step=1\nstep=2 of=8\n")
    for name, alert in ALERTS.items():
        store.write(f"{layout.alerts(file_root)}/{name}.json", alert)
    for spec in (given, None):
        run = server.add_run(pipeline_spec=spec, runtime_config=parameters, **facts)
        assert main(["status", run["run_id"], "--host", server.url]) == 0
        told = capsys.readouterr().out
        assert "0001-01-01" not in told
        words = [line.replace("│", " ").split() for line in told.splitlines()]
        names = [row[0] for row in words if row[1:2] in (["SUCCEEDED"], ["RUNNING"])]
        names = [name for name in names if name != "post-train-x7k2p"]
        shards = {"rollout-i1", "rollout-2-i1"}
        outer = ("post-train",) if spec else ("exit-handler-1",)
        inner = () if spec else ("iteration-1",)
        assert [name for name in names if name not in shards] == [
            *(*outer, "prepare", "curate", "sft", *inner),
            *("reward-i1", "train-i1"),
        ]
        assert ("iteration 1 " in told) == (spec is not None)
        assert shards < {*names}
        # Only the pipeline tells tasks from the workflow itself.
        assert ("post-train-x7k2p" in told) == (spec is None)
        *_, last, alert = told.splitlines()
        assert last == "== 00001-train-00-0.txt running: step=2 of=8"
        assert alert == "gpu-7 unlike its peers in seconds of rank 9"


def test_every_pod_gets_pull_secret_toleration_and_selector(capsys):
    words = ["submit", "s3://b/r", "--profile", "gpu-1x8", "--dry-run", "--iterations", "1"]
    words += ["-p", "preset=dapo-qwen2.5-0.5b", "--image-pull-secret", "registry"]
    words += ["--toleration", "dedicated=rl:NoSchedule", "--node-selector", "pool=rl"]
    assert main(words) == 0
    told = pipeline.parse(capsys.readouterr().out)
    for _, pod in told.pods():
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["registry"]
        wanted = {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}
        assert wanted in pod["tolerations"]
        assert pod["nodeSelector"]["labels"]["pool"] == "rl"
    train = next(pod for box, pod in told.pods() if "iterate" in box["args"])
    assert {one["key"] for one in train["tolerations"]} == {"nvidia.com/gpu", "dedicated"}
    assert train["nodeSelector"]["labels"]["nvidia.com/gpu.present"] == "true"


def test_pods_that_train_together_get_the_network_and_the_share_of_a_machine(tmp_path, capsys):
    network = tmp_path / "rdma.toml"
    # With the byte order mark of an editor of Windows.
    network.write_text('\ufeffhost_network = true\n[resources]\n"rdma/hca" = "1"\n')
    words = ["submit", "s3://b/r", "-p", "preset=dapo-qwen2.5-0.5b", "--dry-run", "--profile"]
    node = ["--node-gpus", "4", "--node-cpus", "40", "--node-memory", "400"]
    node += ["--gpu-label", "pool=h100", "--node-selector", "zone=a"]
    assert main([*words, "gpu-4x8", *node, "--network", str(network)]) == 0
    told = pipeline.parse(capsys.readouterr().out)
    for container, pod in told.pods():
        resources = container["resources"]
        if "accelerator" in resources:
            assert resources["accelerator"]["count"] == "1"
            assert resources["resourceCpuRequest"] == "10"
            assert resources["resourceMemoryLimit"] == "100Gi"
            assert resources["memoryLimit"] == 100 * 2**30 / 10**9
            assert pod["nodeSelector"]["labels"] == {"pool": "h100", "zone": "a"}
    ((_, gang),) = pipeline._gangs(told)
    each = {"cpu": "40", "memory": "400Gi", "nvidia.com/gpu": "4"}
    assert gang["gpus"] == 4
    assert gang["container"]["resources"]["requests"] == {**each, "rdma/hca": "1"}
    assert gang["spec"]["nodeSelector"] == {"pool": "h100"}
    assert gang["spec"]["hostNetwork"]
    requests = json.loads(told.constants("prepare")["requests"]["constant"])
    assert requests["rank"] == requests["pod"] == each
    assert requests["total"] == {"cpu": "160", "memory": "1600Gi", "nvidia.com/gpu": "16"}
    assert requests["stages"]["iterate"] == {"gpus": 4, "memory": "400Gi"}
    assert (requests["labels"], requests["gpu_labels"]) == ({"zone": "a"}, {"pool": "h100"})
    assert main([*words, "gpu-1x8", "--network", str(network)]) == 2
    assert main([*words, "cpu-tiny", "--node-gpus", "4"]) == 2


def test_placement_is_written_as_the_sdk_of_kubeflow_writes_it():
    from kfp import compiler, dsl, kubernetes

    @dsl.container_component
    def box():
        return dsl.ContainerSpec(image="x")

    @dsl.pipeline(name="p")
    def one():
        task = box()
        kubernetes.set_image_pull_secrets(task, ["registry"])
        kubernetes.add_toleration(task, "dedicated", "Equal", "rl", "NoSchedule")
        kubernetes.add_node_selector(task, "pool", "rl")

    with tempfile.TemporaryDirectory() as folder:
        compiler.Compiler().compile(one, f"{folder}/p.yaml")
        _, platform = yaml.safe_load_all(Path(f"{folder}/p.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    ours = pipeline.shipped("post-train", "cpu-tiny")
    pipeline.set_placement(
        ours,
        pull_secrets=["registry"],
        tolerations=["dedicated=rl:NoSchedule"],
        node_selectors=["pool=rl"],
    )
    _, prepared = next(ours.pods())
    assert {key: prepared[key] for key in executors["exec-box"]} == executors["exec-box"]
