"""What the built wheel and source archive hold."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from planish import __version__

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling (extra dev)")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built / f"planish-{__version__}-py3-none-any.whl") as archive:
        yield {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_one_top_level_name(wheel):
    assert {name.split("/")[0] for name in wheel} == {
        "planish",
        f"planish-{__version__}.dist-info",
    }


def test_the_wheel_holds_every_tracked_file_of_the_package_and_no_other(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/planish"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    tracked = {line.removeprefix("src/") for line in listed.stdout.splitlines()}
    assert {name for name in wheel if name.startswith("planish/")} == tracked
    assert {"planish/py.typed", "planish/presets/dapo-tiny.toml"} <= set(wheel)
    assert not [name for name in wheel if name.endswith((".pyc", ".so"))]


def test_the_wheel_has_the_command_the_licence_and_the_extras(wheel):
    info = f"planish-{__version__}.dist-info"
    assert b"planish = planish.__main__:main" in wheel[f"{info}/entry_points.txt"]
    assert b"Apache License" in wheel[f"{info}/licenses/LICENSE"]
    metadata = wheel[f"{info}/METADATA"].decode()
    for extra in ("curate", "reward", "pipelines", "rollout", "train", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_source_archive_holds_no_tests_and_no_caches(built):
    with tarfile.open(built / f"planish-{__version__}.tar.gz") as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names}
    assert {"src", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO"} <= tops
    assert tops & {"components", "pipelines", ".venv", ".cache", "runs"} == set()
    assert [name for name in names if name.endswith(".py") and not name.startswith("src/")] == []
