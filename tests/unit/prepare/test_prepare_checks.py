"""Checks across sections."""

import pytest

from planish.errors import ConfigError
from planish.prepare.checks import check_config, check_run
from planish.prepare.settings import build_config

BASE = {"preset": "", "config": "", "model": "", "dataset": "", "seed": -1}


def test_the_published_configuration_has_no_fault():
    assert build_config(**BASE, overrides="")["algorithm"]["name"] == "dapo"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("rollout.max_response_tokens=100", "`reward.max_response_tokens` must equal"),
        ("train.rollouts_per_minibatch=8193", "8192 rollouts of an iteration"),
        ("rollout.starvation_policy=relax", "`reward.keep_uniform_groups` must be true"),
    ],
)
def test_impossible_combinations_are_told(overrides, words):
    with pytest.raises(ConfigError, match=words):
        build_config(**BASE, overrides=overrides)


def test_faults_of_several_checks_come_together():
    overrides = "rollout.max_response_tokens=100 train.rollouts_per_minibatch=9000"
    with pytest.raises(ConfigError) as caught:
        build_config(**BASE, overrides=overrides)
    assert "20480 and 100" in str(caught.value)
    assert "got 9000" in str(caught.value)


def test_a_buffer_beyond_the_limit_is_told():
    class Table:
        overlong_buffer_tokens = 30
        max_response_tokens = 20

    assert check_config({"reward": Table, "rollout": Table}) == [
        "`reward.overlong_buffer_tokens` must be 0 to `rollout.max_response_tokens` (20), got 30"
    ]


def test_missing_sections_are_not_checked():
    assert check_config({}) == []


@pytest.mark.parametrize(("shards", "faults"), [(1, 0), (128, 0), (129, 1), (0, 1)])
def test_shards_must_not_outnumber_the_groups(shards, faults):
    assert len(check_run({"rollout": {"prompts_per_iteration": 128}}, shards)) == faults


def test_the_small_model_cannot_run_the_published_lengths():
    config = build_config(**BASE, overrides="")
    faults = check_run(config, 8)
    assert [fault.split(".")[0] for fault in faults] == ["`rollout", "`evaluate"]
    assert "(1024)" in faults[0]
    assert "got 20480" in faults[0]
    assert check_run(build_config(**{**BASE, "model": "some/model"}, overrides=""), 8) == []


def test_the_tiny_presets_can_run_on_two_shards():
    for preset in ("dapo-tiny", "grpo-tiny"):
        config = build_config(**{**BASE, "preset": preset}, overrides="")
        assert check_run(config, 2) == []
