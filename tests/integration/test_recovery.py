"""A machine breaks while a gang trains; the whole of it is the program `recovery`."""

import pytest

from tests.integration.recovery import main
from tests.servers.run_control_plane import require_kubernetes
from tests.servers.run_minio import require_minio
from tests.servers.run_prometheus import require_prometheus

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Clients of the package `kubernetes` keep a connection until they are collected.
    pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"),
]


def test_a_run_goes_on_without_the_machine_on_another_grid(tmp_path):
    require_kubernetes()
    require_minio()
    require_prometheus()
    assert main(["--times", "1", "--seed", "1", "--keep", str(tmp_path)]) == 0
    assert "Faults and recovery" in (tmp_path / "trial-0.html").read_text()
