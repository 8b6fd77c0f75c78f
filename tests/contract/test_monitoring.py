"""What the monitoring servers load fits together, and fits what the code exports."""

import csv
import itertools
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from planish.base.telemetry import METRICS
from planish.minder.detect.metrics_table import JOB_SELECTOR, PUBLISHED_ORDER
from planish.minder.detect.metrics_table import METRICS as MINDER_METRICS
from planish.minder.service.config import service_settings
from planish.minder.service.own_metrics import OwnMetrics
from tests.golden.write_rules import (
    MONITORING,
    MONITORS,
    RULES,
    TARGET,
    pod_monitors,
    prometheus_rules,
)

DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
RUNBOOK_PARTS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Is it a false alarm?"]
FOREIGN = {"up", "ALERTS", "kube_node_status_condition"}
"""Series of Prometheus itself and of kube-state-metrics."""
EXPORTERS = yaml.safe_load((Path(__file__).parent / "exporter_names.yaml").read_text("utf-8"))
MACHINE_SERIES = {name for exporter in EXPORTERS.values() for name in exporter["names"]}
PAUSE_FRAMES = re.compile(EXPORTERS["node_exporter"]["pattern"])
COUNTERS = MONITORING / "exporters" / "dcgm-counters.csv"
UNITS = {"none", "s", "percent", "percentunit", "ops", "pps", "cps", "Bps", "watt", "GBs"}
PER_METRIC = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"\[[^\[\]]*\]")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_OFFSET = re.compile(r"\boffset\s+\w+")
_FUNCTION = re.compile(r"(?<![\w:])\w+\s*(?=\()")
_NUMBER = re.compile(r"(?<![\w:])\d[\w.]*(-\d+)?")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_WORDS = {"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "group_left", "inf"}


def metric_names(expression: str) -> set[str]:
    """Return the names of the metrics that an expression reads.

    Example:
        >>> sorted(metric_names('sum by (a) (rate(x_total{b="c"}[5m])) / on (a) y:z offset 2h'))
        ['x_total', 'y:z']
    """
    named = re.findall(r'__name__\s*=\s*"([\w:]+)"', expression)
    text = _STRING.sub("", expression)
    for pattern in (_SELECTOR, _RANGE, _OFFSET, _GROUPING):
        text = pattern.sub(" ", text)
    # An aggregation keeps its word when the grouping stands between it and the bracket.
    text = re.sub(r"(?<![\w:])(sum|min|max|avg|count|quantile|topk)\b(?![\w:])", " ", text)
    text = _NUMBER.sub(" ", _FUNCTION.sub(" ", text))
    return set(_NAME.findall(text)) - _WORDS | set(named)


def rules(kind):
    """Yield every rule of a kind, `alert` or `record`."""
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from (rule for rule in group["rules"] if kind in rule)


ALERTS = {rule["alert"]: rule for rule in rules("alert")}
RECORDS = {rule["record"] for rule in rules("record")}


def exported():
    """Return every name that a scraper of our processes may see."""
    names = set()
    for metric in METRICS:
        base = metric.name.removesuffix("_total")
        names |= {base + suffix for suffix in PER_METRIC[metric.kind]}
    for family in OwnMetrics().registry.collect():
        names |= {family.name + suffix for suffix in PER_METRIC[family.type]}
    return names


def unknown(expression):
    known = exported() | RECORDS | FOREIGN | MACHINE_SERIES
    names = metric_names(expression)
    return sorted(n for n in names - known if not PAUSE_FRAMES.fullmatch(n))


def fields(text):
    """Return the fields of a list of counters as dcgm-exporter reads it."""
    rows = [row for row in csv.reader(text.splitlines()) if row]
    assert all(len(row) == 3 for row in rows), rows
    assert {row[1].strip() for row in rows} <= {"gauge", "counter"}
    return {row[0].strip() for row in rows}


def targets(dashboard):
    return [target for panel in dashboard["panels"] for target in panel.get("targets", ())]


def load(path):
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_says_how_bad_it_is_what_it_is_and_where_its_runbook_is(name):
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    # A template is not read as it stands here.
    said = re.sub(r"\{\{.*?\}\}", "", alert["annotations"]["summary"], flags=re.DOTALL)
    assert len(said) < 100
    assert alert["annotations"]["description"].endswith(".")
    assert alert["annotations"]["runbook_url"] == f"monitoring/runbooks/{name}.md"


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_runbook_has_its_five_parts_and_commands(name):
    text = (MONITORING / "runbooks" / f"{name}.md").read_text("utf-8")
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == RUNBOOK_PARTS
    parts = re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]
    assert all(len(part.strip()) > 10 for part in parts)
    commands = re.search(r"```\n(.+?)```", parts[2], re.DOTALL)
    assert commands is not None
    assert commands[1].count("\n") >= 2
    assert re.search(r"^1\. ", parts[3], re.MULTILINE)
    assert re.search(r"^- \[ \] ", parts[4], re.MULTILINE)
    expressions = re.findall(r"promtool query instant \$PROMETHEUS '(.+)'", commands[1])
    server = {"prometheus_engine_query_duration_seconds", "scrape_duration_seconds"}
    found = {name for e in expressions for name in unknown(e)} - server
    assert found == set()


