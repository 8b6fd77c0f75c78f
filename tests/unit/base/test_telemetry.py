import io
import logging
import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from planish import store
from planish.base import telemetry
from planish.records import write_set
from tests import pages
from tests.unit.records.samples import random_prompts


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(telemetry, "_series", {})


def samples():
    return pages.samples(telemetry.metrics_text())


def test_names_of_metrics_keep_the_rule_and_are_sorted_and_unique():
    names = [metric.name for metric in telemetry.METRICS]
    assert names == sorted(set(names))
    for metric in telemetry.METRICS:
        assert re.fullmatch(r"planish(_[a-z]+){2,}", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert re.search(
            r"_(seconds|saves|step|groups|slots|tokens_per_second|tokens|ratio|mean|errors|info"
            r"|iteration|entropy|norm|loss|bytes|queue|timeouts|version|phase"
            r"|(bytes|frames|failures|retries|stragglers|groups|tokens|nonfinite|steps|seconds|requests|rows|iterations|passes)_total)$",
            metric.name,
        )
        assert metric.help.endswith(".")


def test_a_counter_adds_up_by_label():
    telemetry.count("planish_store_read_bytes_total", 5, scheme="file")
    telemetry.count("planish_store_read_bytes_total", 7, scheme="file")
    telemetry.count("planish_store_read_bytes_total", 1, scheme="s3")
    found = samples()
    assert found['planish_store_read_bytes_total{scheme="file"}'] == 12
    assert found['planish_store_read_bytes_total{scheme="s3"}'] == 1


def test_a_histogram_counts_durations_at_or_below_each_bound():
    for seconds in (0.005, 0.01, 0.02, 5.0, 9999.0):
        telemetry.observe("planish_records_read_seconds", seconds, schema="rollouts/1")
    name = 'planish_records_read_seconds_bucket{le="%s",schema="rollouts/1"}'
    found = samples()
    assert [found[name % le] for le in ("0.01", "0.03", "3.0", "10.0", "3000.0", "+Inf")] == [
        2, 3, 3, 4, 4, 5,
    ]  # fmt: skip
    assert found['planish_records_read_seconds_count{schema="rollouts/1"}'] == 5
    assert found['planish_records_read_seconds_sum{schema="rollouts/1"}'] == pytest.approx(
        10004.035
    )


def test_sums_of_many_threads_lose_nothing():
    def add():
        for _ in range(1000):
            telemetry.count("planish_store_retries_total", scheme="s3")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples()['planish_store_retries_total{scheme="s3"}'] == 8000


def test_writing_a_set_is_measured(file_root):
    write_set(f"{file_root}/x", random_prompts(), parents={}, attributes={})
    found = samples()
    assert found['planish_records_write_seconds_count{schema="prompts/1"}'] == 1
    sizes = sum(len(store.read(uri)) for uri in store.list_uris(file_root))
    assert found['planish_store_written_bytes_total{scheme="file"}'] == sizes


def test_a_scraper_reads_the_metrics_over_http():
    telemetry.count("planish_store_retries_total", 3, scheme="s3")
    server = telemetry.MetricsServer(0, "127.0.0.1")
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=120) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert 'planish_store_retries_total{scheme="s3"} 3.0' in text
    assert "# TYPE planish_records_read_seconds histogram" in text


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, "saved"),
        (
            {"step": 192, "seconds": 0.8400001, "done": True},
            "saved step=192 seconds=0.84 done=True",
        ),
        ({"uri": "file:///a b", "x": ""}, 'saved uri="file:///a b" x=""'),
        ({"text": 'a="b"\nnext level=ERROR'}, 'saved text="a=\\"b\\"\\nnext level=ERROR"'),
        ({"tiny": 1.23456789e-7}, "saved tiny=1.23457e-07"),
    ],
)
def test_an_event_is_one_line_of_key_value_pairs(facts, line):
    assert telemetry.event("saved", **facts) == line


def test_log_lines_have_time_level_module_and_event():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        telemetry.configure_logging(stream=stream)
        telemetry.configure_logging(stream=stream)
        logging.getLogger("planish.x").info("%s", telemetry.event("saved", step=1))
        logging.getLogger("planish.x").debug("not shown")
    finally:
        root.handlers[:], root.level = before[0], before[1]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ INFO planish.x saved step=1\n", stream.getvalue())


def test_counting_does_not_import_the_prometheus_client():
    code = (
        "import sys; from planish.base import telemetry\n"
        "telemetry.count('planish_store_retries_total', scheme='s3')\n"
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
