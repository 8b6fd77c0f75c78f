"""What is installed beside a Kubeflow: every need of runs is met, and nobody else is touched."""

import json
import shutil
import subprocess

import pytest
import yaml

from components.images import CPU_TINY
from pipelines.compile import compile_text
from planish.stages.prepare.cluster import amount
from tests.contract.kfp_needs import KUBEFLOW, KUBERNETES, LAUNCHER_CPU, NEEDS
from tests.contract.test_manifests import (
    FOLDER,
    KUBEFLOW_OVERLAYS,
    OVERLAYS,
    WORKFLOW,
    find,
    launcher_settings,
    names,
    pods,
    resolve,
    walk,
)


def test_the_role_of_runs_meets_every_need_of_kubeflow_and_names_what_it_reads():
    rules = find(resolve(FOLDER / "runs"), "Role", "planish-runner")["rules"]
    for need in NEEDS:
        granted = [
            rule.get("resourceNames", [])
            for rule in rules
            if need.group in rule["apiGroups"]
            and need.resource in rule["resources"]
            and need.verb in rule["verbs"]
        ]
        assert ([need.name] if need.name else []) in granted, need


def test_a_namespace_of_kubeflow_gets_an_account_and_a_secret():
    for overlay in KUBEFLOW_OVERLAYS:
        objects = resolve(FOLDER / overlay)
        assert {o["kind"] for o in objects} == {
            *("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
            "Secret",
        }
        assert names(objects, "Secret") == {"planish-store"}


def test_buckets_of_other_people_are_reached_as_without_our_settings():
    # Kubeflow wants a default beside an entry for one bucket; without any it takes the environment.
    settings = launcher_settings()
    assert set(settings) == {"s3"}
    assert settings["s3"]["default"] == {"forcePathStyle": False, "credentials": {"fromEnv": True}}
    # Version 2.17 reads the number of retries of the default where an entry names its own.
    assert not list(walk(settings, "maxRetries"))


def test_nothing_changes_what_kubeflow_makes_of_other_pipelines():
    for path in FOLDER.rglob("*.yaml"):
        assert "COMPILED_PIPELINE_SPEC_PATCH" not in path.read_text(), path
    for overlay in OVERLAYS:
        for item in resolve(FOLDER / overlay):
            assert item["metadata"].get("namespace", "planish") == "planish"
    for item in resolve(FOLDER / "base"):
        if item["kind"] == "PriorityClass":
            assert item["globalDefault"] is False
            assert item["preemptionPolicy"] == "Never"


def test_stores_outrank_runs_and_every_class_that_is_named_exists_in_base():
    objects = resolve(FOLDER / "base")
    values = {o["metadata"]["name"]: o["value"] for o in objects if o["kind"] == "PriorityClass"}
    used = list(walk([*objects, WORKFLOW], "priorityClassName"))
    used += walk([*objects, WORKFLOW], "podPriorityClassName")
    assert set(used) == set(values)
    runs = values[WORKFLOW["spec"]["podPriorityClassName"]]
    stores = [values[p["priorityClassName"]] for o, p in pods(objects) if o["kind"] == "Deployment"]
    assert min(stores) > runs > 0


def test_data_of_a_store_stay_when_its_pod_goes():
    for overlay in OVERLAYS:
        objects = resolve(FOLDER / overlay)
        (volume,) = find(objects, "Deployment", "minio")["spec"]["template"]["spec"]["volumes"]
        assert volume == {"name": "data", "persistentVolumeClaim": {"claimName": "minio-data"}}
        assert find(objects, "PersistentVolumeClaim", "minio-data")


def test_the_store_answers_kubeflow_and_its_profiles():
    policy = find(resolve(FOLDER / "base"), "NetworkPolicy", "minio-from-runs")
    (rule,) = policy["spec"]["ingress"]
    labels = [source["namespaceSelector"]["matchLabels"] for source in rule["from"][1:]]
    # The second is the label by which Kubeflow's controller of profiles knows a profile.
    assert labels == [
        {"kubernetes.io/metadata.name": "kubeflow"},
        {"pipelines.kubeflow.org/enabled": "true"},
    ]


def test_one_machine_has_no_monitor_and_a_gpu_cluster_has_one():
    assert "minder" not in names(resolve(FOLDER / "overlays/local"), "Deployment")
    assert "minder" in names(resolve(FOLDER / "overlays/gpu"), "Deployment")


LEFT_UPLOADS = "stale_uploads_expiry=48h stale_uploads_cleanup_interval=6h"
"""Settings by which MinIO drops what killed writers have begun."""
FAKE_CLIENT = """#!/bin/sh
echo "$*" >> "$HOME/calls"
case "$*" in "admin policy entities"*) echo "  $RUN_USER" ;; "ilm rule list"*) exit 1 ;; esac
"""


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_setup_of_the_store_needs_a_shell_and_its_client_and_no_other_program(shell, tmp_path):
    # The image of the client has no sed and no grep; here is nothing but the client.
    script = find(resolve(FOLDER / "base"), "ConfigMap", "minio-setup")["data"]["setup.sh"]
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin" / "mc"
    client.write_text(FAKE_CLIENT)
    client.chmod(0o755)
    words = ("BUCKET", "ROOT_USER", "ROOT_PASSWORD", "RUN_USER", "RUN_PASSWORD")
    done = subprocess.run(
        [shutil.which(shell), "-c", script],
        env={name: name.lower() for name in words}
        | {"PATH": str(client.parent), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert f"admin policy create store planish-runs {tmp_path}/policy.json" in calls
    assert "admin config set store api " + LEFT_UPLOADS in calls
    assert "ilm rule add --prefix kfp/ --expire-days 30 store/bucket" in calls
    statements = json.loads((tmp_path / "policy.json").read_text())["Statement"]
    resources = [resource for statement in statements for resource in statement["Resource"]]
    assert resources == ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"]


@pytest.mark.slow
def test_the_tiny_profile_fits_two_cores_beside_kubernetes_kubeflow_and_the_store():
    assert sum(cpu for cpu, _ in services().values()) + sum(cpu for cpu, _ in tasks()) <= 2.0
    memory = sum(memory for _, memory in (*services().values(), *tasks()))
    assert memory <= amount("8Gi")


def services():
    """Return what each pod requests that is there before a run begins: cores and bytes."""
    found = {s.name: (amount(s.cpu), amount(s.memory)) for s in (*KUBERNETES, *KUBEFLOW)}
    for item, pod in pods(resolve(FOLDER / "overlays/local")):
        asked = [container["resources"]["requests"] for container in pod["containers"]]
        found[item["metadata"]["name"]] = (
            sum(amount(one["cpu"]) for one in asked),
            sum(amount(one["memory"]) for one in asked),
        )
    return found


def tasks():
    """Return what pods request that run at once: as many of the largest task as may do so."""
    compiled = next(yaml.safe_load_all(compile_text(CPU_TINY)))
    largest = (amount(LAUNCHER_CPU), 0.0)
    for executor in compiled["deploymentSpec"]["executors"].values():
        asked = executor["container"]["resources"]
        cpu, memory = asked["resourceCpuRequest"], asked["resourceMemoryRequest"]
        largest = (max(largest[0], amount(cpu)), max(largest[1], amount(memory)))
    return [largest] * CPU_TINY.parallelism


@pytest.mark.server
def test_the_store_takes_the_rule_about_uploads_that_nobody_ends(minio_server):
    values = dict(setting.split("=") for setting in LEFT_UPLOADS.split())
    minio_server.admin.config_set("api", values)
    assert set(LEFT_UPLOADS.split()) <= set(minio_server.admin.config_get("api").split())
