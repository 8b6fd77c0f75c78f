from __future__ import annotations

import functools
import re

import pytest

from planish.stages.report.figures.charts import Band, LineSeries, line_chart
from planish.stages.report.figures.run_charts import all_charts, pretraining
from planish.stages.report.gather import gather
from tests.unit.stages.report.critic_run import build_critic_run

pytestmark = pytest.mark.slow

CRITIC = [
    "Value loss",
    "Explained variance of the critic",
    "Values against returns",
    "Responses that train the critic",
    "Learning rates",
    "Advantages before scaling",
]


@functools.cache
def _charts(root):
    return {chart.title: chart for chart in all_charts(gather(root))}


def _tips(chart):
    return re.findall(r"<title>([^<]*)</title>", chart.svg)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('run')}/windowed"
    build_critic_run(root)
    return root


@pytest.fixture(scope="module")
def charts(windowed):
    return _charts(windowed)


def test_a_run_without_critic_has_none_of_its_charts(healthy_root):
    found = _charts(healthy_root)
    assert not {*CRITIC, "Slots", "Prefix tokens"} & found.keys()
    assert not any(chart.legend and "pretraining" in str(chart.legend) for chart in found.values())


def test_a_run_with_critic_and_windows_has_all_charts_in_order(charts):
    titles = list(charts)
    assert titles[-10:] == [*CRITIC, "Slots", "Prefix tokens", "Time per stage", "Timeline"]


def test_whole_responses_have_no_chart_of_slots(tmp_path):
    root = f"file://{tmp_path}/whole"
    build_critic_run(root, windows=False)
    found = _charts(root)
    assert set(CRITIC) <= found.keys()
    assert not {"Slots", "Prefix tokens"} & found.keys()


def test_groups_are_not_called_kept_where_nothing_is_filtered(charts, healthy_root):
    assert next(label for label, *_ in charts["Groups by outcome"].legend) == "mixed"
    kept = _charts(healthy_root)["Groups kept by dynamic sampling"]
    assert next(label for label, *_ in kept.legend) == "kept"


def test_a_curve_that_begins_after_value_pretraining_keeps_the_axis_of_the_others():
    bands = (Band("value pretraining", 1, 3),)
    svg = line_chart("e", [LineSeries("e", "blue", [4, 5], [1, 2])], y_label="nats", bands=bands)
    assert {"1", "2", "3", "4", "5"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_value_pretraining_is_one_shaded_stretch(windowed, charts):
    (band,) = pretraining(gather(windowed))
    assert (band.first, band.last) == (1, 3)
    for title in ("Accuracy", "Reward", "Value loss", "Slots"):
        assert ("value pretraining", "line", "box") in charts[title].legend
    assert 'fill="var(--line)"' in charts["Reward"].svg


def test_a_point_without_explained_variance_is_left_out_and_a_low_one_keeps_its_number(charts):
    tips = _tips(charts["Explained variance of the critic"])
    assert tips[0] == "explained variance, iteration 1: -7.5"
    assert tips[1].startswith("explained variance, iteration 3: ")
    assert len(tips) == 7
    drawn = re.findall(r">(-?[\d.]+)</text>", charts["Explained variance of the critic"].svg)
    assert min(float(text) for text in drawn) >= -1


def test_learning_rates_are_readable_numbers(charts):
    tips = _tips(charts["Learning rates"])
    assert "critic, iteration 8: 0.0006" in tips
    assert "policy, iteration 8: 0.0003" in tips
    assert "policy, iteration 3: 0" in tips


def test_slots_add_up_over_shards(charts):
    tips = _tips(charts["Slots"])
    assert {"continued, iteration 1: 0 %", "continued, iteration 4: 25 %"} <= set(tips)
    assert "utilisation, iteration 4: 74 %" in tips
    assert "read again, iteration 2: 1,960" in _tips(charts["Prefix tokens"])


def test_clipped_values_have_a_curve_only_where_some_are_clipped(charts, healthy_root):
    labels = [label for label, *_ in charts["Clip fractions"].legend]
    assert labels == ["high", "low", "dual", "value", "value pretraining"]
    assert [label for label, *_ in _charts(healthy_root)["Clip fractions"].legend] == labels[:3]
    assert "critic, mean" in str(charts["Gradient norm"].legend)
