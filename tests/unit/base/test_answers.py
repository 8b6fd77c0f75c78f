"""Every client of a network before servers that are slow, endless, or fail for a moment."""

import kubernetes.client
import pytest

from planish.base.answers import bounded
from planish.base.errors import (
    EXIT_TRANSIENT,
    BackendUnavailable,
    ClusterError,
    ConfigError,
    StoreUnavailable,
    exit_code,
)
from planish.minder.act.alerts import Alert
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import Prometheus, PrometheusConfig
from planish.run import kubeflow
from planish.run.gang.cluster import GangCluster
from planish.run.kube import Kube
from planish.run.kubeflow import KfpRuns, KubeflowRun
from planish.stages.report import webhook
from planish.store import sources
from planish.store.sources import Source, download
from planish.submit import server as submit_server
from tests.servers.scripted_http import Reply, ScriptedServer

SECONDS = 30.0


@pytest.fixture
def server(monkeypatch, request):
    # A loaded machine may be late with any other answer than the slow ones.
    seconds = 0.05 if "slow" in request.fixturenames else SECONDS
    monkeypatch.setattr(kubeflow, "REQUEST_SECONDS", seconds)
    monkeypatch.setattr(kubeflow, "WRITE_SECONDS", seconds)
    monkeypatch.setattr(submit_server, "TIMEOUT_SECONDS", seconds)
    monkeypatch.setattr(sources, "WEB_TIMEOUT_SECONDS", seconds)
    monkeypatch.setattr(webhook, "LIMIT_SECONDS", seconds)
    monkeypatch.setattr(f"{__name__}.SECONDS", seconds)
    server = ScriptedServer()
    yield server
    server.close()


def kube_settings(server):
    settings = kubernetes.client.Configuration(host=server.url)
    settings.retries = False
    return settings


def read_pod(server):
    kube = Kube(kube_settings(server), "ns", patience_seconds=0, request_seconds=SECONDS)
    return kube.call(kube.core.read_namespaced_pod, "pod", "ns")


def create_job(server):
    cluster = GangCluster(kube_settings(server), "ns", "pod", patience_seconds=0)
    cluster.request_seconds = SECONDS
    return cluster.create_job({"kind": "Job"})


def patch_of_the_monitor(server):
    kube = Kube(kube_settings(server), patience_seconds=0, request_seconds=SECONDS)
    return kube.call(kube.core.patch_node, "node", {"spec": {"unschedulable": True}})


def query(server):
    config = PrometheusConfig(url=server.url, timeout_seconds=SECONDS)
    return Prometheus(config).now(Deadline.after(SECONDS))


def silence(server):
    alert = Alert("0" * 16, "job", "machine", "machine", "metric", 0.0, 1.0)
    config = AlertmanagerConfig(url=server.url)
    return Alertmanager(config).silence(alert, Deadline.after(SECONDS))


FACTS = KubeflowRun("e", {}, "", "")
CLIENTS = {
    "kubernetes": (read_pod, ClusterError),
    "gang launcher": (create_job, ClusterError),
    "monitoring actor": (patch_of_the_monitor, ClusterError),
    "kubeflow": (lambda s: KfpRuns(s.url).facts("run"), ClusterError),
    "kubeflow find": (lambda s: KfpRuns(s.url).find("run", "e"), ClusterError),
    "kubeflow create": (lambda s: KfpRuns(s.url).create("run", FACTS), ClusterError),
    "kubeflow connect": (lambda s: submit_server.connect(s.url), ClusterError),
    "prometheus": (query, BackendUnavailable),
    "alertmanager": (silence, BackendUnavailable),
    "web": (
        lambda s: download(Source("https", s.url, sha256="0" * 64), s.target, key="model.path"),
        StoreUnavailable,
    ),
}
SLOW = {
    "head": {"drips_head": True, "drip_seconds": 0.02},
    "body": {"body": b" " * 2000, "drip_seconds": 0.02},
}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("name", CLIENTS)
def test_an_answer_that_trickles_is_given_up(server, tmp_path, name, slow):
    ask, error = CLIENTS[name]
    if (name, slow) == ("web", "head"):
        pytest.skip("httpx counts its time anew for each byte of a head")
    server.target = tmp_path / "file"
    server.answer = lambda _: Reply(**SLOW[slow])
    with pytest.raises(error) as raised:
        ask(server)
    assert exit_code(raised.value) == EXIT_TRANSIENT


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_that_fails_for_a_moment_may_be_asked_again(server, tmp_path, name, status):
    ask, error = CLIENTS[name]
    server.target = tmp_path / "file"
    server.answer = lambda _: Reply(status, b"<html>busy")
    with pytest.raises(error) as raised:
        ask(server)
    assert exit_code(raised.value) == EXIT_TRANSIENT


@pytest.mark.parametrize("status", [400, 401, 403, 404])
@pytest.mark.parametrize("name", ["kubeflow", "kubeflow find", "kubeflow create", "web"])
def test_what_stays_so_is_told_for_good(server, tmp_path, name, status):
    server.target = tmp_path / "file"
    server.answer = lambda _: Reply(status, b'{"error": "no"}')
    with pytest.raises(ConfigError, match=str(status)):
        CLIENTS[name][0](server)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("name", ["kubernetes", "kubeflow", "prometheus", "alertmanager"])
def test_an_answer_without_an_end_is_not_kept(server, name, status):
    server.answer = lambda _: Reply(status, endless_mib=512)
    ask, error = CLIENTS[name]
    with pytest.raises(error):
        ask(server)
    # Some clients ask again; what each answer sends beyond the bound lies in buffers of sockets.
    assert server.sent_mib < 400 * len(server.requests)


@pytest.mark.parametrize("slow", SLOW)
def test_a_webhook_that_trickles_holds_up_no_report(server, slow):
    server.answer = lambda _: Reply(**SLOW[slow])
    assert webhook.post(server.url, {"text": "done"}) == (slow == "body")
    assert webhook.post("", {}) is False


@pytest.mark.parametrize("slow", SLOW)
def test_the_client_below_a_tracker_keeps_to_the_same_bounds(server, slow):
    requests = pytest.importorskip("requests", reason="needs the extra trackers")
    server.answer = lambda _: Reply(**SLOW[slow])
    with bounded(SECONDS), pytest.raises(OSError, match="timed out"):
        requests.get(server.url, timeout=60)
