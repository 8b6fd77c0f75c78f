"""Limits of profiles, image tables and what a pipeline asks of a cluster."""

import copy
import dataclasses
import json

import pytest

from components.images import (
    CPU_TINY,
    GPU_1X8,
    GPU_4X8,
    GPU_16X8,
    IMAGES,
    Resources,
    resolve_images,
)
from pipelines.compile import parse_images
from pipelines.post_train import build_post_train, check_profile, largest_requests, profile_named
from pipelines.share import name_tasks_apart, share_components


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_iterations": 0}, "`num_iterations` must be 1 to 20, got 0; the workflow object"),
        ({"num_iterations": 36}, "1 MiB"),
        ({"num_shards": 0, "parallelism": 0}, "`num_shards` must be 1 to 32, got 0"),
        ({"num_shards": 33, "parallelism": 0}, "every shard adds pods"),
        ({"parallelism": -1}, "`parallelism` must be 0"),
        ({"parallelism": 3}, "got 3; a loop cannot run more tasks than it has"),
        ({"name": "GPU_8"}, r"must match \[a-z0-9-\], got 'GPU_8'"),
    ],
)
def test_counts_outside_their_limits_name_limit_and_reason(changes, words):
    profile = dataclasses.replace(CPU_TINY, **changes)
    with pytest.raises(ValueError, match=words):
        check_profile(profile)
    with pytest.raises(ValueError, match=words):
        build_post_train(profile)


def test_all_faults_of_a_profile_are_told_at_once():
    profile = dataclasses.replace(CPU_TINY, num_iterations=0, num_shards=40, name="-")
    with pytest.raises(ValueError, match=r"num_iterations.*num_shards.*profile name"):
        check_profile(profile)


@pytest.mark.parametrize(("iterations", "shards"), [(1, 1), (24, 1), (3, 32)])
def test_the_limits_themselves_are_allowed(iterations, shards):
    profile = profile_named("cpu-tiny", num_iterations=iterations, num_shards=shards)
    assert (profile.num_iterations, profile.num_shards) == (iterations, shards)
    assert profile.parallelism == shards


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match=r"must be one of \['cpu-tiny', 'gpu-16x8', 'gpu-1x8',"):
        profile_named("gpu-9x9")


def test_the_shipped_profiles_are_what_their_names_say():
    assert (CPU_TINY.num_iterations, CPU_TINY.num_shards) == (12, 2)
    assert all(r.gpus == 0 for r in CPU_TINY.stages.values())
    for profile, shards in ((GPU_1X8, 8), (GPU_4X8, 32)):
        assert profile.num_shards == shards
        assert profile.stages["rollout"].gpus * shards == shards
        assert profile.stages["train"].gpus == 8
    assert [p.num_nodes for p in (CPU_TINY, GPU_1X8, GPU_4X8, GPU_16X8)] == [1, 1, 4, 16]
    assert GPU_16X8.stages["rollout"].gpus * GPU_16X8.num_shards == 16 * 8


def test_a_long_stage_is_still_retried():
    resources = Resources("1", "1Gi", timeout_seconds=7200, retries=3)
    assert resources.backoff_max_seconds == 4 * 7200 + 3600


def test_requests_of_the_tiny_profile_are_one_large_pod_or_two_rollouts():
    found = json.loads(largest_requests(CPU_TINY))
    assert found["pod"] == {"cpu": "100m", "memory": "2Gi"}
    assert found["total"] == {"cpu": "200m", "memory": str(4 * 2**30)}
    assert set(found["stages"]) == {"curate", "sft", "rollout", "train", "evaluate"}
    assert found["stages"]["train"] == {"gpus": 0, "memory": "2Gi"}


def test_requests_of_a_gpu_profile_count_all_rollouts_at_once():
    apart = dataclasses.replace(GPU_4X8, iterations_per_task=0)
    found = json.loads(largest_requests(apart))
    assert found["pod"]["nvidia.com/gpu"] == "8"
    assert found["total"]["nvidia.com/gpu"] == "32"
    assert found["total"]["cpu"] == f"{32 * 10 * 1000}m"
    assert found["total"]["memory"] == str(32 * 100 * 2**30)
    assert found["num_nodes"] == 4
    assert found["rank"] == {"cpu": "80", "memory": "800Gi", "nvidia.com/gpu": "8"}
    each = {"cpu": "10", "memory": "100Gi", "nvidia.com/gpu": "1"}
    assert found["moments"] == {"rollout": [32, each]}
    assert found["gpu_labels"] == {"nvidia.com/gpu.present": "true"}
    most = json.loads(largest_requests(GPU_16X8))
    assert most["total"]["nvidia.com/gpu"] == "128"
    assert most["total"]["memory"] == str(32 * 400 * 2**30)
    assert found["stages"]["train"] == {"gpus": 8, "memory": "800Gi"}
    assert found["stages"]["rollout"] == {"gpus": 1, "memory": "100Gi"}
    assert found["gpu_bytes"] == 80 * 10**9
    larger = json.loads(largest_requests(profile_named("gpu-1x8", gpu_memory_gb=141)))
    assert larger["gpu_bytes"] == 141 * 10**9


