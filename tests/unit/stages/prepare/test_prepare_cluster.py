"""Cluster checks against a fake API, and the real client against a recording server."""

import json
from dataclasses import dataclass, field, replace

import pytest
import yaml

from planish.base.errors import ConfigError
from planish.stages.prepare.cluster import (
    CLUSTER_PERMISSIONS,
    CONTROLLER,
    DRIVER_LABEL,
    PERMISSIONS,
    ClusterApi,
    Permission,
    Pod,
    PodRequests,
    amount,
    check_cluster,
    inside_cluster,
    retries_under,
)
from tests.contract.test_retries import SETTINGS, STOCK
from tests.servers.scripted_http import Reply, ScriptedServer

GPU = "nvidia.com/gpu"
REQUESTS = PodRequests.parse(
    json.dumps(
        {
            "pod": {"cpu": "64", "memory": "1200Gi", GPU: "8"},
            "total": {"cpu": "96000m", "memory": "1280Gi", GPU: "8"},
        }
    )
)


@dataclass
class FakeCluster:
    """Meets `ClusterApi`."""

    denied: tuple = ()
    quota: tuple = ()
    machines: tuple = ({"cpu": "96", "memory": "2000Gi", GPU: "8"}, {"cpu": "4", "memory": "8Gi"})
    asked: list = field(default_factory=list)
    runtimes: tuple = ()
    settings: dict | None = None

    def allowed(self, permission, *, namespaced):
        self.asked.append((permission.describe(), namespaced))
        return permission.describe() not in self.denied

    def quotas(self):
        return self.quota

    def nodes(self):
        return self.machines

    def run_is_active(self, run_id):
        return run_id == "alive"

    def has_runtime(self, name):
        return name in self.runtimes

    def controller(self):
        return self.settings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0.0), ("500m", 0.5), ("2", 2.0), ("1k", 1000.0), ("1e3", 1000.0)),
        *(("4Gi", 4 * 2**30), ("1.5Ti", 1.5 * 2**40), ("3M", 3e6), ("7Ki", 7168.0)),
    ],
)
def test_quantities_of_kubernetes_are_read(text, value):
    assert amount(text) == pytest.approx(value)


