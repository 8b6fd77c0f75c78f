"""Requests that a server of ours refuses or fails: what a real one can not be made to do."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from planish.base.errors import ClusterError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, KubernetesConfig
from planish.minder.act.drain import Evictions, change_node, evict_round
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.detect.result import Result

POD = PodInfo("p", "team", "u", "n1", "job", "Running")


class FakeServer:
    """Answers each request with the next of the statuses; the last one for ever."""

    def __init__(self, folder):
        self.statuses = [200]
        self.headers = {}
        self.requests = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                length = int(self.headers.get("Content-Length", 0))
                fake.requests.append((self.command, self.path, self.rfile.read(length)))
                status = fake.statuses.pop(0) if len(fake.statuses) > 1 else fake.statuses[0]
                body = json.dumps({"metadata": {"name": "n1"}}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                for name, value in fake.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PATCH = answer

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        address = {"server": f"http://127.0.0.1:{self.server.server_port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": address}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "u"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        self.cluster = Cluster.connect(KubernetesConfig(kubeconfig=str(path)))
        self.cluster.kube.request_seconds = 60.0

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def fake(tmp_path):
    server = FakeServer(tmp_path)
    yield server
    server.stop()


def round_at(fake, state, now):
    return evict_round(fake.cluster, [POD], state, now)


def test_a_budget_is_asked_again_after_5_10_20_40_and_60_seconds_until_15_minutes(fake):
    fake.statuses = [429]
    state, asked = Evictions(), []
    for second in range(1000):
        before = len(fake.requests)
        done = round_at(fake, state, float(second))
        if len(fake.requests) > before:
            asked.append(second)
        if done.given_up:
            break
        assert done.num_waiting == 1
    assert asked == [0, 5, 15, 35, *range(75, 916, 60)]
    assert second == 915
    assert (state.given_up, state.attempts) == ({"u"}, {})
    # Given up for good.
    assert round_at(fake, state, 5000.0).num_waiting == 0
    assert len(fake.requests) == len(asked)


def test_the_server_may_ask_for_a_longer_pause_up_to_a_minute(fake):
    fake.statuses, fake.headers = [429], {"Retry-After": "30"}
    state = Evictions()
    round_at(fake, state, 0.0)
    assert state.attempts["u"].due == 30.0
    fake.headers = {"Retry-After": "4000"}
    round_at(fake, state, 30.0)
    assert state.attempts["u"].due == 90.0


@pytest.mark.parametrize("status", [404, 409])
def test_a_pod_that_is_gone_or_another_one_is_done(fake, status):
    fake.statuses = [status]
    done = round_at(fake, Evictions(), 0.0)
    assert (done.evicted, done.given_up, done.num_waiting) == ([], [], 0)


@pytest.mark.parametrize(
    ("statuses", "tries"), [([409, 409, 200], 3), ([409, 409, 409, 200], 3), ([500], 1)]
)
def test_a_patch_is_tried_three_times_against_others(fake, statuses, tries):
    node = NodeInfo("n1", "u", "1")
    answers = []
    for status in statuses:
        answers += [status, 200] if status == 409 else [status]
    fake.statuses = answers

    def ask():
        return change_node(fake.cluster, node, lambda _: {"spec": {}})

    if statuses[-1] == 200 and len(statuses) <= 3:
        assert ask()
    else:
        with pytest.raises(ClusterError):
            ask()
    assert sum(method == "PATCH" for method, _, _ in fake.requests) == tries


def test_a_server_that_fails_is_told_once_and_nothing_is_done(fake):
    actor = Actor(fake.cluster, ActConfig(mode="evict", dry_run=False))
    alert = Alert("a", "team/job", "n1", "dissimilar", "cpu_usage", 500.0, 900.0)
    result = Result("team/job", "fault", 0, 1000, 4, "default", 1.35, "euclidean")
    fake.statuses = [503]
    outcomes = [actor.handle(alert, result, 1000 + second) for second in range(3)]
    assert [(one.result, one.has_changed) for one in outcomes] == [
        *(("failed", True), ("failed", False), ("failed", False)),
    ]
    assert {method for method, _, _ in fake.requests} == {"GET"}
