"""Gangs: their objects, what they have from the pod of the stage, and a server that is away."""

import copy
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

from components.images import GPU_4X8
from components.pod_settings import gang_pods
from planish.base.errors import ClusterError, ConfigError
from planish.run.gang import cluster as module
from planish.run.gang import launch
from planish.run.gang.cluster import GangCluster
from planish.run.gang.launch import run_gang, serve, submit
from planish.run.gang.manifests import Gang, GangPods, Network, job_manifest, service_manifest

GANG = Gang("ab" * 32, 4, 8, ("planish.stages.train.ranks.worker", "pin"))
POD = {
    "metadata": {"name": "stage", "uid": "u1"},
    "spec": {
        "nodeName": "node-3",
        "activeDeadlineSeconds": 600,
        "serviceAccountName": "planish-runner",
        "priorityClassName": "planish-training",
        "priority": 1000,
        "affinity": {"nodeAffinity": {}},
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "kube-api-access-x", "projected": {"sources": []}},
        ],
        "containers": [
            {"name": "wait", "image": "argoexec"},
            {
                "name": "main",
                "image": "planish/train:0.1.0",
                "command": ["launch"],
                "env": [
                    {"name": "ARGO_TEMPLATE", "value": "x"},
                    {"name": "KFP_POD_NAME", "value": "x"},
                    {"name": "PLANISH_GANG", "value": "x"},
                    {"name": "HF_HOME", "value": "/cache/huggingface"},
                ],
                "resources": {"requests": {"cpu": "500m"}},
                "volumeMounts": [
                    {"name": "cache", "mountPath": "/cache"},
                    {"name": "kube-api-access-x", "mountPath": "/var/run/secrets"},
                ],
            },
        ],
    },
}


def test_pods_are_cast_from_the_pod_of_the_stage():
    job = job_manifest(GANG, POD)
    assert job["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "stage", "uid": "u1"}
    ]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "planish/train:0.1.0"
    assert container["resources"] == {"requests": {"cpu": "500m"}}
    names = [each["name"] for each in container["env"]]
    assert names == ["HF_HOME", "POD_IP", "GANG_INDEX"]
    assert [each["name"] for each in spec["volumes"]] == ["cache"]
    assert [each["name"] for each in container["volumeMounts"]] == ["cache"]
    assert "nodeName" not in spec
    # Admission makes the number of the class, and refuses one that a pod brings along.
    assert (spec["priorityClassName"], "priority" in spec) == ("planish-training", False)
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["automountServiceAccountToken"] is False
    assert job["spec"]["activeDeadlineSeconds"] == 600
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    assert not job["spec"]["suspend"]


