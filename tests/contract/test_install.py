"""What is installed beside a Kubeflow: every need of runs is met, and nobody else is touched."""

from tests.contract.kfp_needs import NEEDS
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
        assert granted == [[need.name] if need.name else []], need


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


def test_one_machine_has_no_monitor_and_a_gpu_cluster_has_one():
    assert "minder" not in names(resolve(FOLDER / "overlays/local"), "Deployment")
    assert "minder" in names(resolve(FOLDER / "overlays/gpu"), "Deployment")
