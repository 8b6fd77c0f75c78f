"""Starting, scheduling, waiting, cleaning up and stopping, against a recording API server."""

import json
from types import SimpleNamespace

import pytest

from pipelines import submit
from pipelines.connect import connect
from pipelines.post_train import profile_named
from planish import store
from planish.base.errors import ConfigError
from planish.records import layout
from planish.run.avoid import avoided
from planish.run.stage import is_stopped, mark_stopped
from tests.unit.pipelines.kfp_server import Server


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


@pytest.fixture
def client(server):
    return connect(server.url).client


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    return submit.write_package(folder, profile_named("cpu-tiny", num_iterations=1))


def test_a_run_carries_pipeline_parameters_and_account(server, client, package):
    run_id = submit.start_run(
        *(client, package, {"root": "s3://b/r", "seed": 7, "chain": '{"runs": 3}'}),
        name="first",
        experiment="planish",
        namespace="team",
        service_account="planish-runner",
    )
    body = server.posted("runs")[0]
    assert run_id in server.objects["runs"]
    assert body["display_name"] == "first"
    assert body["service_account"] == "planish-runner"
    parameters = body["runtime_config"]["parameters"]
    assert parameters == {"root": "s3://b/r", "seed": 7, "chain": '{"runs": 3}'}
    spec = body["pipeline_spec"]
    assert spec["pipeline_spec"]["pipelineInfo"]["name"] == "post-train"
    assert "kubernetes" in spec["platform_spec"]["platforms"]
    assert server.posted("experiments")[0]["display_name"] == "planish"
    assert body["experiment_id"] in server.objects["experiments"]


def test_a_schedule_runs_one_at_a_time_and_takes_the_first_unfinished_place(
    server, client, package
):
    submit.start_schedule(
        *(client, package, {"root": "s3://b/r"}), name="nightly", experiment="e", cron="0 0 2 * * *"
    )
    body = server.posted("recurringruns")[0]
    assert int(body["max_concurrency"]) == 1
    assert body["no_catchup"] is True
    assert body["mode"] == "ENABLE"
    assert body["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * *"
    assert body["runtime_config"]["parameters"] == {"root": "s3://b/r", "chain": '{"index": -1}'}


def test_a_schedule_can_be_an_interval(server, client, package):
    submit.start_schedule(
        *(client, package, {"root": "s3://b/r"}),
        name="hourly",
        experiment="e",
        interval_seconds=3600,
    )
    trigger = server.posted("recurringruns")[0]["trigger"]
    assert int(trigger["periodic_schedule"]["interval_second"]) == 3600


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either --cron or"),
        ({"cron": "0 2 * * *"}, "six fields"),
        ({"cron": "0 0 2 * * *", "interval_seconds": 5}, "either --cron or"),
    ],
)
def test_impossible_schedules_are_refused(client, package, options, words):
    with pytest.raises(ValueError, match=words):
        submit.start_schedule(client, package, {}, name="x", experiment="e", **options)


def test_waiting_polls_until_the_run_has_ended(server, client):
    run = server.add_run(display_name="x")
    server.states = ["RUNNING", "RUNNING", "FAILED"]
    state = submit.wait(client, run["run_id"], timeout_seconds=60, poll_seconds=0)
    assert state == "FAILED"
    assert [r[1] for r in server.requests].count(f"/apis/v2beta1/runs/{run['run_id']}") == 3


def test_waiting_ends_in_time(server, client):
    run = server.add_run(display_name="x", state="RUNNING")
    with pytest.raises(TimeoutError):
        submit.wait(client, run["run_id"], timeout_seconds=-1, poll_seconds=0)


class FakeJanitor:
    """Meets `Janitor`."""

    def __init__(self):
        self.selectors = []

    def delete_labelled(self, selector):
        self.selectors.append(selector)
        return ["job/train-7f3a-3"]


@pytest.mark.parametrize(("state", "ended"), [("RUNNING", 1), ("SUCCEEDED", 0)])
def test_cleaning_up_ends_a_live_run_and_deletes_by_label(server, client, state, ended):
    run = server.add_run(display_name="x", state=state)
    janitor = FakeJanitor()
    assert submit.cleanup(client, janitor, run["run_id"]) == ["job/train-7f3a-3"]
    assert janitor.selectors == [f"pipeline/runid={run['run_id']},planish/stage"]
    terminated = [r for r in server.requests if r[1].endswith(":terminate")]
    assert len(terminated) == ended


