"""`planish run` as a user meets it: signals, roots that cannot be, one beside another."""

import os
import re
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


class Workplace:
    """A folder where runs are started, with stages that only write down that they ran."""

    def __init__(self, folder: Path, name: str = "place"):
        self.folder = folder / name
        self.mark = folder
        # Packages of the user, and none of ours.
        for part in ("pipelines", "components"):
            (self.folder / part).mkdir(parents=True)
            (self.folder / part / "__init__.py").touch()
        self.modules = write_fake_stages(folder / "modules")
        self.root = folder / "run"
        self.root.mkdir()

    def start(self, *options: str, rollout_seconds: float = 0.0) -> subprocess.Popen[str]:
        environment = {
            **marks(self.mark),
            "PYTHONPATH": f"{self.modules}:{os.environ['PYTHONPATH']}",
            "FAKE_ROLLOUT_SECONDS": str(rollout_seconds),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "planish", "run", "--no-control", *options],
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
def workplace(tmp_path):
    yield (made := Workplace(tmp_path))
    for pid in marked(made.mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_to_the_command_alone_ends_all_of_it(workplace, number, code, told):
    process = workplace.start_at_rollout()
    sent = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - sent < 20
    assert errors == f"{told}; the same command resumes\n"
    wait_until_none(workplace.mark, 1.0)
    assert read_events(workplace.root)[-1]["stage"] == "rollout"


def test_a_signal_to_the_local_runner_alone_ends_its_stages_and_no_exit_task_runs(workplace):
    command = [sys.executable, "-m", "pipelines.local", "--root", workplace.root.as_uri()]
    environment = {**marks(workplace.mark), "FAKE_ROLLOUT_SECONDS": "600"}
    environment |= {
        "PYTHONPATH": f"{workplace.modules}:{REPOSITORY}:{os.environ['PYTHONPATH']}",
        "TMPDIR": str(workplace.mark),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(e["stage"] == "rollout" for e in read_events(workplace.root)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.endswith("stopped by SIGTERM; the same command resumes\n")
    wait_until_none(workplace.mark, 1.0)
    assert read_events(workplace.root)[-1]["stage"] == "rollout"
    assert list(workplace.mark.glob("planish-kfp-*")) == []


def test_it_tells_why_a_run_could_not_begin(workplace):
    code, output, errors = workplace.run("--iterations", "99", "--root", workplace.root.as_uri())
    assert (code, errors) == (2, "")
    assert re.search("^the run failed: `num_iterations` must be 1 to [0-9]+, got 99;", output, re.M)


def test_a_folder_whose_path_has_a_space_and_an_umlaut_keeps_its_runs_inside(tmp_path):
    made = Workplace(tmp_path, "müder Hund %41#1")
    code, output, _ = made.run("--iterations", "1")
    assert code == 0, output
    assert '"iterations": 1' in output.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {made.folder.name, "modules", "run"}
    (root,) = made.folder.glob("runs/dapo-tiny-*")
    assert read_events(root)[-1]["stage"] == "report"


def test_a_second_run_on_a_live_root_writes_nothing(workplace):
    first = workplace.start_at_rollout()

    def files():
        return {
            path: path.read_bytes()
            for folder in (workplace.root, workplace.folder / "runs")
            for path in folder.rglob("*")
            if path.is_file()
        }

    before = files()
    code, output, errors = workplace.run("--root", workplace.root.as_uri())
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert "must be used by one run at a time" in errors
    assert files() == before
    first.terminate()
    first.communicate(timeout=60)
