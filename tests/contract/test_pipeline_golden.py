"""Compiled pipelines equal the committed files, and compiling is deterministic."""

import importlib.util
import os
import subprocess
import sys

import pytest
import yaml

from components.images import FETCHING_STAGES, IMAGES, ITERATION_STAGES, PROFILES
from pipelines.compile import BUILDERS, GOLDEN, compile_text, drift, file_name, main, normalised
from pipelines.monitor import Monitor
from pipelines.post_train import profile_named
from planish.__main__ import main as planish
from planish.submit import pipeline as shipped
from tests.contract.pipeline_rules import PIPELINES, lint

pytestmark = pytest.mark.usefixtures("quick_kfp")

NAMES = sorted(PROFILES)
QUICK, SLOW = NAMES[0], NAMES[1:]


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_the_golden_file_is_up_to_date(name, pipeline):
    path = GOLDEN / file_name(PROFILES[name], pipeline)
    assert drift(path, compile_text(PROFILES[name], pipeline=pipeline)) == []


def test_there_is_one_golden_file_for_each_pipeline_and_profile():
    assert sorted(p.name for p in GOLDEN.glob("*.yaml")) == sorted(
        file_name(profile, pipeline) for profile in PROFILES.values() for pipeline in BUILDERS
    )


@pytest.mark.long
def test_compilations_in_other_processes_are_byte_equal():
    profile = profile_named("gpu-1x8", num_iterations=2)
    script = (
        "from pipelines.compile import compile_text; from pipelines.post_train import "
        "profile_named as p; import sys; "
        "sys.stdout.write(compile_text(p('gpu-1x8', num_iterations=2)))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            check=True,
            text=True,
            cwd=GOLDEN.parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert {*texts} == {compile_text(profile)}


def test_the_form_of_a_new_run_is_short_and_the_description_says_what_to_fill():
    text = (GOLDEN / file_name(PROFILES["cpu-tiny"])).read_text()
    spec = next(yaml.load_all(text, yaml.CSafeLoader))
    # The form sorts the fields by name.
    assert sorted(spec["root"]["inputDefinitions"]["parameters"]) == [
        *("chain", "config", "dataset", "model", "overrides", "preset", "root", "seed")
    ]
    description = spec["pipelineInfo"]["description"]
    for words in ("Fill in three fields", "`root`", "`preset`", "`model`"):
        assert words in description


@pytest.mark.parametrize("name", NAMES)
def test_no_two_tasks_of_a_run_have_the_name_by_which_the_run_page_finds_artifacts(name):
    text = (GOLDEN / file_name(PROFILES[name])).read_text()
    spec = next(yaml.load_all(text, yaml.CSafeLoader))

    def artifacts(graph):
        for task_name, task in graph["dag"]["tasks"].items():
            component = spec["components"][task["componentRef"]["name"]]
            if "dag" in component:
                yield from artifacts(component)
            for artifact in component.get("outputDefinitions", {}).get("artifacts", {}):
                yield task_name, artifact

    found = list(artifacts(spec["root"]))
    profile = PROFILES[name]
    if not profile.iterations_per_task:
        assert len(found) > profile.num_iterations * (2 * profile.num_shards + 4)
    assert len(found) == len({*found})


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
@pytest.mark.parametrize("name", NAMES)
def test_pods_of_tasks_with_retries_begin_again_by_themselves_and_no_others(name, pipeline):
    text = (GOLDEN / file_name(PROFILES[name], pipeline)).read_text()
    spec = next(yaml.load_all(text, yaml.CSafeLoader))
    twice = {
        label.removeprefix("exec-").replace("-", "_")
        for label, executor in spec["deploymentSpec"]["executors"].items()
        if executor["container"]["command"][:3] == ["python3", "-m", "planish.run.again"]
    }
    retried = {stage for stage, pod in PROFILES[name].stages.items() if pod.retries}
    ours = PIPELINES[pipeline].stages & retried
    if pipeline == "post-train" and PROFILES[name].iterations_per_task:
        ours = (ours - {*ITERATION_STAGES}) | {"iterate"}
    assert twice == {"next_run" if stage == "next" else stage for stage in ours}
    assert importlib.util.find_spec("planish.run.again")


@pytest.mark.parametrize("name", ["cpu-tiny", "gpu-1x8"])
def test_the_hub_token_reaches_pods_that_fetch_and_the_cache_those_and_pods_with_gpus(name):
    profile = profile_named(name, num_iterations=1)
    pipeline = shipped.parse(compile_text(profile))
    shipped.set_cache(pipeline, "models")
    shipped.set_secrets(pipeline, store="team-store", hub="team-hub")
    spec, platform = pipeline.spec, pipeline.platform
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    containers = spec["deploymentSpec"]["executors"]
    for label, pod in pods.items():
        stage = label.removeprefix("exec-").rstrip("-0123456789")
        fetches = stage in FETCHING_STAGES
        tokens = [
            pair["envVar"]
            for secret in pod["secretAsEnv"]
            if secret["secretName"] == "team-hub"
            for pair in secret["keyToEnv"]
        ]
        assert tokens == (["HF_TOKEN"] if fetches else []), label
        assert all(secret["optional"] for secret in pod["secretAsEnv"])
        assert {s["secretName"] for s in pod["secretAsEnv"]} <= {"team-store", "team-hub"}
        mounts = [(m["pvcNameParameter"], m["mountPath"]) for m in pod.get("pvcMount", ())]
        claim = {"runtimeValue": {"constant": "models"}}
        resources = profile.stages.get(stage)
        has_gpus = bool(resources and resources.gpus)
        assert mounts == ([(claim, "/cache")] if fetches or has_gpus else []), label
        env = {e["name"]: e["value"] for e in containers[label]["container"]["env"]}
        assert (env.get("VLLM_CACHE_ROOT") == "/cache/vllm") == has_gpus, label
        assert (env.get("HF_HOME") == "/cache/huggingface") == fetches, label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"), [("cpu-tiny", "dapo-tiny"), ("gpu-1x8", "dapo-qwen2.5-0.5b")]
)
def test_what_submission_fills_in_equals_what_compilation_writes(name, preset, capsys):
    options = ["--image", "mirror:5000/team:v2", "--gpu-memory", "141", "--iterations", "2"]
    options += ["-p", f"preset={preset}"]
    assert planish(["submit", "s3://b/r", "--profile", name, *options, "--dry-run"]) == 0
    profile = profile_named(name, num_iterations=2, gpu_memory_gb=141)
    images = shipped.parse_images(["mirror:5000/team:v2"])
    assert drift_of(compile_text(profile, images), capsys.readouterr().out) == []
    assert set(shipped.IMAGES) == set(IMAGES)


