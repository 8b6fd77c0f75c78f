"""Charts: what is drawn, where, and which of them a run has."""

import re
from xml.etree import ElementTree

import pytest

from planish.stages.report.figures.charts import (
    Line,
    Mark,
    Span,
    bar_chart,
    line_chart,
    timeline,
)
from planish.stages.report.figures.panels import Panel
from planish.stages.report.figures.run_charts import all_charts, pretraining
from planish.stages.report.gather import gather
from planish.stages.report.text import number, one_line, percent, seconds, visible
from tests.unit.stages.report.synthetic_run import build_critic_run

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


def test_a_hostile_label_stays_text():
    chart = line_chart(Panel("x", "<b>", ""), [Line("<script>&", "blue", {1: 1.0})])
    assert "<script>" not in chart.svg
    assert "&lt;script&gt;&amp;, iteration 1: 1" in chart.svg
    ElementTree.fromstring(chart.svg)


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
