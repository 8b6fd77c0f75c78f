"""The order of metrics: features by hand, and trees of which the root is known."""

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.minder.detect.config import minder_config
from planish.minder.detect.frame import Frame
from planish.minder.lab.cases import Case, Truth
from planish.minder.lab.prioritise import features, labelled, largest_scores, rank

METRICS = ["cpu_usage", "gpu_duty_cycle", "memory_usage"]
CONFIG = minder_config({"detect": {"metrics": METRICS}})
START = 1_000_000


def frame(seconds=120, machines=5, *, odd=None, seed=0):
    rng = np.random.default_rng(seed)
    values = {
        name: (50 + rng.normal(0, 1, (seconds, machines))).astype(np.float32) for name in METRICS
    }
    if odd:
        name, low, high, shift = odd
        values[name][low:high, 2] += shift
    names = tuple(f"m{i}" for i in range(machines))
    return Frame("job", np.arange(START, START + seconds), names, values)


def case(seconds=120, fault=(0, 0), **more):
    onset, halt = fault
    truth = Truth(("m2",), "nic", START + onset, START + halt) if halt else Truth()
    return Case(frame(seconds, **more), truth)


def test_the_largest_score_of_a_window_is_that_of_its_means():
    one = frame()
    found, starts = features(one, CONFIG, {}, stride=60)
    assert starts.tolist() == [START, START + 60]
    means = one.values["cpu_usage"][60:68].mean(axis=0)
    expected = np.abs((means - means.mean()) / means.std()).max()
    assert found[1, 0] == pytest.approx(expected, rel=1e-4)


def test_machines_that_are_alike_or_unknown_have_no_score():
    values = np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 9.0]])
    known = np.array([[True, True, True], [True, True, False]])
    assert largest_scores(values, known).tolist() == [0.0, 1.0]


def test_a_window_is_of_the_fault_when_all_of_it_lies_inside():
    _, labels = labelled([case(fault=(30, 67)), case()], CONFIG, {})
    # Windows begin at 0, 30, 60 and 90; 60 .. 67 is the last one inside.
    assert labels.tolist() == [False, True, True, False] + [False] * 4


def test_the_metric_that_tells_comes_first_and_unused_ones_last_by_name():
    cases = [case(600, (200, 599), odd=("gpu_duty_cycle", 200, 600, 30), seed=i) for i in range(8)]
    found = rank(METRICS, *labelled(cases, CONFIG, {}))
    order = found.ranked
    assert found.tree.startswith("|--- gpu_duty_cycle <= ")
    assert (order[0].metric, order[0].depth) == ("gpu_duty_cycle", 0)
    assert order[0].importance > 0.95
    unused = [one.metric for one in order if one.depth is None]
    assert unused == sorted(unused)
    assert [one.metric for one in order][-len(unused) :] == unused


def test_one_class_alone_is_refused():
    with pytest.raises(ConfigError, match="0 of 30"):
        rank(METRICS, np.zeros((30, 3)), np.zeros(30, bool))
