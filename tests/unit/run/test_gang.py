"""Gangs: their objects, what they have from the pod of the stage, and a server that is away."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from components.images import GPU_4X8
from components.pod_settings import gang_pods
from planish.base.errors import ConfigError
from planish.run.gang import cluster as module
from planish.run.gang.cluster import GangCluster
from planish.run.gang.manifests import Gang, GangPods, job_manifest

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
    pods = GangPods.parse(json.dumps(gang_pods(GPU_4X8.stages["train"], GPU_4X8.num_nodes)))
    assert (pods.num_nodes, pods.gpus) == (4, 8)
    gang = Gang("ab" * 32, 4, 8, ("m",), pods=pods, queue="team")
    job = job_manifest(gang, POD)
    assert job["spec"]["suspend"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "1200Gi", "nvidia.com/gpu": "8"}
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert [each["name"] for each in spec["volumes"]] == ["cache", "shm", "scratch"]
    assert {each["mountPath"] for each in container["volumeMounts"]} == {
        *("/cache", "/dev/shm", "/scratch"),
    }
    variables = {each["name"]: each.get("value") for each in container["env"]}
    # A claim with models stays where models are fetched to.
    assert variables["HF_HOME"] == "/cache/huggingface"
    assert variables["TRITON_CACHE_DIR"] == "/scratch/triton"


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
