"""What a pod does with a program that failed, was killed or was asked to end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import marks, wait_until_none

SUPERVISOR = """
import sys
from planish.run import again
again.PAUSE_SECONDS = float(sys.argv[1])
sys.exit(again.main(sys.argv[2:]))
"""

PROGRAM = """
import os, signal, subprocess, sys, time
attempts = open(sys.argv[1], "a")
print(os.environ["KFP_RETRY_INDEX"], file=attempts, flush=True)
is_first = open(sys.argv[1]).read().count("\\n") == 1
subprocess.Popen(["sleep", "600"], start_new_session=True)
match sys.argv[2]:
    case "killed once" if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    case "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", file=attempts, flush=True)
        time.sleep(600)
    case code if code.isdecimal():
        sys.exit(int(code))
"""


def begin(
    tmp_path: Path, what: str, pause_seconds: float = 0.0, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "attempts"), what]
    words = [sys.executable, "-c", SUPERVISOR, str(pause_seconds), *command]
    return subprocess.Popen(words, env={**marks(tmp_path), "KFP_RETRY_INDEX": "1"}, stderr=stderr)


@pytest.mark.parametrize(
    ("what", "attempts", "code"),
    [("killed once", "23", 0), ("0", "2", 0), ("1", "23", 1), ("75", "23", 75), ("2", "2", 2)],
)
def test_what_failed_is_run_once_more_and_a_fault_of_the_settings_is_not(
    tmp_path: Path, what: str, attempts: str, code: int
) -> None:
    assert begin(tmp_path, what).wait(timeout=60) == code
    # Each attempt has a number, and so a log, of its own.
    assert (tmp_path / "attempts").read_text().split() == [*attempts]
    # Nor does an attempt leave anything behind for the next one, such as a rank on its GPU.
    wait_until_none(tmp_path, seconds=60)


def test_a_program_that_is_asked_to_end_is_not_run_again(tmp_path: Path) -> None:
    process = begin(tmp_path, "waits")
    told, end = tmp_path / "attempts", time.monotonic() + 60
    while not told.exists() or "ready" not in told.read_text():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert told.read_text().split() == ["2", "ready"]


def test_a_pod_that_is_asked_to_end_between_attempts_does(tmp_path: Path) -> None:
    process = begin(tmp_path, "1", pause_seconds=600.0, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == b"exit code 1: once more in this pod, as attempt 3\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    process.stderr.close()
    assert (tmp_path / "attempts").read_text().split() == ["2"]