def test_every_runbook_belongs_to_an_alert():
    found = {path.stem for path in (MONITORING / "runbooks").glob("*.md")}
    assert found == ALERTS.keys()


def test_rules_read_only_what_is_exported():
    for rule in [*rules("alert"), *rules("record")]:
        assert unknown(rule["expr"]) == [], rule


def test_a_recording_rule_stands_for_each_of_the_seven_metrics_every_second():
    (group,) = yaml.safe_load((RULES / "machines.yaml").read_text())["groups"]
    names = [rule["record"] for rule in group["rules"]]
    assert names == [f"node:minder_{metric}:1s" for metric in PUBLISHED_ORDER]
    assert group["interval"] == "1s"


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    fires, rests = set(), set()
    for path in (RULES / "tests").glob("*.yaml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", ()):
                (fires if case["exp_alerts"] else rests).add(case["alertname"])
    assert fires == ALERTS.keys()
    assert rests == ALERTS.keys()


@pytest.mark.parametrize("name", MINDER_METRICS)
def test_a_stock_exporter_has_what_the_query_of_a_metric_reads(name):
    assert unknown(MINDER_METRICS[name].series.replace(JOB_SELECTOR, "")) == []


def test_the_counters_of_the_gpu_exporter_hold_what_detects_and_its_own_list():
    text = COUNTERS.read_text("utf-8")
    listed = fields(re.sub("^#.*", "", text, flags=re.MULTILINE))
    standing_by = fields("\n".join(re.findall(r"^# (DCGM_FI_.*)", text, re.MULTILINE)))
    read = {
        name: metric_names(one.series.replace(JOB_SELECTOR, ""))
        for name, one in MINDER_METRICS.items()
        if one.is_gpu
    }
    of_rules = {n for r in rules("record") for n in metric_names(r["expr"]) if n.startswith("DCGM")}
    assert {n for name in PUBLISHED_ORDER for n in read.get(name, ())} == of_rules <= listed
    assert set(EXPORTERS["dcgm-exporter"]["collected"]) <= listed
    assert listed | standing_by >= set().union(*read.values())
    assert listed | standing_by <= set(EXPORTERS["dcgm-exporter"]["names"])
    assert not listed & standing_by