def test_what_a_profile_says_comes_on_top():
    told = gang_pods(GPU_4X8.stages["train"], GPU_4X8.num_nodes)
    network = {"resources": {"rdma/hca": "1"}, "capabilities": ["IPC_LOCK"], "host_network": True}
    Network(**network, env={"NCCL_IB_HCA": "mlx5"}).join(told)
    pods = GangPods.parse(json.dumps(told))
    assert (pods.num_nodes, pods.gpus) == (4, 8)
    gang = Gang("ab" * 32, 4, 8, ("m",), pods=pods, queue="team")
    own = copy.deepcopy(POD)
    own["spec"] |= {"nodeSelector": {"pool": "rl"}, "tolerations": [{"key": "dedicated"}]}
    dropped = {"runAsUser": 1000, "capabilities": {"drop": ["ALL"]}}
    next(each for each in own["spec"]["containers"] if each["name"] == "main")[
        "securityContext"
    ] = dropped
    job = job_manifest(gang, own)
    assert job["spec"]["suspend"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    rdma = {"rdma/hca": "1"}
    assert container["resources"]["limits"] == {"memory": "800Gi", "nvidia.com/gpu": "8", **rdma}
    assert container["resources"]["requests"].items() >= rdma.items()
    capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["securityContext"] == {**dropped, "capabilities": capabilities}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true", "pool": "rl"}
    assert [each["key"] for each in spec["tolerations"]] == ["dedicated", "nvidia.com/gpu"]
    assert [each["name"] for each in spec["volumes"]] == ["cache", "shm", "scratch"]
    assert {each["mountPath"] for each in container["volumeMounts"]} == {
        *("/cache", "/dev/shm", "/scratch")
    }
    variables = {each["name"]: each.get("value") for each in container["env"]}
    # A claim with models stays where models are fetched to.
    assert variables["HF_HOME"] == "/cache/huggingface"
    assert variables["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert variables["NCCL_IB_HCA"] == "mlx5"


def test_outside_a_pod_there_is_no_gang(monkeypatch):
    monkeypatch.delenv("POD_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"set `train\.num_nodes=1`"):
        GangCluster.from_pod("job")


class Forgetful(BaseHTTPRequestHandler):
    """An API server that was started anew: of old versions it says 410."""

    asked: ClassVar[list[str]] = []
    events: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self):
        self.asked.append(self.path)
        gone = "resourceVersion=7" in self.path
        self.send_response(410 if gone else 200)
        self.end_headers()
        for kind, version in [] if gone else self.events:
            metadata = {"name": "gang", "resourceVersion": version}
            event = {"type": kind, "object": {"metadata": metadata}}
            self.wfile.write(f"{json.dumps(event)}\n".encode())

    def log_message(self, *_):
        pass


def test_a_version_that_the_server_has_forgotten_is_watched_from_what_it_has(monkeypatch):
    from kubernetes import client

    def no_pause(_):
        raise AssertionError("it polls")

    monkeypatch.setattr(module.time, "sleep", no_pause)
    Forgetful.events[:] = [("ADDED", "7"), ("MODIFIED", "9"), ("MODIFIED", "11")]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    try:
        cluster = GangCluster(client.Configuration(host=host), "team", "stage")
        with cluster.client:
            job = {"metadata": {"name": "gang", "resourceVersion": "7"}}
            cluster.wait_for_change(job, 60)
    finally:
        server.shutdown()
        server.server_close()
    assert ["resourceVersion=7" in path for path in Forgetful.asked] == [True, False]


PLANNED = Gang("ab" * 32, 2, 1, ("m",), work="w1", labels={"planish/stage": "train"})
GANG_LAUNCH_POD = {
    "metadata": {"name": "stage", "uid": "u-stage"},
    "spec": {"containers": [{"name": "main", "image": "planish/train:0.1.0"}]},
}


class Namespace(GangCluster):
    """A namespace in memory: answers what a client of Kubernetes would ask an API server.

    Pods outlive their job for `linger` looks at them, as pods that are asked to end do.
    """

    def __init__(self, launcher="job"):
        super().__init__(None, "n", "stage", launcher=launcher)
        self.objects, self.deleted = {}, []
        self.pods_left, self.forbidden = [], "nothing"

    def call(self, function, *arguments, **options):
        name = function.__name__
        verb = name.partition("_")[0]
        if self.forbidden in arguments:
            raise ConfigError(f"the service account must be allowed to {name}")
        if name == "read_namespaced_pod":
            return GANG_LAUNCH_POD
        if name == "list_namespaced_pod":
            left, self.pods_left = self.pods_left, self.pods_left[:-1]
            return {"items": [{"metadata": {"name": each}} for each in left]}
        kind = "service" if "service" in name else arguments[3].removesuffix("s")
        if verb == "create":
            manifest = arguments[-1]
            key = (kind, manifest["metadata"]["name"])
            if key in self.objects:
                raise ClusterError("there is one", status=409)
            uid = f"u-{kind}-{len(self.objects) + len(self.deleted)}"
            metadata = {**manifest["metadata"], "uid": uid}
            self.objects[key] = {**manifest, "metadata": metadata}
            return self.objects[key]
        key = (kind, PLANNED.name)
        assert PLANNED.name in arguments
        if key not in self.objects:
            raise ClusterError("not found", status=404)
        if verb == "delete":
            self.deleted.append((kind, options["body"]["propagationPolicy"]))
            del self.objects[key]
        if verb == "patch":
            metadata, change = self.objects[key]["metadata"], arguments[-1]["metadata"]
            merged = {**metadata["labels"], **change.pop("labels")}
            metadata["labels"] = {k: v for k, v in merged.items() if v is not None}
            metadata.update(change)
        return self.objects.get(key)

    def put(self, gang, **metadata):
        """Leave a gang as an earlier run did."""
        kind = "trainjob" if gang.launcher == "trainjob" else "job"
        job = job_manifest(gang, GANG_LAUNCH_POD)
        job["metadata"] |= {"uid": "u-earlier", **metadata}
        self.objects[kind, gang.name] = job
        return job


@pytest.fixture
def looks(monkeypatch):
    """Count pauses, and take none."""
    taken = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=taken.append, monotonic=lambda: 0.0))
    return taken


