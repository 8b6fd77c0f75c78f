import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.waiting import wait_for
from tests.processes import marked, marks, wait_until_none

LIMIT = 300.0
"""Seconds after which a test that hangs ends."""

STAGE = """
import subprocess, sys, time
from planish.run import signals
from planish.run.stage import Outcome, execute

signals.STOP_SECONDS = float(sys.argv[3])

def work(context):
    subprocess.Popen(["sleep", "600"])
    open(sys.argv[2], "w").close()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            if sys.argv[4] == "obedient":
                raise
        if sys.argv[4] == "wrapped":
            raise ValueError("of a library")

execute("toy", work, root=sys.argv[1], config_sha256=None, outputs={})
"""


def stop_stage(tmp_path: Path, number: int, how: str, limit_seconds: float) -> int:
    """Send a signal to a stage at work; return its exit code."""
    begun = tmp_path / "begun"
    words = [tmp_path.as_uri(), str(begun), str(limit_seconds), how]
    process = subprocess.Popen([sys.executable, "-c", STAGE, *words], env=marks(tmp_path))
    wait_for(lambda: begun.exists() or process.poll() is not None, LIMIT)
    process.send_signal(number)
    return process.wait(timeout=LIMIT)


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "obedient"), (signal.SIGINT, "obedient"), (signal.SIGTERM, "wrapped")],
)
def test_a_stage_that_must_stop_says_so_and_may_be_tried_again(
    tmp_path: Path, number: int, how: str
) -> None:
    assert stop_stage(tmp_path, number, how, 10 * LIMIT) == 75
    (log,) = (tmp_path / "logs").glob("*.json")
    entry = json.loads(log.read_text())
    assert (entry["state"], entry["exit_code"]) == ("failed", 75)
    told = {signal.SIGTERM: "stopped by SIGTERM", signal.SIGINT: "interrupted"}
    assert entry["error"] == told[number]
    for pid in marked(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_a_stage_that_does_not_stop_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    assert stop_stage(tmp_path, signal.SIGTERM, "stubborn", 1.0) == 75
    wait_until_none(tmp_path, LIMIT)


ENDS_ALL = """
import signal, subprocess, sys
from planish.run.signals import end_descendants

deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
command = [sys.executable, "-c", nest]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
end_descendants(0.5)
print(child.wait(timeout=120))
"""


def test_descendants_end_in_sessions_of_their_own_and_when_they_ignore_the_signal(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ALL],
        env=marks(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(-signal.SIGTERM)]
    wait_until_none(tmp_path, LIMIT)


@pytest.mark.slow
def test_a_keyboard_interrupt_of_a_command_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def reward(response, answer):\n"
        "    pathlib.Path(__file__).with_name('begun').touch()\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "planish", "verifier", "check", "slow:reward"]
    process = subprocess.Popen(
        [*command, "--timeout-seconds", "600"],
        env={**marks(tmp_path), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (tmp_path / "begun").exists() or process.poll() is not None, LIMIT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, errors) == (130, "planish: interrupted; the same command resumes\n")
    wait_until_none(tmp_path, LIMIT)
