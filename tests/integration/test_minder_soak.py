"""Hours of the service on a clock that runs fast."""

import pytest

from tests.benchmarks import minder_soak


@pytest.mark.full
@pytest.mark.slow
def test_four_simulated_hours_tell_every_fault_once_and_resolve_it():
    result = minder_soak.soak(4)
    assert minder_soak.faults_of(result) == []
    assert (result["fired"], result["not_resolved"], result["told_twice"]) == (5, 0, 0)
    assert result["series"] < 200