def test_settings_for_infiniband_on_the_page_ask_for_what_its_exporter_has():
    text = (MONITORING / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n(.+?)```", text, re.DOTALL)
    settings = service_settings({"prometheus": {"url": "http://p:9090"}, **tomllib.loads(block)})
    changed = {n for n, one in settings.sources.items() if one != MINDER_METRICS[n]}
    assert changed == {"pfc_tx_packet_rate"}
    source = settings.sources["pfc_tx_packet_rate"]
    assert unknown(source.series.replace(JOB_SELECTOR, "")) == []
    assert (source.kind, source.agg) == ("counter", "sum")


@pytest.mark.parametrize(
    ("series", "mode", "is_kept"),
    [
        ("node_cpu_seconds_total", "idle", True),
        ("node_cpu_seconds_total", "user", False),
        ("node_memory_MemTotal_bytes", "", True),
        ("node_memory_Buffers_bytes", "", False),
        ("node_ethtool_transmitted_prio3_pause", "", True),
        ("node_cpu_guest_seconds_total", "", False),
    ],
)
def test_of_a_machine_only_what_the_monitor_reads_is_scraped(series, mode, is_kept):
    assert bool(re.fullmatch(kept_of_machines(), f"{series};{mode}")) is is_kept


def kept_of_machines():
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    (job,) = (one for one in config["scrape_configs"] if one["job_name"] == "node")
    (rule,) = job["metric_relabel_configs"]
    return rule["regex"]


def test_all_that_is_read_of_machines_is_kept():
    queries = [one.series.replace(JOB_SELECTOR, "") for one in MINDER_METRICS.values()]
    queries += [rule["expr"] for rule in rules("record")]
    read = {name for q in queries for name in metric_names(q) if name.startswith("node_")}
    assert [n for n in sorted(read) if not re.fullmatch(kept_of_machines(), f"{n};")] == []


def test_the_operator_gets_the_same_rules_and_scrapes():
    assert TARGET.read_text("utf-8") == prometheus_rules()
    assert MONITORS.read_text("utf-8") == pod_monitors()


def test_with_and_without_the_operator_machines_and_jobs_are_labelled_alike():
    monitors = {
        one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"][0]
        for one in yaml.safe_load_all(MONITORS.read_text("utf-8"))
    }
    assert set(monitors) == {
        f"planish-{name}" for name in ("minder", "node", "dcgm", "planish", "planish-rank")
    }
    for name, endpoint in monitors.items():
        labels = {
            rule["targetLabel"]: rule for rule in endpoint["relabelings"] if "targetLabel" in rule
        }
        assert labels["job"]["replacement"] == name.removeprefix("planish-")
        if name in ("planish-node", "planish-dcgm"):
            assert labels["node"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
            assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("1s", "1s")
    assert monitors["planish-minder"]["honorLabels"] is True


def test_alertmanager_groups_by_job_and_holds_back_what_another_alert_explains():
    config = yaml.safe_load((MONITORING / "alertmanager.yaml").read_text())
    assert config["route"]["group_by"] == ["alertname", "cluster", "job_name"]
    receivers = {receiver["name"] for receiver in config["receivers"]}
    routes = [config["route"], *config["route"]["routes"]]
    assert {route["receiver"] for route in routes} == receivers
    matchers = [
        matcher
        for rule in config["inhibit_rules"]
        for side in ("source_matchers", "target_matchers")
        for matcher in rule[side]
    ]
    for value in (re.fullmatch(r'alertname=~?"(.+)"', matcher) for matcher in matchers):
        for name in value[1].split("|") if value else ():
            assert name in ALERTS.keys() | {"KubeNodeNotReady"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_unique_panels_that_do_not_overlap(path):
    dashboard = load(path)
    assert dashboard["uid"].startswith("planish-")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        mine = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & mine, panel["title"]
        cells |= mine
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_refers_only_to_what_there_is(path):
    text = path.read_text("utf-8")
    dashboard = json.loads(text)
    (source,) = dashboard["__inputs"]
    assert source["name"] == "DS_PROMETHEUS"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    if dashboard["uid"] == "planish-minder":
        assert {"job", "node"} <= variables
    assert set(re.findall(r'"uid": "(\$[^"]+)"', text)) == {"${DS_PROMETHEUS}"}
    expressions = [target["expr"] for target in targets(dashboard)]
    used = set(re.findall(r"\$(\w+)", " ".join(expressions)))
    repeats = {panel["repeat"] for panel in dashboard["panels"] if "repeat" in panel}
    assert used | repeats == variables
    notes = [note["expr"] for note in dashboard["annotations"]["list"]]
    assert notes
    for expression in [*expressions, *notes]:
        assert unknown(expression) == [], expression
    for variable in dashboard["templating"]["list"]:
        series = re.fullmatch(r"label_values\(([\w:]+)(\{.+\})?, \w+\)", variable["definition"])
        assert series is not None
        assert series[1] in exported() | RECORDS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_a_unit_a_description_and_a_query(path):
    types = {required["id"] for required in load(path)["__requires"]}
    for panel in load(path)["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["type"] in types
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]


def test_the_readme_names_every_metric_that_stages_export():
    text = (MONITORING / "README.md").read_text("utf-8")
    for metric in METRICS:
        part = metric.name.removeprefix("planish_checkpoint_")
        assert f"`{metric.name}`" in text or f"`{part}`" in text, metric.name
