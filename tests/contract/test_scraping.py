"""Pods of the profiles for clusters are what the scrape configuration looks for."""

from pathlib import Path

import pytest
import yaml

from components.images import METRICS_PORT, PROFILES
from components.pod_settings import STAGE_LABEL
from pipelines.compile import BUILDERS, GOLDEN, file_name
from planish.run.stage_metrics import NUM_PORTS, PORT_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = {
    job["job_name"]: job
    for job in yaml.safe_load((REPOSITORY / "monitoring/prometheus.yaml").read_text())[
        "scrape_configs"
    ]
}


def rules(job):
    """Return the source label of a relabelling to its rule."""
    return {rule["source_labels"][0]: rule for rule in JOBS[job]["relabel_configs"]}


def pods_of(name, pipeline):
    """Yield (environment, labels) of each pod of a compiled pipeline."""
    text = (GOLDEN / file_name(PROFILES[name], pipeline)).read_text()
    spec, platform = yaml.load_all(text, yaml.CSafeLoader)
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for label, executor in spec["deploymentSpec"]["executors"].items():
        env = {entry["name"]: entry.get("value") for entry in executor["container"].get("env", [])}
        yield env, pods[label]["podMetadata"]["labels"]


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
@pytest.mark.parametrize("name", ["gpu-1x8", "gpu-4x8"])
def test_every_pod_of_a_cluster_profile_serves_where_it_is_looked_for(name, pipeline):
    found = list(pods_of(name, pipeline))
    assert {env.get(PORT_VARIABLE) for env, _ in found} == {str(METRICS_PORT)}
    for _, labels in found:
        assert STAGE_LABEL in labels


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
def test_the_profile_of_one_machine_serves_nothing(pipeline):
    assert {env.get(PORT_VARIABLE) for env, _ in pods_of("cpu-tiny", pipeline)} == {None}


@pytest.mark.parametrize(("job", "offset"), [("planish", 0), ("planish-rank", 1)])
def test_the_address_is_that_of_the_pod_and_our_port(job, offset):
    rule = rules(job)["__meta_kubernetes_pod_ip"]
    assert rule["target_label"] == "__address__"
    assert rule["replacement"] == f"$1:{METRICS_PORT + offset}"
    assert offset < NUM_PORTS


def test_pods_are_found_by_labels_and_container_that_they_have():
    def in_discovery(label):
        return label.replace("/", "_").replace(".", "_")

    stage = f"__meta_kubernetes_pod_labelpresent_{in_discovery(STAGE_LABEL)}"
    assert rules("planish")[stage]["action"] == "keep"
    # Argo, under Kubeflow too, gives the container of a step this name.
    assert rules("planish")["__meta_kubernetes_pod_container_name"]["regex"] == "main"
    run = f"__meta_kubernetes_pod_label_{in_discovery('pipeline/runid')}"
    assert rules("planish")[run]["target_label"] == "run_id"
