"""Queries, answers and failures of Prometheus, without one."""

import json
import threading
import urllib.parse
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

from planish.base.errors import BackendUnavailable, ConfigError
from planish.minder.act.alerts import Alert
from planish.minder.detect.metrics_table import METRICS, Metric
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import Prometheus, PrometheusConfig, check_source, queries_of
from tests.servers.scripted_http import Reply, ScriptedServer

GOLDEN = {
    "status": "success",
    "warnings": ["a block is corrupt"],
    "infos": ["not a counter"],
    "data": {
        "resultType": "matrix",
        "result": [
            {
                "metric": {"__name__": "m", "node": "n1"},
                "values": [[100, "1.5"], [101.000, "NaN"], [102.25, "+Inf"], [103, "-Inf"]],
            },
            {"metric": {"node": "n2"}, "values": [[100, "1e300"]]},
        ],
    },
}


@pytest.fixture
def scripted():
    server = ScriptedServer(lambda request: Reply.of(GOLDEN))
    yield server
    server.close()


def asked(scripted, **config):
    return Prometheus(PrometheusConfig(url=scripted.url, timeout_seconds=60.0, **config))


def failure(prometheus, seconds=60.0):
    codes = []
    prometheus.on_error = codes.append
    with pytest.raises(BackendUnavailable) as caught:
        prometheus.query_range("m", 100, 104, Deadline.after(seconds))
    assert codes == [caught.value.code]
    return caught.value


def test_an_answer_is_read_as_times_and_numbers_with_their_oddities(scripted, caplog):
    prometheus, codes = asked(scripted), []
    prometheus.on_error = codes.append
    first, second = prometheus.query_range("m", 100, 104, Deadline.after(60))
    assert first.labels == {"__name__": "m", "node": "n1"}
    assert first.ts.tolist() == [100.0, 101.0, 102.25, 103.0]
    np.testing.assert_array_equal(first.values, [1.5, np.nan, np.inf, -np.inf])
    assert second.values.tolist() == [1e300]
    assert [record.args for record in caplog.records] == [
        ("warnings", "a block is corrupt"),
        ("infos", "not a counter"),
    ]
    assert codes == []


def test_a_short_query_is_got_and_a_long_one_posted(scripted):
    prometheus = asked(scripted)
    prometheus.query_range("up", 100, 1001, Deadline.after(60))
    prometheus.query_range("up + " * 500 + "up", 100, 1001, Deadline.after(60))
    get, post = scripted.requests
    assert (get.method, post.method) == ("GET", "POST")
    fields = dict(urllib.parse.parse_qsl(get.path.partition("?")[2]))
    # Points at both ends of the range are given: [start, end) of seconds ends a second earlier.
    assert {**fields, "timeout": ""} == {
        "query": "up", "start": "100", "end": "1000", "step": "1s", "timeout": "",
    }  # fmt: skip
    assert post.path == "/api/v1/query_range"
    assert dict(urllib.parse.parse_qsl(post.body.decode()))["query"].startswith("up + up")


def test_no_answer_holds_more_than_11000_points_of_a_series(scripted):
    asked(scripted).query_range("m", 0, 30_000, Deadline.after(60))
    spans = [
        (int(f["start"]), int(f["end"]))
        for f in (dict(urllib.parse.parse_qsl(r.path.partition("?")[2])) for r in scripted.requests)
    ]
    assert spans == [(0, 10_999), (11_000, 21_999), (22_000, 29_999)]
    scripted.requests.clear()
    asked(scripted, max_samples=1000).query_range("m", 0, 900, Deadline.after(60), series=4)
    assert len(scripted.requests) == 4


