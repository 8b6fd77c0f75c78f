"""What the built wheel and source archive hold."""

import email
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from planish import __version__
from tests.contract.test_code_of_pages import FEW
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


def test_the_wheel_holds_every_tracked_file_of_package_and_pipelines_and_no_other(wheel):
    folders = ["src/planish", "components", "pipelines"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    tracked = {
        line.removeprefix("src/") if line.startswith("src/") else f"planish/_pipelines/{line}"
        for line in listed.stdout.splitlines()
    }
    assert {name for name in wheel if name.startswith("planish/")} == tracked
    assert {"planish/py.typed", "planish/base/presets/dapo-tiny.toml"} <= set(wheel)
    assert not [name for name in wheel if name.endswith((".pyc", ".so"))]


def test_the_wheel_has_the_command_the_licence_and_the_extras(wheel):
    info = f"planish-{__version__}.dist-info"
    assert b"planish = planish.__main__:main" in wheel[f"{info}/entry_points.txt"]
    assert b"Apache License" in wheel[f"{info}/licenses/LICENSE"]
    metadata = wheel[f"{info}/METADATA"].decode()
    for extra in ("curate", "monitor", "pipelines", "rollout", "tables", "train", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def requirements(wheel):
    """Return every distribution that `pip install` of the wheel brings, without any extra."""
    metadata = email.message_from_bytes(wheel[f"planish-{__version__}.dist-info/METADATA"])
    found, waiting = {}, metadata.get_all("Requires-Dist")
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        # Extras of a requirement would need a marker of their own; the base asks for none.
        assert not requirement.extras or requirement.marker, requirement
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def program(built, wheel, tmp_path_factory):
    """`planish` of the wheel beside its base requirements and no other package."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    file = built / f"planish-{__version__}-py3-none-any.whl"
    subprocess.run([*uv, "--python", folder / "bin/python", file], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in requirements(wheel).values():
        for path in distribution.files:
            if ".." in path.parts or "__pycache__" in path.parts:
                continue
            source = str(distribution.locate_file(path))
            # With its byte code: to compile it all would take longer than the tests.
            compiled = [cache_from_source(source)] if path.suffix == ".py" else []
            for name in (source, *compiled):
                target = site / path.parent / Path(name).relative_to(Path(source).parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                if os.path.exists(name):
                    target.symlink_to(name)
    return folder / "bin/planish"


def installed(program, *words, home, **settings):
    """Run a program of the environment; neither the checkout nor its package is on the path."""
    settings = {"PATH": "/usr/bin", "HOME": str(home), **settings}
    return subprocess.run([program, *words], cwd=home, env=settings, capture_output=True, text=True)


@pytest.mark.long
def test_the_installed_package_is_enough_to_submit(program, tmp_path):
    def run(*words):
        return installed(program, *words, home=tmp_path)

    code = "import planish, sys; print(planish.__file__)"
    done = installed(program.with_name("python"), "-c", code, home=tmp_path)
    assert done.stdout.startswith(str(program.parents[1]))
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


@pytest.mark.long
def test_the_installed_package_is_enough_to_run_here_and_from_python(program, tmp_path):
    # What the extra brings is that of this environment; its checkout is not on the path.
    def lines(*words):
        return installed(*words, home=tmp_path, PYTHONPATH=sysconfig.get_path("purelib"))

    given = [word for key, value in FEW.items() for word in ("-o", f"{key}={value}")]
    done = lines(program, "run", "--iterations", "1", "--no-control", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert 0 < told["accuracy_before"] < 1
    assert told["root"].startswith(f"{tmp_path.as_uri()}/runs/dapo-tiny-")
    code = f"import planish; print(planish.run_pipeline({FEW}, iterations=1))"
    done = lines(program.with_name("python"), "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("root", "policy", "accuracy_before", "accuracy_after")
    shown = ", ".join(f"{name}={told[name]!r}" for name in names)
    assert done.stdout.splitlines()[-1].startswith(f"Result({shown}, control=None, report=")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "dapo-qwen2.5-0.5b", "model.path=nobody/unknown"],
        ["plan", "dapo-qwen2.5-0.5b", "model.path=https://127.0.0.1:9/m.tar#sha256=" + "0" * 64],
    ],
    ids=["a model of the hub", "a model of a web server"],
)
def test_the_base_requirements_are_enough_to_ask_for_models(program, words, tmp_path):
    done = installed(program, *words, home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    # One line that names what does not answer, and the exit code of what may pass.
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (75, "", 1), done.stderr
    assert done.stderr.startswith("planish: ")
    assert "No module" not in done.stderr


@pytest.mark.slow
def test_the_base_requirements_are_enough_to_upload_and_bring_no_other_package(program, tmp_path):
    def said(code):
        return installed(program.with_name("python"), "-c", code, home=tmp_path).stderr

    module = "planish.stages.export.hub"
    upload = f"from {module} import upload_model as f; f('a/b', {{}}, marker='', is_public=0)"
    assert "an upload to hf://a/b needs a token" in said(upload)
    for module in ("torch", "datasets", "pyarrow", "matplotlib"):
        assert f"No module named '{module}'" in said(f"import {module}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "extra", "code"),
    [
        (["show", "a.parquet"], "tables", 2),
        (["minder", "replay", "--from-file", "a.csv"], "tables", 3),
        (["minder", "train", "models", "--from-file", "a.npz"], "train", 3),
    ],
)
def test_a_command_whose_extra_is_missing_names_it_in_one_line(
    program, words, extra, code, tmp_path
):
    for name in ("a.parquet", "a.csv"):
        (tmp_path / name).write_text("PAR1")
    done = installed(program, *words, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert done.stderr.endswith(f": pip install 'planish[{extra}]'\n")


def test_the_source_archive_holds_no_tests_and_no_caches(built):
    with tarfile.open(built / f"planish-{__version__}.tar.gz") as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names}
    ours = {"src", "components", "pipelines"}
    assert {*ours, "README.md", "LICENSE", "pyproject.toml", "PKG-INFO"} <= tops
    assert tops & {".venv", ".cache", "runs"} == set()
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == ours
