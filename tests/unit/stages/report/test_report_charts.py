from __future__ import annotations

import re
from xml.etree import ElementTree

from planish.stages.report.figures.canvas import PALETTE, canvas
from planish.stages.report.figures.charts import (
    BarPart,
    LineSeries,
    Mark,
    Span,
    line_chart,
    stacked_bars,
    timeline,
)


def _tips(svg):
    return re.findall(r"<title>([^<]*)</title>", svg)


def _text(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_equal_charts_give_equal_text():
    lines = [LineSeries("reward", "blue", [1, 2, 3], [0.1, 0.4, 0.2])]
    assert line_chart("Reward", lines, y_label="r") == line_chart("Reward", lines, y_label="r")


def test_colours_leave_as_variables_of_the_page():
    svg = line_chart("Reward", [LineSeries("reward", "blue", [1, 2], [0.0, 1.0])], y_label="r")
    assert "stroke: var(--blue)" in svg
    assert not any(stand_in in svg for stand_in in PALETTE.values())


def test_text_takes_the_font_of_the_page_at_twelve_pixels():
    svg = line_chart("Reward", [LineSeries("reward", "blue", [1, 2], [0.0, 1.0])], y_label="r")
    assert "font-family" not in svg
    assert set(re.findall(r"font-size: ([\d.]+)px", svg)) == {"12"}


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


def test_bars_stack_to_the_values_given():
    parts = [BarPart("kept", "blue", [0.5, 0.25]), BarPart("wrong", "red", [0.5, 0.75])]
    svg = stacked_bars("Groups", [1, 2], parts, y_label="share", unit="percent")
    assert _tips(svg) == [
        "kept, iteration 1: 50 %",
        "kept, iteration 2: 25 %",
        "wrong, iteration 1: 50 %",
        "wrong, iteration 2: 75 %",
    ]


def test_only_iterations_that_were_run_are_named_below_bars():
    svg = stacked_bars("g", [1, 2], [BarPart("kept", "blue", [1, 2])], y_label="s")
    assert [text for text in _text(svg) if text in "01234"][:2] == ["1", "2"]
    assert "3" not in _text(svg)


def test_times_are_marked_at_whole_minutes():
    svg = stacked_bars("t", [1], [BarPart("a", "blue", [700])], y_label="s", unit="seconds")
    assert {"0 s", "5 min", "10 min"} <= set(_text(svg))
    svg = timeline("t", ["train"], [Span("train", "teal", 0, 100_000, "t")])
    assert {"0 s", "4 h", "8 h", "24 h"} <= set(_text(svg))


def test_many_bars_are_averaged_over_neighbours():
    svg = stacked_bars("g", range(1, 121), [BarPart("kept", "blue", [0, 1] * 60)], y_label="s")
    tips = _tips(svg)
    assert len(tips) == 60
    assert tips[0] == "kept, iteration 1.5: 0.5"


def test_a_timeline_has_a_row_per_label_and_a_bar_per_span():
    spans = [Span("sft", "violet", 0, 30, "sft: 30 s"), Span("train", "teal", 31, 2, "train: 2 s")]
    svg = timeline("Timeline", ["sft", "train"], spans)
    assert _tips(svg) == ["sft: 30 s", "train: 2 s"]
    assert {"sft", "train"} <= set(_text(svg))


def test_ids_of_two_charts_on_one_page_do_not_collide():
    def ids(name):
        with canvas(name) as page:
            page.axes.plot([1, 2], [1, 2], "o")
        return set(re.findall(r' id="([^"]+)"', page.svg))

    assert ids("a")
    assert not ids("a") & ids("b")
