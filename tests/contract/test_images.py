"""Building, pushing and loading images, with programs that write down how they were called."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import planish
from components.images import IMAGES

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDER = """#!/bin/sh
echo "${{0##*/}} $*" >> "{folder}/calls"
case "${{0##*/}} $1" in
  "docker save") echo archive ;;
  "docker image") echo '["other/core@sha256:0", "mirror/team/core@sha256:1"]' ;;
  "docker build") case "$*" in *BASE=broken*) exit 7 ;; esac ;;
  "sudo "*) exec "$@" ;;
  "k3s "*|"ctr "*) read -r line; echo "read $line" >> "{folder}/calls" ;;
esac
"""


@pytest.fixture
def call(tmp_path):
    """Run the tool among programs that do nothing; return its result and their command lines."""
    (tmp_path / "bin").mkdir()
    for name in ("docker", "kind", "minikube", "k3s", "ctr", "sudo"):
        program = tmp_path / "bin" / name
        program.write_text(RECORDER.format(folder=tmp_path))
        program.chmod(0o755)

    def run(*words):
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "images" / "build.py"), *words],
            env={**os.environ, "PATH": str(tmp_path / "bin")},
            capture_output=True,
            text=True,
        )
        calls = tmp_path / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return done, [line for line in lines if not line.startswith("sudo ")]

    return run


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_what_an_image_pins_is_a_file_that_meets_the_pins_of_the_package(name):
    text = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text()
    (file,) = set(re.findall(r"(constraints[a-z-]*\.txt)", text))
    lines = (REPOSITORY / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) > 100
    (extras,) = re.findall(r'"/build\[([a-z,]+)\]"', text)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name != "planish":
            assert requirement.specifier.contains(pins[requirement.name]), line


def test_all_images_are_built_under_the_names_that_pipelines_use(call):
    done, calls = call()
    assert done.returncode == 0
    assert calls == [
        f"docker build -f images/{name}.Dockerfile -t {IMAGES[name]} ." for name in sorted(IMAGES)
    ]


def test_a_pushed_image_is_named_by_its_digest_as_submit_takes_it(call):
    done, calls = call("--only", "core", "--push", "mirror/team/", "--build-arg", "BASE=x")
    reference = f"mirror/team/core:{planish.__version__}"
    assert calls[:2] == [
        f"docker build -f images/core.Dockerfile -t {reference} --build-arg BASE=x .",
        f"docker push {reference}",
    ]
    assert done.stdout == "--image core=mirror/team/core@sha256:1\n"


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("kind", ["kind load docker-image {image} --name kind"]),
        ("minikube", ["minikube image load {image} --profile minikube"]),
        ("k3s", ["docker save {image}", "k3s ctr images import -", "read archive"]),
        (
            "containerd",
            ["docker save {image}", "ctr --namespace k8s.io images import -", "read archive"],
        ),
    ],
)
def test_images_are_loaded_onto_nodes_without_a_registry(call, loader, expected):
    done, calls = call("--only", "core", "--load", loader)
    assert done.returncode == 0, done.stderr
    assert sorted(calls[1:]) == sorted(line.format(image=IMAGES["core"]) for line in expected)


def test_a_build_that_fails_ends_everything_in_one_line(call):
    done, calls = call("--build-arg", "BASE=broken", "--push", "mirror")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "docker must succeed, got exit code 7"
    assert len(calls) == 1


def test_a_program_that_is_not_there_is_named_before_anything_is_built(call, tmp_path):
    (tmp_path / "bin" / "kind").unlink()
    done, calls = call("--load", "kind")
    assert done.returncode == 2
    assert "kind must be on the PATH" in done.stderr
    assert calls == []
