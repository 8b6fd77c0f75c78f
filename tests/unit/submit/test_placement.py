"""Where the pods of a run may go: pull secrets, tolerations and node selectors."""

import tempfile
from pathlib import Path

import yaml

from planish.__main__ import main
from planish.submit import pipeline


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
