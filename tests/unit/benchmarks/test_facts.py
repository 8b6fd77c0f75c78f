"""What benchmarks ask of the machine."""

import subprocess
import sys

import pytest

from tests.benchmarks.facts import require_idle_machine


@pytest.mark.slow
def test_a_measurement_refuses_a_machine_where_another_process_computes() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with pytest.raises(SystemExit, match=r"must be idle .* cores busy, got .*process \d+"):
            require_idle_machine(seconds=1.0)
    finally:
        process.kill()
        process.wait()


def test_a_measurement_starts_where_others_use_no_more_than_they_may() -> None:
    assert require_idle_machine(seconds=0.2, max_busy_cores=1e9) >= 0.0