def test_requests_of_tasks_of_several_iterations_are_those_of_their_gang():
    found = json.loads(largest_requests(GPU_4X8))
    assert set(found["stages"]) == {"curate", "sft", "iterate", "evaluate"}
    assert found["stages"]["iterate"] == {"gpus": 8, "memory": "800Gi"}
    assert found["total"] == {
        "cpu": f"{4 * 80 * 1000}m", "memory": str(4 * 800 * 2**30), "nvidia.com/gpu": "32",
    }  # fmt: skip


def test_an_amount_that_kubernetes_does_not_know_is_refused():
    stages = {**CPU_TINY.stages, "train": Resources("1", "8GB", timeout_seconds=60)}
    with pytest.raises(ValueError, match="got '8GB'"):
        largest_requests(dataclasses.replace(CPU_TINY, stages=stages))


def test_images_are_replaced_by_name():
    assert resolve_images({"core": "mirror/core:2"}) == {**IMAGES, "core": "mirror/core:2"}
    assert resolve_images() == IMAGES
    assert parse_images(["core=a/b:c", "train=x@sha256:1=2"]) == {
        "core": "a/b:c",
        "train": "x@sha256:1=2",
    }


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"cor": "x"}, r"one of \['core', 'monitor', 'rollout', 'train'\], got"),
        ({"core": " "}, "empty"),
    ],
)
def test_unknown_and_empty_images_are_refused(images, words):
    with pytest.raises(ValueError, match=words):
        resolve_images(images)


def graph(*names):
    tasks = {f"task-{n}": {"componentRef": {"name": name}} for n, name in enumerate(names)}
    return {"dag": {"tasks": tasks}}


def spec_of(images, **graphs):
    """Return a pipeline with a component for each image, and graphs of them."""
    leaves = {f"comp-{name}": {"executorLabel": f"exec-{name}"} for name in images}
    executors = {f"exec-{name}": {"container": {"image": image}} for name, image in images.items()}
    components = {**leaves, **graphs}
    return {
        "components": components,
        "deploymentSpec": {"executors": executors},
        "root": graph(*graphs),
    }


def refs(node):
    return [task["componentRef"]["name"] for task in node["dag"]["tasks"].values()]


SHARED = {"a": "x", "a-2": "x", "b": "y"}


def test_equal_graphs_of_equal_components_stand_once():
    spec = spec_of(SHARED, one=graph("comp-a", "comp-b"), two=graph("comp-a-2", "comp-b"))
    pods = {f"exec-{name}": {"timeout": 1} for name in SHARED}
    share_components(spec, pods)
    assert set(spec["deploymentSpec"]["executors"]) == set(pods) == {"exec-a", "exec-b"}
    assert set(spec["components"]) == {"comp-a", "comp-b", "one"}
    assert refs(spec["root"]) == ["one", "one"]
    assert refs(spec["components"]["one"]) == ["comp-a", "comp-b"]


def test_other_pod_settings_keep_components_and_their_graphs_apart():
    spec = spec_of(SHARED, one=graph("comp-a"), two=graph("comp-a-2"))
    pods = {"exec-a": {"timeout": 1}, "exec-a-2": {"timeout": 2}, "exec-b": {}}
    before = copy.deepcopy((spec, pods))
    share_components(spec, pods)
    assert (spec, pods) == before


def test_tasks_of_an_iteration_and_what_names_them_get_its_number():
    of_task = {
        "inputs": {"artifacts": {"state": {"taskOutputArtifact": {"producerTask": "train"}}}}
    }
    after = {"dependentTasks": ["train"], "componentRef": {"name": "a"}}
    subtask = {"valueFromParameter": {"producerSubtask": "train"}}
    tasks = {"train": {"componentRef": {"name": "a"}}, "checkpoint": {**after, **of_task}}
    one = {"dag": {"tasks": tasks, "outputs": {"parameters": {"pin": subtask}}}}
    two = graph("a")
    root = {
        "iteration-12": {"componentRef": {"name": "one"}},
        "other": {"componentRef": {"name": "two"}},
    }
    spec = {"root": {"dag": {"tasks": root}}, "components": {"one": one, "two": two, "a": {}}}
    name_tasks_apart(spec)
    dag = one["dag"]
    assert list(dag["tasks"]) == ["train-i12", "checkpoint-i12"]
    last = dag["tasks"]["checkpoint-i12"]
    assert last["dependentTasks"] == ["train-i12"]
    assert last["inputs"]["artifacts"]["state"]["taskOutputArtifact"]["producerTask"] == "train-i12"
    assert (
        dag["outputs"]["parameters"]["pin"]["valueFromParameter"]["producerSubtask"] == "train-i12"
    )
    assert two == graph("a")
