"""`examples/own_reward`: its package and the commands of its page but the demo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples/own_reward"
pytestmark = pytest.mark.slow


def commands():
    """Return the lines of the first block of the page."""
    page = (EXAMPLE / "README.md").read_text("utf-8")
    return re.findall(r"```\n(.*?)```", page, re.DOTALL)[0].splitlines()


def run(line):
    """Run one line of the page with the variables that its first line sets."""
    line = line.replace(".venv/bin/", f"{sys.executable} -m ")
    return subprocess.run(
        ["bash", "-c", f"{commands()[0]}\n{line}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_tests_of_the_package_pass():
    done = run(commands()[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_check_prints_what_the_page_shows():
    done = run(commands()[2])
    shown = re.findall(r"```\n(digit_reward.*?)\n```", (EXAMPLE / "README.md").read_text())[0]
    assert done.returncode == 0, done.stderr
    # The time of the slowest call is this machine's.
    assert re.sub(r"\d+\.\d+ s", "", done.stdout.strip()) == re.sub(r"\d+\.\d+ s", "", shown)


def test_the_package_is_found_by_its_entry_point_once_installed(tmp_path, monkeypatch):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--no-build-isolation", "--target", str(tmp_path), str(EXAMPLE)]
    subprocess.run(install, check=True, timeout=300)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = subprocess.run(
        [sys.executable, "-m", "planish", "verifier", "check", "digits"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "digits: keeps the contract" in done.stdout