@pytest.mark.parametrize(
    ("limit", "series", "seconds", "spans"),
    [
        (50_000_000, 400 * 192, 900, 7),
        (9_000_000, 400 * 192, 900, 14),
        (4_000_000, 400 * 192, 900, 29),
        (100_000, 1000, 100, 1),
        (99_999, 1000, 100, 2),
        (2_000, 1000, 8, 4),
    ],
)
def test_what_a_server_refuses_as_too_large_is_asked_for_in_halves_from_then_on(
    scripted, limit, series, seconds, spans
):
    taken = []

    def answer(request):
        fields = dict(urllib.parse.parse_qsl(request.path.partition("?")[2]))
        low, high = int(fields["start"]), int(fields["end"])
        if series * (high + 1 - low) > limit:
            return Reply.of({"status": "error", "error": "too many samples"}, status=422)
        taken.append((low, high))
        return Reply.of({"status": "success", "data": {"resultType": "matrix", "result": []}})

    scripted.answer = answer
    prometheus = asked(scripted)
    prometheus.query_range("m", 0, seconds, Deadline.after(60), series=series)
    assert len(taken) == spans
    assert [low for low, _ in taken] == [0, *(high + 1 for _, high in taken[:-1])]
    assert taken[-1][1] == seconds - 1
    refused = len(scripted.requests) - spans
    prometheus.query_range("m", 0, seconds, Deadline.after(60), series=series)
    assert len(scripted.requests) == 2 * spans + refused


def test_a_query_that_is_refused_however_short_it_is_makes_no_other_one_shorter(scripted):
    error = {"status": "error", "error": "many-to-many matching not allowed"}
    bad = Reply.of(error, status=422)
    scripted.answer = lambda request: bad if "bad" in request.path else Reply.of(GOLDEN)
    prometheus = asked(scripted)
    with pytest.raises(BackendUnavailable, match="many-to-many"):
        prometheus.query_range("bad", 0, 900, Deadline.after(60), series=2000)
    assert len(scripted.requests) == 10
    scripted.requests.clear()
    prometheus.query_range("good", 0, 900, Deadline.after(60), series=2000)
    assert len(scripted.requests) == 1


def test_token_tenant_and_prefix_are_sent(scripted, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    config = {"bearer_token_file": str(tmp_path / "token"), "headers": {"X-Scope-OrgID": "team"}}
    prometheus = Prometheus(PrometheusConfig(url=f"{scripted.url}/prefix/", **config))
    prometheus.query_range("m", 0, 2, Deadline.after(60))
    (tmp_path / "token").write_text("renewed")
    prometheus.query_range("m", 0, 2, Deadline.after(60))
    first, second = scripted.requests
    assert first.path.startswith("/prefix/api/v1/query_range?")
    assert first.headers["Authorization"] == "Bearer s3cret"
    assert second.headers["Authorization"] == "Bearer renewed"
    assert first.headers["X-Scope-OrgID"] == "team"


@pytest.mark.parametrize("status", [400, 401, 403, 422, 500, 502, 503])
def test_an_error_is_told_with_its_status(scripted, status):
    body = {"status": "error", "errorType": "execution", "error": "query timed out"}
    scripted.answer = lambda request: Reply.of(body, status=status)
    error = failure(asked(scripted))
    assert error.code == str(status)
    assert "query timed out" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>proxy</html>",
        b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{}',
        b'{"status":"success","data":{"resultType":"vector","result":[]}}',
        b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1]]}]}}',
        b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":[],"values":[[1,"x"]]}]}}',
        b'{"status":"error"}',
        b"[]",
        b"",
    ],
)
def test_what_is_no_matrix_is_refused(scripted, body):
    scripted.answer = lambda request: Reply(body=body)
    assert failure(asked(scripted)).code == "invalid"


def test_a_body_that_ends_too_soon_is_refused(scripted):
    whole = json.dumps(GOLDEN).encode()
    scripted.answer = lambda request: Reply(body=whole, cut_bytes=50)
    assert failure(asked(scripted)).code in ("invalid", "connection")


@pytest.mark.parametrize("how", [{"delay_seconds": 3.0}, {"drip_seconds": 0.1}])
def test_a_slow_server_is_given_up_in_time(scripted, how):
    scripted.answer = lambda request: Reply(body=json.dumps(GOLDEN).encode(), **how)
    assert failure(asked(scripted), seconds=0.5).code == "timeout"


def test_a_server_that_is_not_there_is_told_as_such():
    gone = ScriptedServer()
    gone.close()
    assert failure(asked(gone)).code == "connection"


def test_a_stopped_program_asks_nothing_more(scripted):
    stop = threading.Event()
    stop.set()
    with pytest.raises(BackendUnavailable, match="stopped"):
        asked(scripted).now(Deadline.after(60, stop))
    assert scripted.requests == []


