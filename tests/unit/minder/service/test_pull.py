"""From answers of Prometheus to frames: freshness, resets, duplicates, only what is new."""

import re
from dataclasses import replace

import numpy as np
import pytest

from planish.base.errors import BackendUnavailable
from planish.minder.detect.metrics_table import METRICS, Metric
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import PrometheusConfig, Series
from planish.minder.service.pull import Puller

NAMES = ("a", "b", "c", "d")
T0 = 1_000_000
BEFORE = 100
"""Seconds of samples before T0."""


class Recorded:
    """Answers queries from samples as Prometheus does: the newest one of the last five minutes."""

    def __init__(self, samples, **config):
        self.config = PrometheusConfig(url="http://p", delay_seconds=0, concurrency=1, **config)
        self.samples = samples
        """List of (labels, times, values)."""
        self.resets = {}
        """Machine to seconds at which its counter began anew."""
        self.time = T0 + 900.0
        self.asked = []

    def now(self, deadline):
        return self.time

    def query_range(self, query, start, end, deadline, *, series=1):
        wanted = re.search(r'\w+=~"([^"]*)"', query).group(1)
        chosen = [one for one in self.samples if re.fullmatch(wanted, one[0]["node"])]
        if query.startswith("count("):
            count = np.array([float(len(chosen))])
            return [Series({}, np.array([float(start)]), count)] if chosen else []
        self.asked.append((query, start, end))
        self.series = series
        found = []
        for labels, times, values in chosen:
            if "resets(" in query:
                resets = self.resets.get(labels["node"], ())
                seen = [t for t in range(start, end) if any(0 <= t - r < 5 for r in resets)]
                grid = np.array(seen, float)
                found += [Series(labels, grid, np.ones(len(grid)))] if len(grid) else []
                continue
            if "count_over_time(" in query:
                # Both ends of a range belong to it, as in the servers of today.
                seen = {t for s in times for t in (np.ceil(s), np.floor(s) + 1) if t - 1 <= s <= t}
                grid = np.array(sorted(t for t in seen if start <= t < end))
                found.append(Series(labels, grid, np.ones(len(grid))))
                continue
            grid = np.arange(start, end)
            place = np.searchsorted(times, grid, side="right") - 1
            seen = (place >= 0) & (grid - times[place] <= 300)
            found.append(Series(labels, grid[seen].astype(float), values[place[seen]]))
        return found


def sampled(names=NAMES, *, every=1.0, seconds=1200, value=lambda i, t: 50.0 + i):
    times = np.arange(T0 - BEFORE, T0 + seconds, every)
    return [
        ({"node": name}, times.copy(), np.array([value(i, t) for t in times], float))
        for i, name in enumerate(names)
    ]


def puller(recorded, name="gpu_duty_cycle", **changes):
    metric = METRICS[name]
    facts = {"kind": metric.kind, "scale": metric.scale, "offset": metric.offset, **changes}
    source = Metric(name, metric.unit, None, f"{name}{{$job_selector}}", **facts)
    return Puller(recorded, {name: source}, "job")


def pulled(one, names=NAMES):
    return one.pull(names, 900, Deadline.after(60))


def test_a_frame_has_the_newest_sample_of_every_second():
    frame = pulled(puller(Recorded(sampled(value=lambda i, t: i + t % 7))))
    assert frame.machines == NAMES
    assert (int(frame.ts[0]), frame.num_seconds) == (T0 + 1, 900)
    expected = np.arange(4)[None, :] + (frame.ts % 7)[:, None]
    np.testing.assert_array_equal(frame.values["gpu_duty_cycle"], expected)


@pytest.mark.parametrize(
    ("series", "read"),
    [
        ("m{$job_selector}", 400),
        ("m{$job_selector} + n{$job_selector}", 800),
        ("1 - a{$job_selector} / b{$job_selector}", 800),
        ('m{mode="idle",$job_selector}', 400),
    ],
)
def test_a_query_is_as_large_as_the_series_that_it_reads_and_not_as_the_machines(series, read):
    recorded = Recorded([one for one in sampled() for _ in range(100)])
    one = puller(recorded)
    one._sources["gpu_duty_cycle"] = replace(one._sources["gpu_duty_cycle"], series=series)
    pulled(one)
    assert recorded.series == read


def test_only_the_new_minute_and_late_seconds_are_asked_for():
    recorded = Recorded(sampled(seconds=2000, value=lambda i, t: t % 1000))
    one = puller(recorded)
    pulled(one)
    assert one.seconds_pulled == 900
    recorded.time += 60
    recorded.asked.clear()
    frame = pulled(one)
    assert one.seconds_pulled == 90
    spans = {(start, end) for query, start, end in recorded.asked if "count_over" not in query}
    assert spans == {(T0 + 871, T0 + 961)}
    fresh = pulled(puller(recorded))
    np.testing.assert_array_equal(frame.ts, fresh.ts)
    np.testing.assert_array_equal(frame.values["gpu_duty_cycle"], fresh.values["gpu_duty_cycle"])


def test_samples_that_come_late_replace_what_was_not_there():
    recorded = Recorded(sampled(seconds=2000))
    labels, times, values = recorded.samples[1]
    recorded.samples[1] = (labels, times[: BEFORE + 880], values[: BEFORE + 880])
    one = puller(recorded)
    assert np.isnan(pulled(one).values["gpu_duty_cycle"][-10:, 1]).all()
    recorded.samples[1] = (labels, times, values)
    recorded.time += 10
    assert np.isfinite(pulled(one).values["gpu_duty_cycle"]).all()


