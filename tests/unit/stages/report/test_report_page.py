"""The page: what stands on it, that hostile text stays text, and that it stays small."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from planish.records.refs import Ref
from planish.records.reports import BestPolicy, EvalReport
from planish.run.avoid import AvoidedNode
from planish.stages.report.facts import (
    Event,
    MachineAlert,
    ReportFacts,
    Sample,
    SampleComparison,
    TaskLog,
)
from planish.stages.report.figures.charts import Line, Mark, Span, bar_chart, line_chart, timeline
from planish.stages.report.figures.panels import Panel
from planish.stages.report.figures.run_charts import all_charts, pretraining
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page, resume_command
from planish.stages.report.render import MAX_BYTES, render_html, render_markdown
from planish.stages.report.stage import as_metrics, as_summary
from planish.stages.report.tables import change_of, funnel, score_tables
from planish.stages.report.text import number, one_line, percent, seconds, visible
from tests.unit.stages.report.synthetic_run import CURATION, build_critic_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`**[a](http://x)\x00\u202e"


class Elements(HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def pages(facts, state="SUCCEEDED", failed_task="", error_message=""):
    facts = replace(facts, state=state)
    page = build_page(facts, failed_task=failed_task, error_message=error_message)
    return render_html(page), render_markdown(page)


@pytest.fixture(scope="module")
def healthy_facts(healthy_root):
    return gather(healthy_root)


@pytest.fixture(scope="module")
def healthy_pages(healthy_facts):
    return pages(healthy_facts)


def test_numbers_of_cards_may_wrap_between_each_other_in_a_narrow_panel(healthy_pages):
    html, _ = healthy_pages
    rules = re.findall(r"([^{}]*)\{([^{}]*)\}", html)
    assert not [rule for names, rule in rules if ".value" in names and "nowrap" in rule]
    assert (".value span", "display: inline-block;") in [(n.strip(), r.strip()) for n, r in rules]
    values = re.findall(r'<p class="value">(.*)</p>', html)
    assert [re.sub("<span.*?</span>|<i>.*?</i>| ", "", value) for value in values] == [""] * 7


def test_the_page_shows_the_numbers_of_the_run(healthy_pages):
    html, markdown = healthy_pages
    text = " ".join(Elements(html).text.split())
    for shown in (
        "27.8 % → 48.3 %", "+20.5 points ± 0.5", "33.6 % → 50.2 %", "68.8 % → 76.2 %",
        "362,400", "20,133 / s", "27.8 ± 0.6 %", "24.9 to 30.8 %",
        "400 held-out prompts, 8 samples each", "model from scratch, 2 layers of 64",
        "dapo-tiny", "17,390 steps", "-12,379", "mean entropy (nats per token)",
    ):  # fmt: skip
        assert shown in text, shown
    assert "27.8 % -> 48.3 % | +20.5 points ± 0.5" in markdown
    assert "| avg@8 (mean accuracy over samples) | 27.8 ± 0.6 % | 48.3 ± 0.6 % |" in markdown
    values = html.partition('<details class="values">')[2].partition("</details>")[0]
    assert values.count("<tr>") == 9


def test_every_chart_is_there_with_a_line_on_how_to_read_it(healthy_pages):
    html, _ = healthy_pages
    titles = re.findall(r'<div class="panel-head"><h3>([^<]+)</h3>', html)
    assert titles[:12] == [
        "Accuracy", "Reward", "Response length", "Entropy", "Groups kept by dynamic sampling",
        "Clip fractions", "Distance per update", "Gradient norm", "Engine against trainer",
        "Time per stage", "Timeline", "All held-out prompts",
    ]  # fmt: skip
    assert html.count("<figure") == 11
    assert html.count('class="hint"') >= 11


def test_the_page_needs_no_network_and_no_script(healthy_pages):
    html, _ = healthy_pages
    found = Elements(html)
    assert not {"script", "link", "iframe", "img", "object", "a", "base"} & set(found.tags)
    names = [name for name, _ in found.attributes]
    assert not {"src", "href", "srcset", "action", "xlink:href"} & set(names)
    assert not re.search(r"@import|url\((?!#)", html)
    assert "default-src 'none'" in html


def test_equal_runs_give_equal_pages(healthy_root, healthy_pages):
    assert pages(gather(healthy_root)) == healthy_pages


def hostile_facts():
    sample = Sample("00" * 8, HOSTILE, HOSTILE, HOSTILE, False, HOSTILE, 3)
    return ReportFacts(
        root=f"file:///runs/{HOSTILE}",
        run={"preset": HOSTILE, "config": {HOSTILE: {HOSTILE: HOSTILE}}, "code_version": HOSTILE},
        tasks=[TaskLog("$\\frac{$", 1, 0, "failed", 5.0, 1.0, error=HOSTILE)],
        updates={1: {"entropy": 0.5}},
        evaluations=dict.fromkeys(
            (0, 1), EvalReport({"accuracy": 0.5, HOSTILE: 1.0}, {HOSTILE: {}, "b": {}})
        ),
        policies={1: Ref("policy/1", f"file:///runs/{HOSTILE}/policies/00001", "0" * 64)},
        alerts=[MachineAlert(HOSTILE, HOSTILE, 1.0, 5.0, 6.0, *[HOSTILE] * 4, 3)],
        avoided=[AvoidedNode(HOSTILE, HOSTILE, HOSTILE, 4, 5.0)],
        events=[Event("attempts", 5.0, 6.0, HOSTILE, True), Event("gangs", 5.0, 0.0, HOSTILE)],
        curation=f"# {HOSTILE}\n\n| filter | unit | in | out | dropped |\n| --- | --- | --- | --- "
        f"| --- |\n| x | rows | 5 | 4 | 1 |\n\n{HOSTILE}\n\n<div onclick=x>\n\n<b>\n",
        comparisons=[SampleComparison(HOSTILE, [(HOSTILE, [sample])])],
        missing=[HOSTILE],
    )


def test_hostile_text_adds_no_element_to_the_page_and_stays_text_in_markdown():
    from markdown_it import MarkdownIt

    html, markdown = pages(hostile_facts(), "FAILED", HOSTILE, "```\n" + HOSTILE)
    found = Elements(html)
    assert not {"script", "img", "a", "iframe"} & set(found.tags)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert "alert(1)" in found.text
    rendered = Elements(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))
    assert not {"script", "img", "a"} & set(rendered.tags)
    page = html.partition("<figure")[0] + html.rpartition("</figure>")[2]
    assert not {"\x00", "\u202e"} & set(page + markdown)


def test_a_failure_names_stage_error_last_good_state_and_command():
    facts = ReportFacts(
        root="file:///runs/a b",
        tasks=[
            TaskLog("rollout", 3, 0, "done", 10, 5),
            TaskLog("rollout", 3, 1, "running", 11, 4),
            TaskLog("train", 2, 0, "failed", 20, 2, error="PeerLost: rank 1 is gone"),
        ],
        policies={1: Ref("policy/1", "file:///runs/a b/policies/00001", "1" * 64)},
        states={16: Ref("state/1", "file:///runs/a b/states/step-00000016", "2" * 64)},
    )
    html, markdown = pages(facts, "FAILED", "post-train", "The DAG failed.")
    text = " ".join(Elements(html).text.split())
    for document in (text, markdown):
        assert "The run failed in stage train of iteration 2" in document
        assert "PeerLost: rank 1 is gone" in document
        assert "rollout 1 of iteration 3" in document
        assert "cut off after 4 s without a message" in document
        assert "The DAG failed." in document
        assert f"policies/00001#sha256={'1' * 64}" in document
        assert f"step-00000016#sha256={'2' * 64}" in document
        assert "--root 'file:///runs/a b'" in document
    assert "not evaluated" in text
    text = Elements(pages(ReportFacts("s3://b/r"), "FAILED", "post-train", "OOMKilled")[0]).text
    for said in ("The run failed in stage post-train", "OOMKilled", "none: no train state was"):
        assert said in text


@pytest.mark.parametrize(
    ("state", "tone"),
    [("SUCCEEDED", "good"), ("succeeded", "good"), ("FAILED", "bad"), ("", "warn"), ("X", "warn")],
)
def test_the_state_decides_the_colour(state, tone):
    page = build_page(ReportFacts("file:///r", state), failed_task="", error_message="")
    assert page["tone"] == tone


def test_the_command_fits_the_kind_of_root():
    local = ReportFacts("file:///r", run={"preset": "dapo-tiny"})
    assert resume_command(local) == "planish run --root file:///r --preset dapo-tiny"
    assert resume_command(ReportFacts("s3://runs/a", run={"preset": "p"})).splitlines() == [
        "planish submit s3://runs/a -p preset=p  # on a cluster",
        "planish run --root s3://runs/a --preset p  # on one machine",
    ]


def test_a_page_of_a_thousand_iterations_stays_below_one_mebibyte():
    facts = ReportFacts("file:///r", curation="a " * 50_000)
    keys = ("reward_mean", "entropy", "clipfrac_high", "approx_kl", "grad_norm", "grad_norm_max")
    facts.updates = {i: dict.fromkeys(keys, i % 17 / 17) for i in range(1, 1001)}
    for i in range(1, 1001):
        for shard in range(4):
            metrics = {"accuracy_mean": 0.5, "ds/kept_frac": 0.5, "ds/all_wrong_frac": 0.5}
            facts.tasks.append(TaskLog("rollout", i, shard, "done", 10.0 * i, 5, metrics=metrics))
        facts.tasks.append(TaskLog("train", i, 0, "done", 10.0 * i + 6, 3))
    facts.missing = [f"update of iteration {i}" for i in range(500)]
    html, _ = pages(facts)
    assert len(html.encode()) < MAX_BYTES
    assert html.count("<figure") >= 8
    assert "and 460 more" in html


def test_a_page_that_would_be_too_large_loses_its_samples_first():
    sample = Sample("0" * 16, "p", "a", "x" * 1500, True)
    facts = ReportFacts("file:///r", updates={1: {"entropy": 1.0}, 2: {"entropy": 0.9}})
    facts.comparisons = [SampleComparison("many", [("c", [sample] * 2000)])]
    html, _ = pages(facts)
    assert len(html.encode()) < MAX_BYTES
    assert "Sample rollouts" not in html
    assert html.count("<figure") == 1


def test_a_change_is_judged_beyond_its_noise_and_is_the_difference_of_what_is_printed():
    assert change_of(0.30, 0.31, noise=0.02).is_better is False
    assert change_of(0.30, 0.35, noise=0.02).is_better is True
    assert change_of(0.30, 0.25, noise=0.02).is_worse is True
    assert change_of(0.21049, 0.42751).text == "+21.8 points"  # 21.0 % -> 42.8 %
    lengths = {i: EvalReport({"response_length_mean": n}) for i, n in ((0, 23.97), (1, 24.012))}
    (row,) = score_tables(lengths)[0].rows
    assert (row.cells, row.change.text) == (["23.97", "24.01"], "+0.04")
    # Fewer unreadable answers are better.
    shares = {i: EvalReport({"invalid_fraction": n}) for i, n in ((0, 0.06), (1, 0.01))}
    (row,) = score_tables(shares)[0].rows
    assert row.label == "responses without a readable answer"
    assert (row.change.text, row.change.is_better) == ("-5.0 points", True)
    table = score_tables({0: shares[0]})[0]
    assert (table.columns, table.has_change) == (["score", "policy 0"], False)


def test_evaluations_on_the_way_are_drawn_and_the_best_is_named(healthy_facts):
    first, last = healthy_facts.evaluations.values()
    between = {n: EvalReport({"accuracy": 0.3 + 0.01 * (n == 2)}) for n in range(1, 8)}
    pin = f"{healthy_facts.root}/policies/00002#sha256={'0' * 64}"
    best = BestPolicy(pin, 2, 0.31, tuple(range(9)))
    facts = replace(healthy_facts, evaluations={0: first, **between, 8: last}, best=best)
    html, markdown = pages(facts)
    text = Elements(html).text
    assert all(f"held-out, policy {n}: " in html for n in range(1, 8))
    assert "held-out prompts before, during and after" in text
    assert "31.0 %, of 9 evaluated" in text
    columns = score_tables(facts.evaluations, best)[0].columns
    assert columns == [
        *("score", "policy 0 (before)", "policy 2 (best)"),
        *("policy 5", "policy 6", "policy 7", "policy 8 (after)", "change"),
    ]
    assert all(column in text and column in markdown for column in columns)
    assert "policy 2, best" in text
    assert as_summary(facts)["best_policy"] == pin


def test_the_funnel_is_read_from_the_curation_report():
    steps = funnel(CURATION)
    assert [step["label"] for step in steps][:2] == ["readable lines", "worked steps"]
    assert steps[3] == {
        "label": "exact duplicates", "unit": "steps", "count": "5,011", "lost": "-12,379",
        "width": "21.96",
    }  # fmt: skip
    assert funnel("no table") == []


def test_the_summary_and_its_metrics_are_the_known_numbers(healthy_facts):
    metrics = as_metrics(as_summary(healthy_facts))
    assert metrics["accuracy_after"] == 0.4831
    assert metrics["iterations"] == 8.0
    assert metrics["num_failed_tasks"] == 0.0
    empty = as_summary(ReportFacts("file:///r", "FAILED"))
    assert empty["mismatch_k3_max"] is None
    assert "accuracy_after" not in as_metrics(empty)
    updates = {1: {"mismatch_k3": 2e-9}, 2: {"mismatch_k3": -5e-8}, 3: {"mismatch_k3": 1e-9}, 4: {}}
    assert as_summary(ReportFacts("file:///r", updates=updates))["mismatch_k3_max"] == 5e-8


LATE = {"num_verifier_timeouts": 2.0, "num_scored_rollouts": 64.0}
HUB = {"model": {"path": "org/name"}, "curate": {"dataset": "s3://b/mine.jsonl"}}
SIZES = {"num_parameters": 502_830_976.0, "num_trained_parameters": 8_798_208.0}
CRITIC_SIZES = {"num_critic_parameters": 400_000.0, "num_trained_critic_parameters": 4_000.0}


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"is_stopped": True}, ["Stopped by an operator"]),
        ({"run": {"config": HUB}}, ["model", "org/name", "data", "s3://b/mine.jsonl"]),
        ({"run": {"config": {"curate": {"task": "sums"}}}}, ["generated sums"]),
        (
            {"tasks": [TaskLog("reward", 3, 0, "done", 1.0, 1.0, metrics=LATE)]},
            ["iteration 3: 2 of 64 responses took the verifier too long: wrong"],
        ),
        (
            {"updates": {1: {}, 2: {**SIZES, **CRITIC_SIZES}}},
            ["8,798,208 of 502,830,976 (1.75 %)", "4,000 of 400,000 (1.00 %)"],
        ),
        (
            {"avoided": [AvoidedNode("node-3", "operator", "r", 4, 1.76e9)]},
            ["Faulty machines", "iteration 4", "2025-10-09 08:53:20 UTC"],
        ),
    ],
)
def test_what_a_run_has_is_told_and_nothing_else(facts, shown):
    plain = "".join(pages(ReportFacts("file:///r")))
    for page in pages(ReportFacts("file:///r", **facts)):
        for text in shown:
            assert text in page
    assert not [text for text in shown if len(text) > 5 and text in plain]


PLAIN = Panel("m", "nats per token", "how to read it", from_zero=False)
SHARE = Panel("s", "share", "", unit="percent")
CRITIC = [
    "Value loss",
    "Explained variance of the critic",
    "Values against returns",
    "Responses that train the critic",
    "Learning rates",
    "Advantages before scaling",
]


def tips(chart):
    return re.findall(r"<title>([^<]*)</title>", chart.svg)


def words(chart):
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart.svg)


def test_colours_font_and_axes_are_those_of_the_page():
    chart = line_chart(PLAIN, [Line("reward", "blue", {1: 0.0, 9: 1.0})], limit=("limit 48", 48))
    assert 'stroke="var(--blue)"' in chart.svg
    assert "#" not in chart.svg
    assert re.findall(r"font-\w+: ([\d.]+)px", chart.svg) == ["12"]
    assert {"nats per token", "iteration", "limit 48"} <= set(words(chart))


def test_each_point_and_each_mark_tells_its_value():
    mark = Mark("held-out, before", "orange", 0, 0.28, 0.006)
    chart = line_chart(SHARE, [Line("high", "blue", {1: 0.011, 2: 0.02})], marks=[mark])
    told = ["high, iteration 1: 1.1 %", "high, iteration 2: 2 %"]
    assert tips(chart) == [*told, "held-out, before: 28 % +- 0.6 %"]


def test_a_logarithmic_axis_is_used_only_for_positive_values():
    panel = Panel("m", "", "", is_log=True, from_zero=False)
    positive, zero = (line_chart(panel, [Line("a", "blue", {1: y, 2: 1e-5})]) for y in (1e-7, 0.0))
    assert {"1e-7", "1e-6", "1e-5"} <= set(words(positive))
    assert "0" in words(zero)


def test_many_points_are_thinned_out_without_tips():
    long = line_chart(PLAIN, [Line("a", "blue", {i: i % 7 for i in range(1, 5001)})])
    assert tips(long) == []
    assert long.values == []
    assert len(long.svg) < 60_000
    bars = bar_chart(PLAIN, [Line("kept", "blue", {i: (i + 1) % 2 for i in range(1, 121)})])
    assert len(tips(bars)) == 60
    assert tips(bars)[0] == "kept, iteration 1.5: 0.5"


def test_bars_stack_to_the_values_given():
    layers = [Line("kept", "blue", {1: 0.5, 2: 0.25}), Line("wrong", "red", {1: 0.5, 2: 0.75})]
    chart = bar_chart(SHARE, layers)
    assert tips(chart) == [
        "kept, iteration 1: 50 %",
        "kept, iteration 2: 25 %",
        "wrong, iteration 1: 50 %",
        "wrong, iteration 2: 75 %",
    ]
    rects = re.findall("<rect[^>]*>", chart.svg)
    shapes = [dict(re.findall(r'(\w+)="([\d.]*)%?"', rect)) for rect in rects]
    low, small, high, large = (
        [float(shape[name]) for name in ("x", "y", "width", "height")] for shape in shapes
    )
    assert low[3] == pytest.approx(2 * small[3], abs=0.02)
    assert large[3] == pytest.approx(3 * small[3], abs=0.03)
    # Each stands on the one below it, and both columns are equally high.
    assert high[1] + high[3] == pytest.approx(low[1], abs=0.02)
    assert high[1] == pytest.approx(large[1], abs=0.02)
    assert (low[0], low[2]) == (high[0], high[2])
    # Only iterations that were run are named below them.
    assert {"1", "2", "iteration"} <= set(words(chart))
    assert "3" not in words(chart)


def test_points_lie_where_the_axes_say():
    svg = line_chart(Panel("m", "", ""), [Line("a", "blue", {1: 0.0, 2: 50.0, 3: 100.0})]).svg
    points = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)%" cy="([\d.]+)"', svg)]
    end, middle = 'text-anchor="end"[^>]*>', 'text-anchor="middle"[^>]*>'
    heights = {t: float(y) - 4 for y, t in re.findall(rf'y="([\d.]+)" {end}(\d+)', svg)}
    names = {t: float(x) for x, t in re.findall(rf'x="([\d.]+)%" y="[\d.]+" {middle}(\d)', svg)}
    wanted = [(names[t], heights[h]) for t, h in (("1", "0"), ("2", "50"), ("3", "100"))]
    assert points == [pytest.approx(place, abs=0.02) for place in wanted]


def test_times_are_marked_at_whole_minutes():
    chart = bar_chart(Panel("t", "", "", unit="seconds"), [Line("a", "blue", {1: 700})])
    assert {"0 s", "5 min", "10 min"} <= set(words(chart))
    chart = timeline(PLAIN, ["train"], [Span("train", "teal", 0, 100_000, "t")])
    assert {"0 s", "4 h", "8 h", "24 h", "train"} <= set(words(chart))
    assert tips(chart) == ["t"]


def test_values_stand_in_a_table_with_a_row_for_each_iteration():
    lines = [Line("a", "blue", {1: 0.1, 2: 0.2}), Line("b", "red", {2: 0.5})]
    rows = [["iteration", "a", "b"], ["1", "10 %", ""], ["2", "20 %", "50 %"]]
    assert line_chart(SHARE, lines).values == rows


@pytest.mark.parametrize("y", [0.0, -3.0, 1e-300, 1e300])
def test_one_point_and_the_largest_numbers_are_charts(y):
    for points in ({3: y}, {1: -y, 2: 0.0, 3: y}):
        chart = line_chart(PLAIN, [Line("a", "blue", points)])
        bars = bar_chart(PLAIN, [Line("a", "blue", {n: abs(v) for n, v in points.items()})] * 2)
        assert "nan" not in chart.svg + bars.svg
        assert "inf" not in chart.svg + bars.svg
        assert len(tips(chart)) == len(points)


def test_a_curve_that_begins_after_value_pretraining_keeps_the_axis_of_the_others():
    chart = line_chart(PLAIN, [Line("e", "blue", {4: 1, 5: 2})], bands=[(1, 3)])
    assert {"1", "2", "3", "4", "5"} <= set(words(chart))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('run')}/windowed"
    build_critic_run(root)
    return root


@pytest.fixture(scope="module")
def charts(windowed):
    return {chart.title: chart for chart in all_charts(gather(windowed))}


def test_a_run_has_the_charts_of_what_it_measured(charts, healthy_root, tmp_path):
    healthy = {chart.title: chart for chart in all_charts(gather(healthy_root))}
    assert not {*CRITIC, "Slots", "Prefix tokens", "Groups by outcome"} & healthy.keys()
    assert not any("pretraining" in str(chart.legend) for chart in healthy.values())
    assert [*charts][-10:] == [*CRITIC, "Slots", "Prefix tokens", "Time per stage", "Timeline"]
    assert next(label for label, *_ in healthy["Groups kept by dynamic sampling"].legend) == "kept"
    assert next(label for label, *_ in charts["Groups by outcome"].legend) == "mixed"
    labels = [label for label, *_ in charts["Clip fractions"].legend]
    assert labels == ["high", "low", "dual", "value", "value pretraining"]
    assert [label for label, *_ in healthy["Clip fractions"].legend] == labels[:3]
    build_critic_run(f"file://{tmp_path}/whole", windows=False)
    whole = {chart.title for chart in all_charts(gather(f"file://{tmp_path}/whole"))}
    assert set(CRITIC) <= whole
    assert not {"Slots", "Prefix tokens"} & whole


def test_value_pretraining_is_one_shaded_stretch(windowed, charts):
    assert pretraining(gather(windowed)) == [(1, 3)]
    for title in ("Accuracy", "Reward", "Value loss", "Slots"):
        assert ("value pretraining", "line", "box") in charts[title].legend
    assert 'fill="var(--line)"' in charts["Reward"].svg


def test_a_point_without_explained_variance_is_left_out_and_a_low_one_keeps_its_number(charts):
    chart = charts["Explained variance of the critic"]
    assert tips(chart)[0] == "explained variance, iteration 1: -7.5"
    assert tips(chart)[1].startswith("explained variance, iteration 3: ")
    assert len(tips(chart)) == 7
    drawn = re.findall(r">(-?[\d.]+)</text>", chart.svg)
    assert min(float(text) for text in drawn) >= -1


def test_numbers_of_critic_and_slots_are_those_of_the_run(charts):
    rates = {"critic, iteration 8: 0.0006", "policy, iteration 8: 0.0003", "policy, iteration 3: 0"}
    assert rates <= set(tips(charts["Learning rates"]))
    shares = {"continued, iteration 1: 0 %", "continued, iteration 4: 25 %"}
    assert {*shares, "utilisation, iteration 4: 74 %"} <= set(tips(charts["Slots"]))
    assert "read again, iteration 2: 1,960" in tips(charts["Prefix tokens"])


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (number, 2.5e9, "2.5 G"),
        (number, -2.1e-7, "-2.1e-7"),
        (percent, 0.5, "50 %"),
        (percent, 0.0234, "2.3 %"),
        (percent, 0.0, "0 %"),
        (percent, 0.00042, "0.042 %"),
        (seconds, 0.0, "0 s"),
        (seconds, 0.42, "0.42 s"),
        (seconds, 12.3, "12 s"),
        (seconds, 59.6, "1 min"),
        (seconds, 185.0, "3 min 5 s"),
        (seconds, 7800.0, "2 h 10 min"),
        (seconds, 7200.0, "2 h"),
        (one_line, "a\n\n  b\tc", "a b c"),
        (visible, "a\x00b\u202ec\u200bd\te\nf", "a\u2400b\\u202ec\\u200bd\te\nf"),
        (visible, "x" * 3600, "x" * 1600 + " ... (2,000 more characters)"),
    ],
)
def test_values_are_written_as_people_read_them(write, value, text):
    assert write(value) == text
