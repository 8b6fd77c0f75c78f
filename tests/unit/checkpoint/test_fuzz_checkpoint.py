"""Readers of checkpoints under damaged input; all of it: `python -m tests.fuzz.checkpoint`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thin import examples

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = {"metadata", "metadata 1", "commit", "header", "extra", "journal"}


def run(cases, seed):
    """Fuzz in a process of its own: its audit hook stays until the process ends."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.checkpoint", f"--cases={cases}", f"--seed={seed}"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {r["target"]: r for r in map(json.loads, done.stdout.splitlines()[:-1])}


@pytest.mark.slow
def test_damaged_files_cause_nothing_but_our_errors():
    cases = examples(10_000)
    found = run(cases, seed=0)
    assert set(found) == NAMES
    assert sum(result["cases"] for result in found.values()) >= cases
    for name in ("metadata", "metadata 1", "commit", "header", "extra"):
        assert found[name]["refused"] > found[name]["cases"] / 2
        assert found[name]["read"] > 0
