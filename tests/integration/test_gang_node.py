"""Machines of a gang as processes here: what the others end with when one is gone."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from planish.base.errors import EXIT_TRANSIENT
from tests.integration.waiting import wait_for
from tests.servers.program import free_port


@contextlib.contextmanager
def machine(index, port, folder):
    """Start a machine of two; its output goes to a file in a folder."""
    line = [sys.executable, "-m", "planish.run.gang.node", "--name", "g", "--nodes", "2"]
    line += ["--processes", "1", "--rendezvous", f"127.0.0.1:{port}", "--index", str(index)]
    line += ["--address", "127.0.0.1", "tests.integration.gang_rank", str(folder)]
    with (folder / f"log-{index}").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        yield process
    finally:
        (folder / "go").touch()
        process.kill()
        process.wait(10)


@pytest.mark.slow
def test_a_machine_whose_rendezvous_is_gone_ends_as_one_that_may_be_tried_again(tmp_path: Path):
    port = free_port()
    with machine(0, port, tmp_path) as first, machine(1, port, tmp_path) as second:
        ranks = [tmp_path / f"rank-{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() and path.read_text() for path in ranks), 90)
        first.kill()
        assert second.wait(60) == EXIT_TRANSIENT, (tmp_path / "log-1").read_text()
    assert "left alone by other machines index=1" in (tmp_path / "log-1").read_text()