def test_the_real_janitor_deletes_jobs_and_services_only():
    asked = []

    def listing(*names):
        def answer(namespace, label_selector):
            asked.append(("list", namespace, label_selector))
            return SimpleNamespace(
                items=[SimpleNamespace(metadata=SimpleNamespace(name=n)) for n in names]
            )

        return answer

    janitor = submit.KubernetesJanitor(None, "team")
    janitor._batch = SimpleNamespace(
        list_namespaced_job=listing("train"),
        delete_namespaced_job=lambda *a, **k: asked.append((*a, k["propagation_policy"])),
    )
    janitor._core = SimpleNamespace(
        list_namespaced_service=listing("peers"),
        delete_namespaced_service=lambda *a: asked.append(a),
    )
    assert janitor.delete_labelled("a=b") == ["job/train", "service/peers"]
    assert asked[1] == ("train", "team", "Background")
    assert asked[3] == ("peers", "team")


def test_parameters_are_parsed_as_their_types():
    pairs = ["preset=dapo-paper", "seed=-1", "chain.allow_config_change=true"]
    pairs += ["chain.resume_from=s3://b/r", "overrides=a.b=1 c.d=2"]
    assert submit.parse_parameters(pairs) == {
        "preset": "dapo-paper",
        "seed": -1,
        "chain": '{"allow_config_change": true, "resume_from": "s3://b/r"}',
        "overrides": "a.b=1 c.d=2",
    }


