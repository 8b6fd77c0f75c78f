"""The verbs of `python -m tests.minder_lab` on few jobs: tables, files, wrong arguments."""

from __future__ import annotations

import json

import pytest

from planish.minder.lab.files import read_frame
from tests.minder_lab.__main__ import main

FEW = ("--faults", "1", "--normal", "1")


def run(capsys, *arguments):
    """Return exit code, and what was printed."""
    code = main([*map(str, arguments)])
    return code, capsys.readouterr()


@pytest.mark.long
def test_evaluate_prints_a_table_and_writes_every_figure(tmp_path, capsys):
    path = tmp_path / "figures.json"
    settings = tmp_path / "minder.toml"
    settings.write_text("[service]\ninterval_seconds = 120\n[prometheus]\nurl = 'x'\n", "utf-8")
    code, shown = run(
        *(capsys, "evaluate", *FEW, "--seed", 4_100_000, "--variants", "raw,threshold"),
        *("--json", path, "--config", settings),
    )
    assert code == 0
    names = [line.split(" | ")[0] for line in shown.out.splitlines()[2:4]]
    assert names == ["| raw", "| threshold"]
    figures = json.loads(path.read_text("utf-8"))
    assert figures["seeds"] == [4_100_000, 4_100_001]
    raw = figures["variants"]["raw"]
    assert (raw["cases"], raw["faults"]) == (2, 1)
    # A call every two minutes of two jobs of at least twenty.
    assert 20 <= raw["calls"] <= 60


def test_a_simulated_job_is_written_with_its_truth_on_the_screen(tmp_path, capsys):
    options = ("--seed", 12, "--machines", 8, "--minutes", 25, "--fault", "nic-dropout")
    code, shown = run(capsys, "simulate", tmp_path / "job.npz", *options)
    truth = json.loads(shown.out)["truth"]
    assert (code, truth["kind"], truth["detectable"]) == (0, "nic-dropout", True)
    assert read_frame(tmp_path / "job.npz").num_machines == 8
    run(capsys, "simulate", tmp_path / "job.csv", "--machines", 5, "--minutes", 6, "--raw")
    assert read_frame(tmp_path / "job.csv").num_machines == 5
