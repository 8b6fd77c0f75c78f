"""Jobs of reinforcement learning, whose machines differ for minutes and are well."""

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab.evaluate import outcome_of
from tests.minder_lab.simulator import simulate_rl
from tests.minder_lab.simulator.rl import Plan


def outcome(case):
    config = minder_config()
    models = load_models(default_models(), config.denoise, config.detect.metrics)
    return outcome_of(case, models, config)


def test_equal_arguments_give_equal_jobs():
    one, other = simulate_rl(5, machines=8), simulate_rl(5, machines=8)
    for name, values in one.frame.values.items():
        np.testing.assert_array_equal(values, other.frame.values[name])


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "tail", "spins"), [(901, 60.0, False), (902, 180.0, True)])
def test_machines_that_end_their_rollouts_one_after_the_other_are_no_fault(seed, tail, spins):
    case = simulate_rl(seed, plan=Plan(16, tail, 0.0, 0, spins, False))
    assert outcome(case).alarms == ()


@pytest.mark.slow
def test_a_fault_in_such_a_job_is_named():
    found = outcome(simulate_rl(10507, fault="any"))
    assert [alarm.machine for alarm in found.right] == list(found.fault.machines)
    assert found.wrong == ()


@pytest.mark.long
def test_of_forty_healthy_jobs_at_most_one_is_paged_and_faults_are_found():
    seeds = range(20_000, 20_040)
    paged = [seed for seed in seeds if outcome(simulate_rl(seed)).alarms]
    assert len(paged) <= 1, paged
    faulty = [outcome(simulate_rl(seed, fault="any")) for seed in seeds]
    hits = sum(bool(found.right) for found in faulty if found.fault.detectable)
    missed = sum(not found.right for found in faulty if found.fault.detectable)
    false = sum(len(found.wrong) for found in faulty)
    assert 2 * hits / (2 * hits + missed + false) >= 0.85