def test_wrong_parameters_are_told_at_once():
    with pytest.raises(ValueError, match=r"an integer, got '1\.5'") as caught:
        submit.parse_parameters(["sed=1", "seed=1.5", "chain.allow_config_change=yes", "preset"])
    for words in ("got 'sed=1'", "valid boolean, got 'yes'", "got 'preset'"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "pairs", "words"),
    [
        ("gpu-1x8", ["overrides=rollout.device=cpu"], "`rollout.device` must be 'auto' or 'cuda'"),
        ("gpu-4x8", ["overrides=train.num_processes=1"], "must be 0 or 8 in a pod of 8 GPUs"),
        ("cpu-tiny", ["preset=dapo-qwen2.5-7b"], "fit in the 1.5 GiB that the host memory leaves"),
        ("cpu-tiny", ["model=Qwen/Qwen2.5-7B"], "fit in the 1.5 GiB that the host memory leaves"),
        ("gpu-1x8", ["preset=dapo-paper"], "`train` must fit in the 68.5 GiB that each of 8 GPUs"),
        ("gpu-1x8", ["overrides=train.lerning_rate=1"], "did you mean `learning_rate`"),
        ("gpu-1x8", ["config=/absent.toml"], "`config` must be the URI or path of a TOML file"),
    ],
)
def test_settings_that_the_pods_can_not_carry_are_refused_at_once(profile, pairs, words, capsys):
    """No server is asked: there is none at the address."""
    options = ["--host", "http://127.0.0.1:9", "--profile", profile]
    options += [word for pair in pairs for word in ("-p", pair)]
    with pytest.raises(SystemExit) as caught:
        submit.main(["run", "s3://b/r", *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_what_this_machine_can_not_see_is_left_to_prepare():
    gpus = profile_named("gpu-1x8")
    sized = {"preset": "dapo-qwen2.5-7b"}
    assert submit.check_settings(sized, gpus) == []
    assert submit.check_settings({**sized, "model": "Qwen/Qwen2.5-14B"}, gpus) == []
    (line,) = submit.check_settings({**sized, "model": "/cache/mine"}, gpus)
    assert line.startswith("only `prepare` will count the memory of the model: ")
    (line,) = submit.check_settings({**sized, "config": "file:///absent/mine.toml"}, gpus)
    assert line.startswith("only `prepare` will check the settings: ")
    (line,) = submit.check_settings({"preset": "dapo-tiny", "model": "Qwen/Qwen2.5-0.5B"}, gpus)
    assert "bfloat16" in line
    larger = profile_named("gpu-1x8", gpu_memory_gb=250)
    big = {"preset": "dapo-qwen2.5-7b", "model": "Qwen/Qwen2.5-32B"}
    assert submit.check_settings(big, larger) == []
    with pytest.raises(ConfigError, match="take a smaller model"):
        submit.check_settings(big, gpus)


def test_the_command_line_starts_a_run(server, capsys):
    options = ["--host", server.url, "--profile", "cpu-tiny", "--iterations", "1"]
    options += ["-p", "preset=grpo-tiny", "--image", "core=mirror/core:1"]
    code = submit.main(["run", "s3://bucket/run/", *options])
    body = server.posted("runs")[0]
    assert code == 0
    assert capsys.readouterr().out.strip().endswith(body_id(server))
    assert body["runtime_config"]["parameters"] == {
        "preset": "grpo-tiny",
        "root": "s3://bucket/run",
    }
    assert body["display_name"] == "run grpo-tiny #0"
    uri = "s3://bucket/run/report/report.html"
    link = "artifacts/get?source=s3&bucket=bucket&key=run%2Freport%2Freport.html"
    assert body["description"] == f"[Report]({link}) at the end: `{uri}`"
    assert server.posted("experiments")[0]["display_name"] == "bucket"
    assert "mirror/core:1" in json.dumps(body["pipeline_spec"])


def test_a_dry_run_asks_nobody_and_says_what_would_be_submitted(capsys):
    options = ["--profile", "cpu-tiny", "--iterations", "1", "--host", "http://127.0.0.1:1"]
    options += ["-p", "preset=grpo-tiny", "--image", "core=mirror/core:1"]
    assert submit.main(["run", "s3://bucket/run/", *options, "--dry-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == {"preset": "grpo-tiny", "root": "s3://bucket/run"}
    assert (told["name"], told["experiment"]) == ("run grpo-tiny #0", "bucket")
    assert told["images"]["core"] == "mirror/core:1"
    assert told["pipeline_bytes"] > 10_000


def body_id(server):
    return next(iter(server.objects["runs"]))


def test_the_command_line_schedules_and_waits(server, capsys):
    options = ["--host", server.url, "--profile", "cpu-tiny", "--iterations", "1"]
    assert submit.main(["schedule", "s3://b/r", *options, "--cron", "0 0 2 * * *"]) == 0
    run = server.add_run(display_name="x")
    assert submit.main(["status", run["run_id"], "--host", server.url]) == 0
    assert submit.main(["wait", run["run_id"], "--host", server.url]) == 0
    server.states = ["FAILED"]
    assert submit.main(["wait", run["run_id"], "--host", server.url]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED"


@pytest.mark.parametrize("root", ["bucket/run", "/tmp/run"])
def test_a_root_that_is_no_uri_is_refused(root, capsys):
    with pytest.raises(SystemExit) as caught:
        submit.main(["run", root])
    assert caught.value.code == 2
    assert "must be a URI" in capsys.readouterr().err


def test_stopping_ends_the_run_after_the_iteration_and_can_be_undone(file_root, capsys):
    assert not mark_stopped(file_root, 1)
    assert submit.main(["stop", file_root]) == 0
    assert capsys.readouterr().out.strip() == layout.stop_file(file_root)
    assert not is_stopped(file_root, 1)
    assert mark_stopped(file_root, 2)
    assert mark_stopped(file_root, 3)
    assert len(submit.stop(file_root, undo=True)) == 3
    assert not is_stopped(file_root, 2)
    assert not mark_stopped(file_root, 2)
    assert submit.stop(file_root, undo=True) == []
    assert not store.exists(layout.stop_file(file_root))


def test_a_run_with_a_monitor_and_restarts_is_compiled_with_them(server, capsys):
    options = ["--host", server.url, "--profile", "cpu-tiny", "--iterations", "1"]
    options += ["--monitor", "s3://b/minder.toml", "--max-restarts", "2"]
    assert submit.main(["run", "s3://bucket/run", *options]) == 0
    spec = server.posted("runs")[0]["pipeline_spec"]
    pods = spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert "nodeAffinity" in pods["exec-train"]
    assert "exec-monitor-check" in pods


def test_an_operator_names_a_node_and_takes_it_back(file_root, capsys):
    assert submit.main(["avoid", file_root, "node-3"]) == 0
    (node,) = avoided(file_root)
    assert (node.name, node.named_by) == ("node-3", "operator")
    assert submit.main(["avoid", file_root, "node-3"]) == 0
    uri = layout.avoided_node(file_root, "node-3")
    assert capsys.readouterr().out == f"{uri}\n"
    for expected in (f"{uri}\n", ""):
        assert submit.main(["avoid", file_root, "node-3", "--undo"]) == 0
        assert capsys.readouterr().out == expected
    assert avoided(file_root) == []


@pytest.mark.parametrize(
    "words", [["avoid", "file:///r", "a/b"], ["avoid", "s3:/folder", "node-3"]]
)
def test_a_node_or_a_root_that_can_not_be_is_refused(words):
    with pytest.raises(SystemExit) as caught:
        submit.main(words)
    assert caught.value.code == 2
