"""The curves of a run on a real tracking server."""

import math
import subprocess
import sys

import pytest

from tests.servers.run_mlflow import MlflowServer, require_mlflow
from tests.unit.show.test_track import EXPECTED, evaluate, root, write_iteration

__all__ = ["root"]

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture
def server(tmp_path):
    require_mlflow()
    made = MlflowServer(tmp_path / "server")
    made.start()
    yield made
    made.end()


def send(root: str, url: str) -> subprocess.CompletedProcess[str]:
    """Bring a server to where the run is."""
    command = [sys.executable, "-m", "planish", "track", root, "--to", f"mlflow={url}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_values_on_the_server_equal_the_records(root, server, closed_port, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    assert send(root, server.url).stdout == "8 values written to mlflow\n"
    write_iteration(root, 2)
    down = send(root, f"http://127.0.0.1:{closed_port}")
    assert (down.returncode, down.stderr.count("Traceback")) == (75, 0)
    assert "each tracker must take the run, got mlflow: MlflowException" in down.stderr
    evaluate(root, 2)
    assert send(root, server.url).stdout == "9 values written to mlflow\n"

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=server.url)
    experiment = client.get_experiment_by_name("planish")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"train.learning_rate": "0.001"}
    assert run.data.metrics.keys() == EXPECTED.keys()
    for name, wanted in EXPECTED.items():
        stored = client.get_metric_history(run.info.run_id, name)
        found = sorted((metric.step, metric.value) for metric in stored)
        # The server keeps infinity as the largest number that it has.
        bounded = [(s, min(v, sys.float_info.max) if v == v else math.nan) for s, v in wanted]
        assert str(found) == str(bounded)
