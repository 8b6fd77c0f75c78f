"""The demo as a user meets it: signals, roots that cannot be, a second one beside the first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.fake_stages import read_events, write_fake_stages
from tests.processes import marked, marks, wait_until_none

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


class Checkout:
    """The pipelines in a folder of their own, with stages that only write down that they ran."""

    def __init__(self, folder: Path, name: str = "checkout"):
        self.folder = folder / name
        self.mark = folder
        for part in ("pipelines", "components"):
            shutil.copytree(REPOSITORY / part, self.folder / part)
        self.modules = write_fake_stages(folder / "modules")
        self.root = folder / "run"
        self.root.mkdir()

    def start(self, *options: str, rollout_seconds: float = 0.0) -> subprocess.Popen[str]:
        environment = {
            **marks(self.mark),
            "PYTHONPATH": f"{self.modules}:{REPOSITORY / 'src'}",
            "FAKE_ROLLOUT_SECONDS": str(rollout_seconds),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.demo", "--no-control", *options],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        output, errors = process.communicate(timeout=120)
        return process.returncode, output, errors

    def start_at_rollout(self) -> subprocess.Popen[str]:
        """Start on `root` and wait until the rollouts, which last long, are under way."""
        process = self.start("--root", self.root.as_uri(), rollout_seconds=600.0)
        deadline = time.monotonic() + 120
        while sum(e["stage"] == "rollout" for e in read_events(self.root)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        return process


@pytest.fixture
def checkout(tmp_path):
    yield (made := Checkout(tmp_path))
    for pid in marked(made.mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_to_the_demo_alone_ends_all_of_it(checkout, number, code, told):
    process = checkout.start_at_rollout()
    sent = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - sent < 20
    assert errors == f"{told}; the same command resumes\n"
    wait_until_none(checkout.mark, 1.0)
    assert read_events(checkout.root)[-1]["stage"] == "rollout"


def test_a_signal_to_the_local_runner_alone_ends_its_stages_and_no_exit_task_runs(checkout):
    command = [sys.executable, "-m", "pipelines.local", "--root", checkout.root.as_uri()]
    environment = {**marks(checkout.mark), "FAKE_ROLLOUT_SECONDS": "600"}
    environment |= {
        "PYTHONPATH": f"{checkout.modules}:{REPOSITORY / 'src'}",
        "TMPDIR": str(checkout.mark),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=checkout.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(e["stage"] == "rollout" for e in read_events(checkout.root)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.endswith("stopped by SIGTERM; the same command resumes\n")
    wait_until_none(checkout.mark, 1.0)
    assert read_events(checkout.root)[-1]["stage"] == "rollout"
    assert list(checkout.mark.glob("planish-kfp-*")) == []


def test_the_demo_tells_why_a_run_could_not_begin(checkout):
    code, output, errors = checkout.run("--iterations", "99", "--root", checkout.root.as_uri())
    assert (code, errors) == (2, "")
    assert re.search("^error: `num_iterations` must be 1 to [0-9]+, got 99;", output, re.MULTILINE)


def test_a_checkout_whose_path_has_a_space_and_an_umlaut_keeps_its_runs_inside(tmp_path):
    made = Checkout(tmp_path, "müder Hund %41#1")
    code, output, _ = made.run("--iterations", "1")
    assert code == 0, output
    assert '"iterations": 1' in output.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {made.folder.name, "modules", "run"}
    (root,) = made.folder.glob("runs/dapo-tiny-*")
    assert read_events(root)[-1]["stage"] == "report"


def test_a_second_demo_on_a_live_root_writes_nothing(checkout):
    first = checkout.start_at_rollout()

    def files():
        return {
            path: path.read_bytes()
            for folder in (checkout.root, checkout.folder / "runs")
            for path in folder.rglob("*")
            if path.is_file()
        }

    before = files()
    code, output, errors = checkout.run("--root", checkout.root.as_uri())
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert "must be used by one run at a time" in errors
    assert files() == before
    first.terminate()
    first.communicate(timeout=60)