@pytest.mark.parametrize("launcher", ["job", "trainjob"])
@pytest.mark.parametrize("run_id", ["r2", ""])
def test_whoever_attaches_owns_the_gang_and_cleans_it_up(looks, launcher, run_id):
    cluster = Namespace(launcher)
    of_first = {"planish/stage": "train", "pipeline/runid": "r1"}
    first = replace(PLANNED, launcher=launcher, labels=of_first, queue="team")
    job = cluster.put(first)
    job["metadata"]["labels"]["of/others"] = "stays"
    job["metadata"]["ownerReferences"][0]["uid"] = "u-of-r1"
    of_run = {"pipeline/runid": run_id} if run_id else {}
    again = replace(first, labels={"planish/stage": "train", **of_run})
    attached = submit(cluster, again, pytest.fail)
    seen = cluster.objects[launcher, PLANNED.name]["metadata"]
    assert [each["uid"] for each in seen["ownerReferences"]] == ["u-stage"]
    assert seen["labels"] == {
        "planish/stage": "train",
        "planish/gang": PLANNED.digest[:63],
        "kueue.x-k8s.io/queue-name": "team",
        "of/others": "stays",
        **of_run,
    }
    # A service that named its run would be deleted with the run that the gang was taken from.
    assert service_manifest(again, attached)["metadata"]["labels"] == {
        "planish/stage": "train",
        "planish/gang": PLANNED.digest[:63],
    }


def test_a_gang_of_the_other_launcher_makes_way_too(looks):
    cluster, other = Namespace("trainjob"), replace(PLANNED, launcher="trainjob")
    cluster.put(PLANNED)
    assert submit(cluster, other, lambda: None)["kind"] == "TrainJob"
    assert cluster.deleted == [("job", "Foreground")]
    cluster = Namespace("job")
    cluster.put(other)
    assert submit(cluster, PLANNED, lambda: None)["kind"] == "Job"
    assert cluster.deleted == [("trainjob", "Background")]


def test_an_account_that_may_not_see_the_other_kind_has_none_of_it(looks):
    cluster = Namespace()
    cluster.forbidden = "trainjobs"
    assert submit(cluster, PLANNED, lambda: None)["kind"] == "Job"


def test_a_gang_that_is_being_deleted_is_waited_for_and_not_deleted_again(looks, monkeypatch):
    cluster = Namespace()
    cluster.put(replace(PLANNED, work="w2"), deletionTimestamp="2026-01-01T00:00:00Z")

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            cluster.objects.clear()

    monkeypatch.setattr(launch.time, "sleep", sleep)
    assert submit(cluster, PLANNED, lambda: None)["metadata"]["uid"] != "u-earlier"
    assert (cluster.deleted, len(looks)) == ([], 3)


def test_a_service_of_somebody_else_is_refused_and_the_gang_goes(looks):
    cluster = Namespace()
    foreign = {"metadata": {"name": PLANNED.name, "labels": {"app": "theirs"}, "uid": "u-theirs"}}
    cluster.objects["service", PLANNED.name] = foreign
    with pytest.raises(ConfigError, match=r"the service `planish-abab.*must have the label"):
        run_gang(cluster, PLANNED, before=lambda: None)
    assert cluster.objects == {("service", PLANNED.name): foreign}
    assert cluster.deleted == [("job", "Foreground")]


def test_a_service_goes_with_the_gang_before_and_is_made_again(looks, monkeypatch):
    cluster = Namespace()
    before = service_manifest(PLANNED, cluster.put(PLANNED))
    cluster.objects["service", PLANNED.name] = before
    job = {"metadata": {"name": PLANNED.name, "uid": "u-next"}}

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            del cluster.objects["service", PLANNED.name]

    monkeypatch.setattr(launch.time, "sleep", sleep)
    serve(cluster, PLANNED, job)
    made = cluster.objects["service", PLANNED.name]
    assert [each["uid"] for each in made["metadata"]["ownerReferences"]] == ["u-next"]
    serve(cluster, PLANNED, job)
    assert cluster.objects["service", PLANNED.name] is made
    assert len(looks) == 3


def test_pods_that_do_not_end_are_left_to_the_next_attempt(monkeypatch, caplog):
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(launch, "time", fake)
    cluster = Namespace()
    cluster.put(PLANNED)
    cluster.pods = lambda digest: [{"metadata": {"name": "on-a-machine-that-is-off"}}]
    launch.remove(cluster, PLANNED, patience_seconds=5.0)
    assert 120.0 <= now.seconds <= 121.0
    assert "its pods have not ended" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", '{"num_nodes": 4, "sidecar": {}}', '{"nodes": 4}', '"gpu-4x8"']
)
def test_pods_that_another_release_has_compiled_are_told(text):
    with pytest.raises(ConfigError, match=r"must be JSON with .* compile the pipeline with"):
        GangPods.parse(text)