def test_the_time_is_that_of_the_server(scripted):
    answer = {"status": "success", "data": {"resultType": "scalar", "result": [5.5, "5.5"]}}
    scripted.answer = lambda request: Reply.of(answer)
    assert asked(scripted).now(Deadline.after(60)) == 5.5
    scripted.answer = lambda request: Reply.of({"status": "success", "data": {}})
    with pytest.raises(BackendUnavailable, match="must give a number"):
        asked(scripted).now(Deadline.after(60))


def test_queries_choose_machines_aggregate_devices_and_read_counters_as_rates():
    gauge = queries_of(METRICS["gpu_duty_cycle"], ["n1", "n2.x"], ("job", "instance"), 5)
    by, selector = "by (node, job, instance)", 'DCGM_FI_DEV_GPU_UTIL{node=~"n1|n2\\\\.x"}'
    assert gauge.values == f"avg {by} (({selector}))"
    assert gauge.seen == f"max {by} (count_over_time({selector}[1s]))"
    assert gauge.resets == ""
    counter = queries_of(METRICS["pfc_tx_packet_rate"], ["n1"], (), 20)
    selector = 'node_ethtool_transmitted_prio3_pause{node=~"n1"}'
    assert counter.values == f"sum by (node) (rate({selector}[20s]))"
    assert counter.resets == f"sum by (node) (resets({selector}[20s])) > 0"
    spread = Metric("m", "1", None, "m{$job_selector}", agg="spread")
    assert queries_of(spread, ["a"], (), 5).values == (
        'max by (node) ((m{node=~"a"})) - min by (node) ((m{node=~"a"}))'
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"series": "node_load1"}, "promql.*must hold"),
        ({"series": "m{$job_selector} * 2", "kind": "counter"}, "one series and nothing else"),
        ({"node_regex": "([^:]+"}, "node_regex"),
        ({"node_regex": ".*"}, "one group"),
    ],
)
def test_a_query_that_can_not_be_right_is_refused_by_its_key(change, message):
    metric = Metric("m", "1", None, **{"series": "m{$job_selector}", **change})
    with pytest.raises(ConfigError, match=message) as caught:
        check_source(metric, "metrics.m")
    assert "metrics.m." in str(caught.value)


def test_a_label_with_a_port_names_the_machine_without_it():
    source = Metric(
        "m", "1", None, "m{$job_selector}", node_label="instance", node_regex=r"([^:]+)(:\d+)?"
    )
    assert [source.machine_of(x) for x in ("n1:9100", "n1", "")] == ["n1", "n1", ""]
    assert 'instance=~"(?:n1)(?:[:./].*)?"' in queries_of(source, ["n1"], (), 5).values


ALERT = Alert("0f", "team/job", "node-3", "dissimilar", "cpu_usage", 1000.0, 1300.0)


@pytest.fixture
def silences():
    server = ScriptedServer(lambda request: Reply(body=b"[]"))
    yield server
    server.close()


def manager(scripted, **config):
    return Alertmanager(AlertmanagerConfig(url=scripted.url, cluster="c1", **config))


def soon():
    return Deadline.after(60)


def test_the_question_names_the_labels_of_the_rule_and_any_silence_counts(silences):
    found = [{"status": {"silencedBy": ids}} for ids in ([], ["s1", "s2"])]
    silences.answer = lambda request: Reply.of(found)
    assert manager(silences).silence(ALERT, soon()) == "s1"
    (request,) = silences.requests
    asked = [value for name, value in parse_qsl(urlsplit(request.path).query) if name == "filter"]
    assert asked == [
        'alertname="MinderFaultyMachine"', 'job_name="team/job"', 'node="node-3"', 'cluster="c1"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [Reply(500), Reply(body=b"no"), Reply.of([{"id": 1}]), Reply.of({}, status=403),
     Reply.of([{"status": {"silencedBy": None}}])],
)  # fmt: skip
def test_silences_that_can_not_be_told_are_an_error_and_not_none(silences, reply):
    silences.answer = lambda request: reply
    with pytest.raises(BackendUnavailable):
        manager(silences).silence(ALERT, soon())