def test_a_sufficient_cluster_has_no_fault(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not inside_cluster()
    nothing = PodRequests.parse("")
    assert check_cluster(FakeCluster(machines=()), nothing, assume_autoscaling=False).faults == ()
    cluster = FakeCluster()
    assert check_cluster(cluster, REQUESTS, assume_autoscaling=False).faults == ()
    assert cluster.asked == [
        *((p.describe(), True) for p in PERMISSIONS),
        *((p.describe(), False) for p in CLUSTER_PERMISSIONS),
    ]


def test_missing_verbs_are_listed():
    cluster = FakeCluster(denied=("list workflows.argoproj.io", "list nodes"), machines=())
    findings = check_cluster(cluster, REQUESTS, assume_autoscaling=True)
    assert len(findings.faults) == 1
    assert "allowed to list workflows.argoproj.io, list nodes, but" in findings.faults[0]
    assert findings.warnings == ()


def test_a_quota_that_is_too_small_for_the_largest_stage_is_told():
    quota = ({"hard": {f"requests.{GPU}": "16"}, "used": {f"requests.{GPU}": "9"}},)
    findings = check_cluster(FakeCluster(quota=quota), REQUESTS, assume_autoscaling=False)
    assert len(findings.faults) == 1
    assert f"must leave 8 of `{GPU}`" in findings.faults[0]
    assert "got 16 in all and 7 free" in findings.faults[0]
    roomy = ({"hard": {f"requests.{GPU}": "17", "pods": "1"}, "used": {f"requests.{GPU}": "9"}},)
    assert not check_cluster(FakeCluster(quota=roomy), REQUESTS, assume_autoscaling=False).faults

    # Cores are counted for everything that runs at once.
    for limit, faults in (("95", 1), ("96", 0)):
        cluster = FakeCluster(quota=({"hard": {"cpu": limit}, "used": {}},))
        found = check_cluster(cluster, REQUESTS, assume_autoscaling=False).faults
        assert len(found) == faults


def test_an_absent_accelerator_and_small_nodes_are_told_or_only_warned_about():
    cluster = FakeCluster(machines=({"cpu": "4", "memory": "8Gi"},))
    findings = check_cluster(cluster, REQUESTS, assume_autoscaling=False)
    assert len(findings.faults) == 3
    assert f"a node with `{GPU}` must exist" in findings.faults[2]
    assert "must hold 64 of `cpu`" in findings.faults[0]
    assert "the largest has 4" in findings.faults[0]
    scaling = check_cluster(cluster, REQUESTS, assume_autoscaling=True)
    assert (scaling.faults, scaling.warnings) == ((), findings.faults)


@pytest.mark.parametrize(("major", "faults"), [("580", 0), ("1000", 0), ("575", 1), ("", 0)])
def test_a_driver_that_is_too_old_is_told_by_the_label_of_its_node(major, faults):
    node = {"cpu": "96", "memory": "2000Gi", GPU: "8"}
    cluster = FakeCluster(machines=({**node, DRIVER_LABEL: "580"}, {**node, DRIVER_LABEL: major}))
    wanted = replace(REQUESTS, stages={"train": Pod(8, "1200Gi")})
    findings = check_cluster(cluster, wanted, assume_autoscaling=False)
    assert len(findings.faults) == faults
    assert all("NVIDIA driver 580 or newer" in f and "got `nvidia" in f for f in findings.faults)
    assert check_cluster(cluster, wanted, assume_autoscaling=True).warnings == findings.faults
    # Stages that compute on processors do not care.
    assert check_cluster(cluster, REQUESTS, assume_autoscaling=False).faults == ()


RANKS = {"cpu": "64", "memory": "1200Gi", GPU: "8"}


def of_nodes(count, wanted=0, launcher="job"):
    raw = {"pod": RANKS, "total": RANKS, "rank": RANKS, "num_nodes": count}
    settings = {"num_nodes": wanted, "launcher": launcher}
    return PodRequests.parse(json.dumps(raw)).of_training(settings)


def test_pods_that_train_together_need_rights_quota_and_nodes():
    machine = {"cpu": "96", "memory": "2000Gi", GPU: "8"}
    enough = FakeCluster(machines=(machine,) * 4)
    assert check_cluster(enough, of_nodes(4), assume_autoscaling=False).faults == ()
    assert ("create jobs.batch", True) in enough.asked
    few = FakeCluster(machines=(machine,) * 3)
    (fault,) = check_cluster(few, of_nodes(4), assume_autoscaling=False).faults
    assert "must hold the 4 pods that train together" in fault
    assert "only 3 of them fit" in fault
    assert check_cluster(few, of_nodes(4, 3), assume_autoscaling=False).faults == ()
    quota = ({"hard": {f"requests.{GPU}": "32"}, "used": {f"requests.{GPU}": "8"}},)
    small = FakeCluster(machines=(machine,) * 4, quota=quota)
    (fault,) = check_cluster(small, of_nodes(4), assume_autoscaling=False).faults
    assert f"must leave 32 of `{GPU}`" in fault
    denied = FakeCluster(machines=(machine,) * 4, denied=("create jobs.batch", "get pods/log"))
    (fault,) = check_cluster(denied, of_nodes(4), assume_autoscaling=False).faults
    assert "allowed to get pods/log, create jobs.batch, but" in fault


def test_a_missing_runtime_of_kubeflow_trainer_is_told_before_anything_is_asked_for():
    machine = {"cpu": "96", "memory": "2000Gi", GPU: "8"}
    cluster, wanted = FakeCluster(machines=(machine,) * 2), of_nodes(2, launcher="trainjob")
    (fault,) = check_cluster(cluster, wanted, assume_autoscaling=False).faults
    assert "apply manifests/trainer, or set `train.launcher=job`" in fault
    assert ("create trainjobs.trainer.kubeflow.org", True) in cluster.asked
    assert ("create jobs.batch", True) not in cluster.asked
    there = FakeCluster(machines=(machine,) * 2, runtimes=("planish-torch",))
    assert check_cluster(there, wanted, assume_autoscaling=False).faults == ()
    denied = FakeCluster(
        machines=(machine,) * 2, denied=("get clustertrainingruntimes.trainer.kubeflow.org",)
    )
    (fault,) = check_cluster(denied, wanted, assume_autoscaling=False).faults
    assert "allowed to get clustertrainingruntimes.trainer.kubeflow.org, but" in fault


def _item(**facts):
    return {"metadata": {"name": "x"}, **facts}


def test_pods_are_counted_on_the_nodes_that_their_labels_choose():
    machine, each = {"cpu": "96", "memory": "2000Gi", GPU: "8"}, {"cpu": "10", GPU: "2"}
    wanted = replace(
        of_nodes(2),
        labels={"zone": "a"},
        gpu_labels={"pool": "h100"},
        moments={"rollout": (9, each)},
    )
    ours = {**machine, "zone": "a", "pool": "h100"}
    for machines, fault in (
        ((machine, ours), "only 1 of them fit"),
        ((machine, {**machine, "zone": "a"}), "with the labels {'zone': 'a', 'pool': 'h100'} must"),
    ):
        cluster = FakeCluster(machines=machines)
        assert fault in check_cluster(cluster, wanted, assume_autoscaling=False).faults[0]
    told = check_cluster(FakeCluster(machines=(ours, ours)), wanted, assume_autoscaling=False)
    assert told.faults == ()
    assert "the nodes hold 8 of them: the others wait" in told.warnings[0]


def test_the_real_client_sends_what_the_api_expects():
    from kubernetes import client

    core = "/api/v1"
    workflows = "/apis/argoproj.io/v1alpha1/namespaces/team/workflows"
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    quota = {"hard": {"cpu": "4"}, "used": {"cpu": "1"}}
    answers = {
        f"{core}/namespaces/team/resourcequotas": {"items": [_item(status=quota)]},
        f"{core}/nodes": {
            "items": [
                {
                    "metadata": {"labels": {DRIVER_LABEL: "580", "zone": "a"}},
                    "spec": {},
                    "status": {"allocatable": {"cpu": "8"}},
                },
                _item(spec={"unschedulable": True}, status={"allocatable": {"cpu": "64"}}),
            ]
        },
        workflows: {"items": [{"status": {"phase": "Succeeded"}}, {"status": {}}]},
        reviews: {"spec": {}, "status": {"allowed": True}},
    }

    def answer(request):
        path = request.path.partition("?")[0]
        return Reply.of(answers.get(path, {}), status=200 if path in answers else 404)

    server = ScriptedServer(answer)
    api = ClusterApi(client.Configuration(host=server.url), "team", patience_seconds=0)
    with api.client:
        assert api.quotas() == [quota]
        assert api.controller() is None
        answers[f"{core}/namespaces/team/configmaps/{CONTROLLER}"] = {"data": {"a": "b"}}
        assert api.controller() == {"a": "b"}
        assert api.nodes() == [{"cpu": "8", DRIVER_LABEL: "580", "zone": "a"}]
        assert api.run_is_active("7f3a") is True
        answers[workflows] = {"items": [{"status": {"phase": "Failed"}}]}
        assert api.run_is_active("7f3a") is False
        assert api.allowed(Permission("argoproj.io", "workflows", "list"), namespaced=True)
        assert api.allowed(Permission("", "nodes", "list"), namespaced=False)
    server.close()
    assert [request.path for request in server.requests[4:7]] == [
        f"{workflows}?labelSelector=pipeline%2Frunid%3D7f3a&limit=500",
        f"{workflows}?labelSelector=pipeline%2Frunid%3D7f3a&limit=500",
        f"{workflows}?fieldSelector=metadata.name%3D7f3a&limit=500",
    ]
    reviewed = [request.json["spec"]["resourceAttributes"] for request in server.requests[-2:]]
    assert reviewed == [
        {"group": "argoproj.io", "resource": "workflows", "verb": "list", "namespace": "team"},
        {"group": "", "resource": "nodes", "verb": "list"},
    ]


PATCHED = yaml.safe_load(SETTINGS.read_text())["data"]
INSTALLED = {"workflowDefaults": yaml.safe_dump({"spec": STOCK})}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (INSTALLED, "off: `retryPolicy: OnError`"),
        ({"config": yaml.safe_dump({"workflowDefaults": {"spec": STOCK}})}, "off: "),
        (PATCHED, "on: `retryPolicy: Always`"),
        ({}, "on: `retryPolicy: OnFailure`"),
        ({"workflowDefaults": "- a"}, "not known: "),
        (None, "not known: "),
    ],
)
def test_whether_the_cluster_tries_tasks_again_is_read_from_its_controller(settings, told):
    assert retries_under(settings).startswith(told)
    cluster = FakeCluster(settings=settings)
    findings = check_cluster(cluster, REQUESTS, assume_autoscaling=False)
    assert findings.retries == retries_under(settings)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"num_nodes": "many"}', '{"stages": [1]}', '{"stages": {"train": {"gpu": 8}}}'],
)
def test_requests_that_another_release_has_compiled_are_told(text):
    with pytest.raises(ConfigError, match=r"`requests` must be JSON .* compile the pipeline with"):
        PodRequests.parse(text)


@pytest.mark.parametrize("quantity", ["", "Gi", "4GB", "four", "1,5"])
def test_quantities_of_another_form_are_told(quantity):
    with pytest.raises(ConfigError, match="a quantity must read like"):
        amount(quantity)


def test_exabytes_and_exponents_are_read():
    assert [amount(x) for x in ("2Ei", "1e3", "3E")] == [2 * 1024.0**6, 1000.0, 3e18]