def test_a_machine_that_joins_is_asked_for_from_the_start_and_one_that_leaves_is_dropped():
    recorded = Recorded(sampled(seconds=2000))
    one = puller(recorded)
    pulled(one, NAMES[:3])
    recorded.time += 60
    assert pulled(one, NAMES).machines == NAMES
    assert one.seconds_pulled == 900
    recorded.time += 60
    frame = pulled(one, NAMES[1:])
    assert (frame.machines, one.seconds_pulled) == (NAMES[1:], 90)
    np.testing.assert_array_equal(frame.values["gpu_duty_cycle"][0], [51, 52, 53])


def test_a_clock_of_the_server_that_goes_back_starts_anew():
    recorded = Recorded(sampled(seconds=2000))
    one = puller(recorded)
    recorded.time += 600
    pulled(one)
    recorded.time -= 300
    assert int(pulled(one).ts[-1]) == T0 + 1200
    assert one.seconds_pulled == 900


def test_a_value_that_prometheus_repeats_after_the_exporter_has_died_is_masked():
    recorded = Recorded(sampled())
    labels, times, values = recorded.samples[2]
    recorded.samples[2] = (labels, times[: BEFORE + 700], values[: BEFORE + 700])
    one = puller(recorded)
    column = pulled(one).values["gpu_duty_cycle"][:, 2]
    # Seconds 1 to 699 are measured, the next 5 are fresh enough, the other 196 are not.
    assert np.isfinite(column).sum() == 704


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -3.0, 1e300])
def test_values_that_can_not_be_are_masked(bad):
    recorded = Recorded(sampled())
    recorded.samples[0][2][BEFORE + 100 : BEFORE + 110] = bad
    one = puller(recorded)
    column = pulled(one).values["gpu_duty_cycle"][:, 0]
    assert np.isnan(column).sum() == 10


def test_the_reset_of_a_counter_leaves_a_gap_and_no_spike():
    recorded = Recorded(sampled(value=lambda i, t: 0.75))
    recorded.samples[1][2][BEFORE + 300 : BEFORE + 305] = 1e9
    recorded.resets = {"b": [T0 + 300]}
    column = pulled(puller(recorded, "cpu_usage")).values["cpu_usage"][:, 1]
    assert np.isnan(column).sum() == 5
    assert set(column[np.isfinite(column)].tolist()) == {25.0}


def test_a_rate_of_idle_time_just_over_one_is_no_use_at_all_and_none_far_over_it():
    recorded = Recorded(sampled(value=lambda i, t: 1.0005))
    assert (pulled(puller(recorded, "cpu_usage")).values["cpu_usage"] == 0.0).all()
    recorded = Recorded(sampled(value=lambda i, t: 1.5))
    assert np.isnan(pulled(puller(recorded, "cpu_usage")).values["cpu_usage"]).all()


def test_rates_at_the_ends_of_what_was_sampled_are_masked_since_they_are_too_small():
    recorded = Recorded(sampled(value=lambda i, t: 0.75))
    labels, times, values = recorded.samples[0]
    lost = (times == T0 + 400) | (times == T0 + 401)
    kept = (times >= T0 + 100) & (times < T0 + 200) | (times >= T0 + 220) & ~lost
    recorded.samples[0] = (labels, times[kept], values[kept])
    column = pulled(puller(recorded, "cpu_usage")).values["cpu_usage"][:, 0]
    seconds = np.arange(1, 901)
    # Four seconds after each beginning, from two after the last one, both ends at lost samples.
    expected = (seconds >= 104) & (seconds <= 200) | (seconds >= 224)
    expected &= (seconds != 401) & (seconds != 405)
    assert seconds[np.isfinite(column) != expected].tolist() == []


def test_coarse_samples_are_told_held_and_their_counters_read_over_a_longer_range(caplog):
    recorded = Recorded(sampled(every=10.0, value=lambda i, t: 0.5))
    one = puller(recorded, "cpu_usage")
    frame = pulled(one)
    assert one.intervals == {"cpu_usage": 10.0}
    assert np.isfinite(frame.values["cpu_usage"]).all()
    assert any("[40s]" in query for query, _, _ in recorded.asked)
    recorded.time += 60
    pulled(one)
    assert sum("coarse_samples" in record.message for record in caplog.records) == 1


def test_two_exporters_that_agree_are_averaged_and_of_others_the_newer_one_counts():
    recorded = Recorded(sampled(value=lambda i, t: 50.0))
    times = np.arange(T0 + 400, T0 + 1200, 1.0)
    alike = ({"node": "a", "instance": "2"}, times, np.full(len(times), 50.4))
    other = ({"node": "b", "instance": "2"}, times, np.full(len(times), 80.0))
    recorded.samples += [alike, other]
    one, duplicates = puller(recorded), []
    one.on_duplicate = lambda: duplicates.append(1)
    values = pulled(one).values["gpu_duty_cycle"]
    np.testing.assert_allclose(values[[100, 800], 0], [50.0, 50.2], rtol=1e-6)
    np.testing.assert_allclose(values[[100, 800], 1], [50.0, 80.0], rtol=1e-6)
    assert len(duplicates) == 2


def test_an_empty_answer_is_a_metric_without_values_unless_it_is_required():
    recorded = Recorded([])
    assert np.isnan(pulled(puller(recorded)).values["gpu_duty_cycle"]).all()
    with pytest.raises(BackendUnavailable, match="required"):
        pulled(puller(recorded, required=True))


def test_a_failure_of_one_query_keeps_what_was_known():
    recorded = Recorded(sampled(seconds=2000))
    one = puller(recorded)
    pulled(one)
    ask = recorded.query_range
    recorded.time += 60

    def fails(*args, **kwargs):
        raise BackendUnavailable("down", code="503")

    recorded.query_range = fails
    with pytest.raises(BackendUnavailable):
        pulled(one)
    recorded.query_range = ask
    assert pulled(one).num_seconds == 900
    assert one.seconds_pulled == 90
