"""Readers of checkpoints under damaged input; all of it: `python -m tests.fuzz.checkpoint`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.checkpoint import Target, fuzz, watch
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


def faulty(read):
    return Target(read, [b"abc"], lambda _rng, data: data, (ValueError,), lambda _data: 50_000)


def reader_that(act):
    """Return a reader that is right about its sample and then does something else."""
    calls = []

    def read(data):
        calls.append(data)
        return act() if len(calls) > 1 else None

    return read


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda: {}["x"], "KeyError"),
        (lambda: exec(""), r"\[.(compile|exec)"),
        (lambda: open(__file__, "rb").close(), "open"),
        (lambda: bytearray(100_000), "bytes for"),
        (lambda: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_the_check_sees_each_kind_of_fault(act, told):
    watch()
    with pytest.raises(AssertionError, match=told):
        fuzz("x", faulty(reader_that(act)), 5, 0)
