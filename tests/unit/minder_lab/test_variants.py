"""Other detectors on hand-made jobs: distances by hand, and who is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.covariance import LedoitWolf

from planish.base.errors import ConfigError
from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity
from planish.minder.detect.preprocess import prepare
from planish.minder.lab.vae import Training
from tests.minder_lab.variants_fit import fit_comparison, load_comparison
from tests.minder_lab.variants_traces import (
    ConcatenatedDetector,
    IntegratedDetector,
    MahalanobisDetector,
    StaticDetector,
    ZscoreDetector,
    ledoit_wolf,
    mahalanobis,
    static_limits,
)
from tests.unit.minder.waves import METRICS, MODELS, START, waves


def made(*, seconds=900, length=400, seed=0):
    """The third of twelve machines lies below the others for a while."""
    frame = waves(12, seconds, swing=15, seed=seed)
    frame.values["cpu_usage"][300 : 300 + length, 2] -= 30
    return frame


def config(**detect):
    return minder_config({"detect": {"metrics": list(METRICS), **detect}})


NO_FLOOR = {"floors": None, "rest_share": 0.0}
MADE = {
    "con": lambda: ConcatenatedDetector(MODELS, config()),
    "int": lambda: IntegratedDetector(MODELS, config(), Identity("all")),
    "mahalanobis": lambda: MahalanobisDetector(MODELS, config(**NO_FLOOR)),
    "zscore": lambda: ZscoreDetector(MODELS, config(**NO_FLOOR)),
    "static": lambda: StaticDetector(
        MODELS,
        config(**NO_FLOOR, theta=0.5, kappa=None),
        static_limits([prepare(made(length=0, seed=5), config(), {})]),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_each_detector_names_the_odd_machine_and_nobody_in_a_healthy_job(name):
    found = MADE[name]().call(made())
    assert [one.machine for one in found.findings] == ["node-002"]
    assert START + 290 <= found.findings[0].run_start <= START + 360
    assert MADE[name]().call(made(length=0)).findings == ()


@pytest.mark.parametrize("name", ["con", "int", "mahalanobis"])
def test_later_calls_look_at_new_windows_only_and_agree_with_new_detectors(name):
    frame, detector = made(seconds=1000), MADE[name]()
    for end in (900, 960):
        piece = frame.slice(START + end - 900, START + end)
        known = dataclasses.replace(detector.call(piece), call_seconds=0.0)
        assert known == dataclasses.replace(MADE[name]().call(piece), call_seconds=0.0)
    assert detector.windows_computed == 60


def test_the_shrunken_covariance_is_that_of_scikit_learn():
    rng = np.random.default_rng(2)
    for machines, features in ((5, 14), (30, 6)):
        x = rng.normal(size=(3, machines, features)) * rng.uniform(0.1, 2, features)
        x -= x.mean(axis=1, keepdims=True)
        ours = ledoit_wolf(x, np.full(3, machines))
        for one, data in zip(ours, x, strict=True):
            theirs = LedoitWolf(assume_centered=True).fit(data).covariance_
            np.testing.assert_allclose(one, theirs, atol=1e-7)


def test_machines_that_are_alike_have_no_mahalanobis_distance_and_absent_ones_do_not_count():
    alike = np.ones((1, 4, 3))
    assert mahalanobis(alike, np.ones((1, 4), bool)).tolist() == [[0.0] * 4]
    rng = np.random.default_rng(0)
    vectors, here = rng.normal(size=(1, 6, 3)), np.array([[True] * 5 + [False]])
    small = mahalanobis(vectors[:, :5], np.ones((1, 5), bool))
    np.testing.assert_allclose(mahalanobis(vectors, here)[:, :5], small)


@pytest.mark.slow
def test_the_integrated_model_and_static_limits_survive_the_disk(tmp_path):
    frames = [made(length=0, seed=seed, seconds=120) for seed in range(4)]
    training = Training(max_epochs=6, batch_size=256, learning_rate=1e-2)
    error = fit_comparison(frames, tmp_path, config(), {}, training)
    found = load_comparison(tmp_path, METRICS)
    assert 0 < error < 0.02
    assert set(found.static_limits) == set(METRICS)
    windows = np.random.default_rng(0).random((6, 16)).astype(np.float32)
    assert found.integrated().embed(windows).shape == (6, 16)
    with pytest.raises(ConfigError, match="fit-comparison"):
        load_comparison(tmp_path, ("cpu_usage",))