def drift_of(wanted, text):
    return [
        pair
        for pair in zip(wanted.splitlines(), text.splitlines(), strict=True)
        if len({*pair}) > 1
    ]


@pytest.mark.slow
def test_a_pipeline_that_was_compiled_with_a_monitor_is_submitted_as_it_is(tmp_path, capsys):
    options = ["--pipeline", "post-train", "--profile", "cpu-tiny", "--iterations", "2"]
    options += ["--shards", "1", "--monitor", "s3://b/minder.toml", "--max-restarts", "2"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    path = tmp_path / "post-train-cpu-tiny.yaml"
    words = ["submit", "s3://b/r", "--pipeline", str(path), "--dry-run"]
    assert planish(words) == 0
    assert capsys.readouterr().out == path.read_text()
    assert planish([*words, "--image", "mirror/team", "--iterations", "1"]) == 0
    told = capsys.readouterr().out
    assert lint(told, images=shipped.parse_images(["mirror/team"])) == []
    assert "mirror/team/monitor:0.1.0" in told


def test_another_sdk_version_is_no_drift():
    text = "a: 1\nsdkVersion: kfp-2.17.0\nb: 2\n"
    assert normalised(text) == "a: 1\nb: 2\n"


@pytest.mark.slow
def test_check_fails_on_a_stale_file_and_says_where(tmp_path, capsys):
    arguments = ["--pipeline", "post-train", "--profile", "cpu-tiny"]
    arguments += ["--iterations", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    path = tmp_path / "post-train-cpu-tiny.yaml"
    path.write_text(path.read_text().replace("maxRetryCount: 1", "maxRetryCount: 2", 1))
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    told = capsys.readouterr().err
    changed = [line.split() for line in told.splitlines() if "maxRetryCount" in line]
    assert [words[0][0] for words in changed if words[-1] in "12"][:2] == ["-", "+"]
    assert "failed post-train-cpu-tiny.yaml" in told


@pytest.mark.slow
def test_images_can_be_replaced_and_the_result_still_passes(tmp_path):
    options = ["--profile", "gpu-16x8", "--resident", "0", "--iterations", "1"]
    options += ["--out", str(tmp_path), "--monitor", "s3://b/minder.toml"]
    images = {name: f"mirror.example:5000/{name}:7" for name in IMAGES}
    for name, reference in images.items():
        options += ["--image", f"{name}={reference}"]
    assert main(options) == 0
    text = (tmp_path / "post-train-gpu-16x8.yaml").read_text()
    spec = next(iter(yaml.safe_load_all(text)))
    used = {e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()}
    assert used == set(images.values())
    assert lint(text, images=images) == []
    faults = lint(text)
    assert faults
    assert all("image must be of the table and stand still" in fault for fault in faults)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--iterations", "0"], "1 to 20, got 0"),
        (["--iterations", "21"], "1 MiB"),
        (["--shards", "33"], "`num_shards` must be 1 to 32, got 33"),
        (["--parallelism", "-1"], "`parallelism` must be 0"),
        (["--image", "core"], "NAME=REFERENCE"),
        (["--image", "cor=x"], "NAME=REFERENCE with one of ['core', "),
        (["--max-restarts", "2"], "`max_restarts` must be 0 without --monitor, got 2"),
        (["--monitor", "s3://b/m.toml", "--max-restarts", "11"], "must be 0 to 10, got 11"),
        (["--monitor", "s3://b/m.toml", "--max-restarts", "-1"], "must be 0 to 10, got -1"),
    ],
)
def test_impossible_options_end_with_code_two_and_the_reason(option, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*option, "--profile", "cpu-tiny", "--check"])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_fewer_pods_than_shards_run_several_in_turn_and_get_so_much_more_time():
    profile = profile_named(
        "gpu-16x8", iterations_per_task=0, num_iterations=1, num_shards=5, parallelism=2
    )
    text = compile_text(profile)
    assert lint(text) == []
    spec, platform = yaml.safe_load_all(text)
    tasks = spec["components"]["comp-iteration-1"]["dag"]["tasks"]
    rollouts = ["rollout-i1", "rollout-2-i1"]
    assert sorted(tasks["reward-i1"]["dependentTasks"]) == sorted(rollouts)
    assert {name for name in tasks if name.startswith("rollout")} == {*rollouts}
    assert [tasks[name]["taskInfo"]["name"] for name in rollouts] == ["rollout 0", "rollout 1"]
    given = tasks["rollout-2-i1"]["inputs"]["parameters"]
    constants = [given[key]["runtimeValue"]["constant"] for key in ("shard", "num_tasks")]
    assert constants == [1.0, 2.0]
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-rollout"]
    once = profile.stages["rollout"].timeout_seconds
    assert int(pod["activeDeadlineSeconds"]) == 3 * once


