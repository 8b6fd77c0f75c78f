from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from planish.stages.report.figures.charts import (
    LineSeries,
    Mark,
    Span,
    line_chart,
    stacked_bars,
    table,
    timeline,
)


def _tips(svg):
    return re.findall(r"<title>([^<]*)</title>", svg)


def _text(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_equal_charts_give_equal_text():
    lines = [LineSeries("reward", "blue", [1, 2, 3], [0.1, 0.4, 0.2])]
    assert line_chart("Reward", lines, y_label="r") == line_chart("Reward", lines, y_label="r")


def test_colours_and_font_are_those_of_the_page():
    svg = line_chart("Reward", [LineSeries("reward", "blue", [1, 2], [0.0, 1.0])], y_label="r")
    assert 'stroke="var(--blue)"' in svg
    assert "#" not in svg
    assert "font-family" not in svg
    assert re.findall(r"font-size: ([\d.]+)px", svg) == ["12"]


def test_each_point_tells_its_value():
    svg = line_chart(
        "Clip", [LineSeries("high", "blue", [1, 2], [0.011, 0.02])], y_label="share", unit="percent"
    )
    assert _tips(svg) == ["high, iteration 1: 1.1 %", "high, iteration 2: 2 %"]


def test_a_mark_tells_its_standard_error():
    mark = Mark("held-out, before", "orange", 0, 0.28, 0.006)
    svg = line_chart("Accuracy", [], y_label="share", unit="percent", marks=[mark])
    assert _tips(svg) == ["held-out, before: 28 % +- 0.6 %"]


def test_a_hostile_label_stays_text():
    svg = line_chart("x", [LineSeries("<script>&", "blue", [1], [1.0])], y_label="<b>")
    assert "<script>" not in svg
    assert "&lt;script&gt;&amp;, iteration 1: 1" in svg
    ElementTree.fromstring(svg)


def test_a_limit_is_drawn_with_its_label():
    svg = line_chart(
        "Length",
        [LineSeries("mean", "blue", [1, 2], [20, 22])],
        y_label="t",
        limit=("limit 48", 48),
    )
    assert "limit 48" in _text(svg)


def test_axes_name_their_quantity_and_unit():
    svg = line_chart("Entropy", [LineSeries("e", "blue", [1, 9], [1, 0])], y_label="nats per token")
    assert {"nats per token", "iteration"} <= set(_text(svg))


def test_a_logarithmic_axis_is_used_only_for_positive_values():
    positive = line_chart(
        "m", [LineSeries("a", "blue", [1, 2], [1e-7, 1e-5])], y_label="", is_log=True
    )
    zero = line_chart("m", [LineSeries("a", "blue", [1, 2], [0.0, 1e-5])], y_label="", is_log=True)
    assert {"1e-7", "1e-6", "1e-5"} <= set(_text(positive))
    assert "0" in _text(zero)


def test_a_long_line_has_no_tips_and_stays_small():
    many = list(range(1, 5001))
    svg = line_chart("r", [LineSeries("a", "blue", many, [i % 7 for i in many])], y_label="r")
    assert _tips(svg) == []
    assert len(svg) < 60_000


def _rects(svg):
    shapes = [dict(re.findall(r'(\w+)="([^"]*)"', rect)) for rect in re.findall("<rect[^>]*>", svg)]
    return [tuple(float(shape[name]) for name in ("x", "y", "width", "height")) for shape in shapes]


def test_bars_stack_to_the_values_given():
    parts = [
        LineSeries("kept", "blue", [1, 2], [0.5, 0.25]),
        LineSeries("wrong", "red", [1, 2], [0.5, 0.75]),
    ]
    svg = stacked_bars("Groups", parts, y_label="share", unit="percent")
    assert _tips(svg) == [
        "kept, iteration 1: 50 %",
        "kept, iteration 2: 25 %",
        "wrong, iteration 1: 50 %",
        "wrong, iteration 2: 75 %",
    ]
    low, small, high, large = _rects(svg)
    assert low[3] == pytest.approx(2 * small[3], abs=0.02)
    assert large[3] == pytest.approx(3 * small[3], abs=0.03)
    # Each stands on the one below it, and both columns are equally high.
    assert high[1] + high[3] == pytest.approx(low[1], abs=0.02)
    assert high[1] == pytest.approx(large[1], abs=0.02)
    assert (low[0], low[2]) == (high[0], high[2])


def test_points_lie_where_the_axes_say():
    lines = [LineSeries("a", "blue", [1, 2, 3], [0.0, 50.0, 100.0])]
    svg = line_chart("m", lines, y_label="", from_zero=True)
    points = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    heights = {
        t: float(y) - 4 for y, t in re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>(\d+)', svg)
    }
    assert [y for _, y in points] == pytest.approx(
        [heights[t] for t in ("0", "50", "100")], abs=0.02
    )
    names = {
        t: float(x)
        for x, t in re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle"[^>]*>(\d)', svg)
    }
    assert [x for x, _ in points] == pytest.approx([names[t] for t in "123"], abs=0.02)


def test_only_iterations_that_were_run_are_named_below_bars():
    bars = [LineSeries("kept", "blue", [1, 2], [1, 2])]
    texts = _text(stacked_bars("g", bars, y_label="s", unit="number"))
    assert [text for text in texts if text in ("1", "2", "3")].count("3") == 0
    assert {"1", "2", "iteration"} <= set(texts)


def test_times_are_marked_at_whole_minutes():
    bars = [LineSeries("a", "blue", [1], [700])]
    svg = stacked_bars("t", bars, y_label="s", unit="seconds")
    assert {"0 s", "5 min", "10 min"} <= set(_text(svg))
    svg = timeline("t", ["train"], [Span("train", "teal", 0, 100_000, "t")])
    assert {"0 s", "4 h", "8 h", "24 h"} <= set(_text(svg))


def test_many_bars_are_averaged_over_neighbours():
    bars = [LineSeries("kept", "blue", range(1, 121), [0, 1] * 60)]
    tips = _tips(stacked_bars("g", bars, y_label="s", unit="number"))
    assert len(tips) == 60
    assert tips[0] == "kept, iteration 1.5: 0.5"


def test_values_stand_in_a_table_with_a_row_for_each_iteration():
    lines = [LineSeries("a", "blue", [1, 2], [0.1, 0.2]), LineSeries("b", "red", [2], [0.5])]
    heads, rows = table(lines, "percent")
    assert (heads, rows) == (["iteration", "a", "b"], [["1", "10 %", ""], ["2", "20 %", "50 %"]])
    assert table([LineSeries("a", "blue", range(41), range(41))], "number")[1] == []


@pytest.mark.parametrize("y", [0.0, -3.0, 1e-300, 1e300])
def test_one_point_is_a_chart(y):
    svg = line_chart("m", [LineSeries("a", "blue", [3], [y])], y_label="")
    assert "nan" not in svg
    assert len(_tips(svg)) == 1


def test_the_largest_numbers_are_drawn_at_the_edges():
    line = LineSeries("a", "blue", [1, 2, 3], [-1.7e308, 0.0, 1.7e308])
    svg = line_chart("m", [line], y_label="")
    bars = stacked_bars("m", [line, line], y_label="", unit="number")
    assert "nan" not in svg + bars
    assert "inf" not in svg + bars


def test_a_timeline_has_a_row_per_label_and_a_bar_per_span():
    spans = [Span("sft", "violet", 0, 30, "sft: 30 s"), Span("train", "teal", 31, 2, "train: 2 s")]
    svg = timeline("Timeline", ["sft", "train"], spans)
    assert _tips(svg) == ["sft: 30 s", "train: 2 s"]
    assert {"sft", "train"} <= set(_text(svg))
