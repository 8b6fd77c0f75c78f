"""A running service in front of a Prometheus that fails in every way that a server can."""

import json
import time
import urllib.parse

import pytest

from tests.integration.minder_service import Served, raw_settings, serving
from tests.integration.waiting import wait_for
from tests.servers.scripted_http import Reply, ScriptedServer

pytestmark = [pytest.mark.server, pytest.mark.slow]

MACHINES = tuple(f"node-{i}" for i in range(6))


def healthy(request):
    """Answer as a Prometheus with six machines that are all alike."""
    query = urllib.parse.urlsplit(request.path).query or request.body.decode()
    fields = dict(urllib.parse.parse_qsl(query))
    if request.path.startswith("/api/v1/query?"):
        now = time.time()
        return Reply.of(
            {"status": "success", "data": {"resultType": "scalar", "result": [now, str(now)]}}
        )
    ts = range(int(fields["start"]), int(fields["end"]) + 1)
    is_reset = "resets(" in fields["query"]
    result = [
        {"metric": {"node": name},
         "values": [[t, f"{0.5 + (t * (i + 7)) % 10 / 1000}"] for t in ts]}
        for i, name in enumerate(MACHINES)
    ]  # fmt: skip
    return Reply.of(
        {"status": "success",
         "data": {"resultType": "matrix", "result": [] if is_reset else result}}
    )  # fmt: skip


@pytest.fixture
def scripted():
    server = ScriptedServer(healthy)
    yield server
    server.close()


@pytest.fixture
def served(scripted, tmp_path):
    raw = raw_settings(
        tmp_path,
        scripted.url,
        MACHINES,
        prometheus={"timeout_seconds": 1.0},
        service={"call_timeout_seconds": 2.0},
        server={"min_backoff_seconds": 0.1, "max_backoff_seconds": 0.5},
    )
    one: Served = serving(tmp_path, raw)
    yield one
    one.kill()


def errors(served, code):
    return served.metric(f'minder_prometheus_errors_total{{code="{code}"}}') or 0.0


def calls(served, outcome):
    return served.metric(f'minder_calls_total{{job_name="job",outcome="{outcome}"}}') or 0.0


def test_every_failure_is_counted_the_service_lives_and_goes_on(served, scripted):
    wait_for(lambda: calls(served, "ok") >= 1, 90, lambda: served.log)
    whole = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}})
    failures = {
        "500": Reply(500),
        "503": Reply.of({"status": "error", "error": "busy"}, status=503),
        "422": Reply.of({"status": "error", "error": "too many samples"}, status=422),
        "401": Reply(401),
        "403": Reply(403),
        "invalid": Reply(body=b"<html>"),
        "timeout": Reply(body=whole.encode(), delay_seconds=3.0),
    }
    for code, reply in failures.items():
        before, failed = errors(served, code), calls(served, "error")
        scripted.answer = lambda request, reply=reply: reply
        wait_for(lambda c=code, b=before: errors(served, c) > b, 15, lambda: served.log)
        wait_for(lambda b=failed: calls(served, "error") > b, 15, lambda: served.log)
        assert served.get("/healthz")[0] == 200
    scripted.answer = lambda request: Reply(body=whole.encode() * 9, cut_bytes=70)
    before = errors(served, "invalid") + errors(served, "connection")
    wait_for(lambda: errors(served, "invalid") + errors(served, "connection") > before, 15)
    scripted.answer = healthy
    before = calls(served, "ok")
    wait_for(lambda: calls(served, "ok") > before + 1, 15, lambda: served.log)
    assert "alert state=firing" not in served.log

    def empty(request):
        answer = healthy(request)
        return answer if request.path.startswith("/api/v1/query?") else Reply(body=whole.encode())

    scripted.answer = empty
    wait_for(lambda: calls(served, "skipped") >= 1, 90, lambda: served.log)
    assert "Traceback" not in served.log


@pytest.mark.parametrize("drip", [0.05, 0.0])
def test_sigterm_ends_the_service_in_time_whatever_prometheus_does(served, scripted, drip):
    wait_for(lambda: calls(served, "ok") >= 1, 90, lambda: served.log)
    slow = {"drip_seconds": drip} if drip else {"delay_seconds": 30.0}
    scripted.answer = lambda request: Reply(body=b" " * 10_000, **slow)
    scripted.requests.clear()
    wait_for(lambda: scripted.requests, 10)
    code, seconds = served.terminate()
    assert (code, seconds < 10) == (0, True)
