"""Gangs: their objects, what they have from the pod of the stage, and a server that is away."""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import MaxRetryError

from components.images import GPU_4X8
from components.pod_settings import gang_pods
from planish.base.errors import ClusterError, ConfigError
from planish.run.gang import cluster as module
from planish.run.gang.cluster import GangCluster
from planish.run.gang.manifests import Gang, GangPods, job_manifest, service_manifest

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


def test_the_service_names_the_pods_before_they_are_ready_and_goes_with_the_job():
    job = {"metadata": {"name": GANG.name, "uid": "u2"}}
    service = service_manifest(GANG, job)
    assert service["metadata"]["ownerReferences"][0]["kind"] == "Job"
    assert service["metadata"]["ownerReferences"][0]["uid"] == "u2"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("text", ["x", "[1]", '{"nodes": 4}'])
def test_damaged_settings_of_a_profile_are_refused(text):
    with pytest.raises(ConfigError, match="PLANISH_GANG"):
        GangPods.parse(text)


def test_outside_a_pod_there_is_no_gang(monkeypatch):
    monkeypatch.delenv("POD_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"set `train\.num_nodes=1`"):
        GangCluster.from_pod("job")


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while somebody sleeps."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(module, "time", fake)
    return now


def answer_after(clock, seconds, fault):
    """A call that fails for so long, then answers."""

    def read_namespaced_job(*_, **options):
        assert options["_request_timeout"] == module.REQUEST_SECONDS
        if clock.seconds < seconds:
            raise fault
        headers = {"Content-Type": "application/json"}
        return SimpleNamespace(data=b'{"kind": "Job"}', headers=headers)

    return read_namespaced_job


@pytest.mark.parametrize(
    "fault",
    [MaxRetryError(None, "/"), ApiException(503), ApiException(429), ConnectionResetError()],
)
def test_a_server_that_is_away_for_a_minute_is_asked_again(clock, fault, caplog):
    caplog.set_level(logging.WARNING)
    found = GangCluster(None, "n", "p").call(answer_after(clock, 60.0, fault))
    assert found == {"kind": "Job"}
    assert 60.0 <= clock.seconds <= 60.0 + module.POLL_SECONDS
    assert "API server does not answer" in caplog.text


def test_a_server_that_stays_away_is_given_up_after_its_time(clock):
    cluster = GangCluster(None, "n", "p")
    with pytest.raises(ClusterError, match="within 600 s, got ConnectionResetError") as caught:
        cluster.call(answer_after(clock, 1e9, ConnectionResetError()))
    assert caught.value.status == 0
    assert 590.0 < clock.seconds <= 600.0


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, ConfigError, "must be allowed to read namespaced job"),
        (422, ConfigError, "must accept the gang"),
        (404, ClusterError, "refused read_namespaced_job: 404 gone"),
    ],
)
def test_a_refusal_is_told_at_once(clock, status, kind, words):
    fault = ApiException(status)
    fault.body = json.dumps({"message": "gone"})
    with pytest.raises(kind, match=words):
        GangCluster(None, "n", "p").call(answer_after(clock, 1.0, fault))
    assert clock.seconds == 0


def test_a_server_that_has_just_started_may_forbid_for_a_while(clock):
    """It knows the rules of no account yet; one that goes on forbidding is believed."""
    cluster = GangCluster(None, "n", "p")
    silent = ConnectionResetError()
    calm = answer_after(clock, 10.0, silent)

    def starting(*rest, **options):
        if 3.0 < clock.seconds < 10.0:
            raise ApiException(403)
        return calm(*rest, **options)

    starting.__name__ = calm.__name__
    assert cluster.call(starting) == {"kind": "Job"}
    with pytest.raises(ConfigError, match="must be allowed to read namespaced job"):
        cluster.call(answer_after(clock, 1e9, ApiException(403)))
    assert clock.seconds < 10.0 + module.STARTING_SECONDS + 2 * module.POLL_SECONDS


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
        with client.ApiClient(client.Configuration(host=host)) as connection:
            cluster = GangCluster(connection, "team", "stage")
            job = {"metadata": {"name": "gang", "resourceVersion": "7"}}
            cluster.wait_for_change(job, 60)
    finally:
        server.shutdown()
        server.server_close()
    assert ["resourceVersion=7" in path for path in Forgetful.asked] == [True, False]
