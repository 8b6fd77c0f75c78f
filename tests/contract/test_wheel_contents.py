"""What the built wheel and source archive hold."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from planish import __version__
from tests.unit.submit.kfp_server import Server

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


@pytest.mark.slow
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
    assert {"planish/py.typed", "planish/base/presets/dapo-tiny.toml"} <= set(wheel)
    assert not [name for name in wheel if name.endswith((".pyc", ".so"))]


def test_the_wheel_has_the_command_the_licence_and_the_extras(wheel):
    info = f"planish-{__version__}.dist-info"
    assert b"planish = planish.__main__:main" in wheel[f"{info}/entry_points.txt"]
    assert b"Apache License" in wheel[f"{info}/licenses/LICENSE"]
    metadata = wheel[f"{info}/METADATA"].decode()
    for extra in ("curate", "reward", "pipelines", "rollout", "train", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    """`planish` of the wheel alone; what it depends on comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    wheel = built / f"planish-{__version__}-py3-none-any.whl"
    subprocess.run([*uv, "--python", folder / "bin/python", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin/planish"


@pytest.mark.slow
def test_the_installed_package_is_enough_to_submit(program, tmp_path):
    def run(*words, name="planish"):
        # Neither the checkout nor its package is on the path.
        settings = {"PATH": "/usr/bin", "HOME": str(tmp_path)}
        return subprocess.run(
            [program.parent / name, *words],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
        )

    code = "import planish, sys; print(planish.__file__)"
    assert run("-c", code, name="python").stdout.startswith(str(program.parents[1]))
    words = ["submit", "s3://bucket/run", "--profile", "gpu-1x8", "-p", "preset=dapo-qwen2.5-7b"]
    golden = (REPOSITORY / "src/planish/submit/compiled/post-train-gpu-1x8.yaml").read_text()
    assert run(*words, "--dry-run").stdout == golden
    server = Server()
    done = run(*words, "--host", server.url)
    (run_id,) = server.objects["runs"]
    assert (done.returncode, done.stdout) == (0, f"{run_id}\n")
    (sent,) = server.posted("runs")
    assert sent["pipeline_spec"]["pipeline_spec"] == next(yaml.load_all(golden, yaml.CSafeLoader))
    server.close()
    done = run(*words, "--host", server.url)
    assert (done.returncode, len(done.stderr.splitlines())) == (75, 1)


def test_the_source_archive_holds_no_tests_and_no_caches(built):
    with tarfile.open(built / f"planish-{__version__}.tar.gz") as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names}
    assert {"src", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO"} <= tops
    assert tops & {"components", "pipelines", ".venv", ".cache", "runs"} == set()
    assert [name for name in names if name.endswith(".py") and not name.startswith("src/")] == []
