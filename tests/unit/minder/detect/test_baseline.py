"""The role baseline: what is learned, refused, kept and forgotten."""

import numpy as np
import pytest

from planish.minder.detect.baseline import Baseline, History
from planish.minder.detect.config import minder_config
from planish.minder.detect.distances import compared_values
from planish.minder.detect.frame import Frame, Job
from planish.minder.detect.preprocess import Prepared

NAMES = ("a", "b", "c", "d", "e")
CONFIG = minder_config().detect


def prepared(minutes, offsets, *, start=0, seed=0):
    """Machines around 0.3 that differ by `offsets` [minutes, N]."""
    rng = np.random.default_rng(seed)
    wave = 0.3 + 0.1 * np.sin(np.arange(60 * minutes) / 3)[:, None]
    values = wave + np.repeat(offsets, 60, axis=0) + rng.normal(0, 0.005, (60 * minutes, 5))
    values = values.astype(np.float32)
    frame = Frame("j", np.arange(start, start + 60 * minutes), NAMES, {"cpu_usage": values})
    masked = {"cpu_usage": np.zeros(values.shape, bool)}
    return Prepared(frame, {"cpu_usage": values}, masked, {}, {}, {}, {}, np.zeros(5))


def history(minutes, offsets, **options):
    piece = prepared(minutes, offsets, **options)
    return History(piece.frame.ts, piece.values, piece.masked)


def learned(offsets, config=CONFIG):
    offsets = np.asarray(offsets, float)
    baseline = Baseline(config)
    baseline.keep(NAMES)
    for minute, row in enumerate(offsets):
        baseline.add(history(1, row[None], start=60 * minute), 1 << 40, np.zeros(5, bool))
    return baseline


def test_a_lasting_offset_is_learned_after_two_minutes():
    lasting = [[0, 0, 0.09, 0, 0]] * 12
    assert learned(lasting[:1]).table() == {}
    found = learned(lasting[:2]).table()["cpu_usage"]
    assert set(found) == {"c"}
    assert found["c"] == pytest.approx(0.09, abs=0.003)
    baseline = learned(lasting)
    assert baseline.table()["cpu_usage"]["c"] == pytest.approx(0.09, abs=0.003)
    assert baseline.mature.all()


def test_halves_that_disagree_are_refused_and_the_last_accepted_value_stays():
    late = [[0, 0, 0, 0, 0]] * 6 + [[0, -0.2, 0, 0, 0]] * 6
    assert learned(late).table() == {}
    shifted = [[0, 0.05, 0, 0, 0]] * 6 + [[0, -0.2, 0, 0, 0]] * 6
    assert learned(shifted).table()["cpu_usage"]["b"] == pytest.approx(0.05, abs=0.003)


def test_a_minute_of_jitter_changes_nothing():
    rows = np.zeros((12, 5))
    rows[[4, 9], 3] = 0.3
    assert learned(rows).table() == {}


def test_nothing_is_learned_of_unsure_machines_and_skipped_time():
    baseline = Baseline(CONFIG)
    baseline.keep(NAMES)
    piece = history(6, np.tile([0, 0, 0.09, 0.06, 0], (6, 1)))
    baseline.add(piece, 1 << 40, np.array([False, False, True, False, False]))
    assert set(baseline.table()["cpu_usage"]) == {"d"}
    other = Baseline(CONFIG)
    other.keep(NAMES)
    other.skip(300)
    other.add(piece, 1 << 40, np.zeros(5, bool))
    assert other.table() == {}


def test_a_machine_that_leaves_is_forgotten_and_a_new_one_learned_on_its_own():
    baseline = learned([[0, 0, 0.09, 0, 0.04]] * 12)
    baseline.keep(("a", "b", "d", "e", "new"))
    assert set(baseline.table()["cpu_usage"]) == {"e"}
    assert list(baseline.mature) == [True, True, True, True, False]
    baseline.keep(NAMES)
    assert set(baseline.table()["cpu_usage"]) == {"e"}
    assert not baseline.mature[2]


def test_long_histories_take_bounded_space_and_keep_their_value():
    baseline = learned([[0.08, 0, 0, 0, 0]] * 300)
    chunks = baseline._chunks["cpu_usage"]
    assert len(chunks) < 64
    assert baseline.table()["cpu_usage"]["a"] == pytest.approx(0.08, abs=0.003)


def test_only_as_much_is_taken_away_as_a_machine_shows():
    job = Job(baseline={"cpu_usage": {"c": 0.09}})
    shows, lost, more = ([[0, 0, x, 0, 0]] for x in (0.09, 0.0, 0.29))
    for offsets, expected in ((shows, 0.0), (lost, 0.0), (more, 0.2)):
        piece = prepared(1, np.array(offsets))
        values = compared_values(piece, "cpu_usage", CONFIG, job)
        gap = np.median(values[:, 2] - np.median(values, axis=1))
        assert gap == pytest.approx(expected, abs=0.004)