@pytest.mark.slow
def test_a_monitor_stands_beside_each_train_task_only_where_it_is_asked_for():
    profile = profile_named("cpu-tiny", num_iterations=2)
    text = compile_text(profile, monitor=Monitor("s3://b/minder.toml"))
    assert lint(text) == []
    plain, watched = (
        next(yaml.safe_load_all(one))["components"] for one in (compile_text(profile), text)
    )
    before = plain["comp-iteration-1"]["dag"]["tasks"]
    tasks = watched["comp-iteration-1"]["dag"]["tasks"]
    assert set(tasks) - set(before) == {"monitor-check-i1"}
    assert {name: tasks[name] for name in before} == before
    check, train = tasks["monitor-check-i1"], tasks["train-i1"]
    assert check["dependentTasks"] == ["reward-i1"]
    assert "monitor-check-i1" not in train.get("dependentTasks", [])
    settings = check["inputs"]["parameters"]["settings"]["runtimeValue"]["constant"]
    assert settings == "s3://b/minder.toml"


@pytest.mark.slow
def test_restarts_keep_every_pod_away_from_the_nodes_that_prepare_names():
    profile = profile_named("gpu-16x8", iterations_per_task=0, num_iterations=2)
    text = compile_text(profile, monitor=Monitor("s3://b/minder.toml", max_restarts=3))
    assert lint(text) == []
    spec, platform = yaml.safe_load_all(text)
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {label for label, pod in pods.items() if "nodeAffinity" not in pod} == {
        "exec-prepare",
        "exec-report",
    }
    for stage in ("curate", "rollout", "train", "monitor-check"):
        ((_, source),) = pods[f"exec-{stage}"]["nodeAffinity"][0].items()
        assert source["componentInputParameter"].endswith("node_affinity")
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    inputs = (
        tasks["prepare"]["inputs"]["parameters"]["max_avoided_nodes"],
        spec["root"]["dag"]["tasks"]["report"]["inputs"]["parameters"]["max_restarts"],
    )
    assert [one["runtimeValue"]["constant"] for one in inputs] == [3.0, 3.0]
