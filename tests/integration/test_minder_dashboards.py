"""Every query of every dashboard gives something, asked of a real Prometheus with data in it."""

import itertools
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml

from planish.base.telemetry import METRICS
from planish.minder.detect.metrics_table import PUBLISHED_ORDER
from planish.minder.service.own_metrics import BUCKETS, COUNTERS, GAUGES
from tests.golden.write_rules import MONITORING, RULES
from tests.servers.run_prometheus import PrometheusServer, require_prometheus

pytestmark = pytest.mark.server

STEP = 15
SECONDS = 7200
LABELS = {
    "job_name": ("team/pretrain",),
    "namespace": ("team",),
    "run_id": ("7f3a",),
    "node": tuple(f"node-{n}" for n in range(6)),
    "metric": PUBLISHED_ORDER,
    "stage": ("pull", "total", "train", "rollout"),
    "outcome": ("ok", "fault"),
    "fate": ("mixed", "all_wrong"),
    "part": ("policy", "critic"),
    "kind": ("dissimilar",),
}
"""Label to the values that it gets; any other has one value."""
CHOSEN = {"metric": "cpu_usage", "job": "team/pretrain"}
"""Variable to what is chosen in it; the others show everything."""
QUERIES = [
    (path.stem, panel["title"], target["expr"], bool(target.get("instant")))
    for path in sorted((MONITORING / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text("utf-8"))["panels"]
    for target in panel.get("targets", ())
]


def shapes():
    """Yield name, kind and labels of all metrics, ours and those that rules make of them."""
    for metric in METRICS:
        labels = ("job", "instance", "namespace", "run_id", *metric.labels)
        yield metric.name.removesuffix("_total"), metric.kind, labels
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, (_, labels) in table.items():
            yield f"minder_{name}", kind, ("job", *labels)
    yield "minder_call_duration_seconds", "histogram", ("job", "stage")
    for path in RULES.glob("*.yaml"):
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            for rule in (rule for rule in group["rules"] if "record" in rule):
                is_machine = rule["record"].startswith("node:")
                labels = ("node",) if is_machine else ("namespace", "run_id")
                yield rule["record"], "gauge", labels
    yield "ALERTS", "gauge", ("alertname", "alertstate")


def value(label):
    """Return what a label that has but one value is set to."""
    return "firing" if label == "alertstate" else f"a-{label}"


OTHER = 'job_name="team/other",namespace="team",node="elsewhere",kind="dissimilar"'
"""A faulty machine of another job, with a value unlike those of the job that is chosen."""


def series():
    """Yield every series as (text, value at the start, growth per sample)."""
    yield f"minder_machine_faulty{{{OTHER}}}", 1.0, 0.0
    yield 'node:minder_cpu_usage:1s{node="elsewhere"}', 99.0, 0.0
    yield f'ALERTS{{alertname="MinderFaultyMachine",alertstate="firing",{OTHER}}}', 1.0, 0.0
    for name, kind, labels in shapes():
        choices = [LABELS.get(label, (value(label),)) for label in labels]
        if name == "planish_stage_info":
            # a process works on one stage
            choices[labels.index("stage")] = ("train",)
        if name == "ALERTS":
            choices[0] = ("MinderFaultyMachine", "PlanishNonFinite")
        for number, values in enumerate(itertools.product(*choices)):
            pairs = [f'{k}="{v}"' for k, v in zip(labels, values, strict=True)]
            if kind == "histogram":
                bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
                for place, bound in enumerate(bounds):
                    text = ",".join([*pairs, f'le="{bound}"'])
                    yield f"{name}_bucket{{{text}}}", 0.0, 1.0 + place
                continue
            suffix = "_total" if kind == "counter" else ""
            growth = 1.0 + number if kind == "counter" else 0.0
            yield f"{name}{suffix}{{{','.join(pairs)}}}", 1.0, growth


def samples(end):
    for text, first, growth in series():
        for number in range(SECONDS // STEP):
            at = end - SECONDS + number * STEP
            yield f"{text} {first + growth * number} {at}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    require_prometheus()
    end = int(time.time()) // STEP * STEP
    found = PrometheusServer(tmp_path_factory.mktemp("dashboards"))
    found.backfill(samples(end))
    found.start()
    yield found.url, end - STEP
    found.stop()


def ask(url, path, **options):
    """Return the data of an answer; what Prometheus does not take is an error with its reason."""
    asked = urllib.parse.urlencode(options, doseq=True)
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{asked}", timeout=20) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{options}: {error.read().decode()}") from None


def chosen(expression):
    return re.sub(r"\$(\w+)", lambda found: CHOSEN.get(found[1], ".*"), expression)


@pytest.mark.parametrize(
    ("board", "title", "expression", "is_instant"),
    QUERIES,
    ids=[f"{board}-{number}-{title}" for number, (board, title, *_) in enumerate(QUERIES)],
)
def test_a_panel_shows_something(server, board, title, expression, is_instant):
    url, end = server
    query = chosen(expression)
    if is_instant:
        found = ask(url, "query", query=query, time=end)["result"]
        values = [float(one["value"][1]) for one in found]
    else:
        data = ask(url, "query_range", query=query, start=end - 1800, end=end, step=60)
        found = data["result"]
        values = [float(text) for one in found for _, text in one["values"]]
        assert len(values) >= 30
    assert found, f"{title} of {board}: {query} gives nothing"
    assert all(math.isfinite(one) for one in values)


def test_the_queries_of_variables_and_annotations_give_something(server):
    url, end = server
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        for variable in board["templating"]["list"]:
            shape = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert shape is not None
            found = ask(url, f"label/{shape[2]}/values", **{"match[]": chosen(shape[1])})
            assert found == sorted(LABELS[shape[2]]), variable["name"]
        for note in board["annotations"]["list"]:
            assert len(ask(url, "query", query=chosen(note["expr"]), time=end)["result"]) == 1


def test_the_median_and_the_band_are_those_of_the_chosen_job(server):
    url, end = server
    panel = [expression for _, title, expression, _ in QUERIES if title == "CPU"]
    assert len(panel) == 5
    # six machines at 1: the band is flat, the faulty ones and all chosen ones are shown
    shown = [ask(url, "query", query=chosen(e), time=end)["result"] for e in panel]
    assert [len(found) for found in shown] == [1, 1, 1, 6, 6]
    assert {one["value"][1] for found in shown for one in found} == {"1"}
