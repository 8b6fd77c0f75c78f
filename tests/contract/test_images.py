"""Building, pushing and loading images, with programs that write down how they were called."""

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import planish
from components.images import IMAGES
from tests.images.__main__ import BUILD, GPU_IMAGES
from tests.images.containers import debian_packages, extras_and_pins

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDER = """#!/bin/sh
echo "${{0##*/}} $*" >> "{folder}/calls"
case "${{0##*/}} $1" in
  "docker info") exit {daemon} ;;
  "docker image") echo '["other/core@sha256:0", "mirror/team/core@sha256:1"]' ;;
  *" build") case "$*" in *BASE=broken*) exit 7 ;; esac ;;
  *" push") case "$2" in --digestfile) echo sha256:2 > "$3" ;; esac ;;
  "sudo "*) exec "$@" ;;
esac
"""
PROGRAMS = ("docker", "podman", "buildah", "kind", "minikube", "k3s", "ctr", "sudo", "mmdebstrap")


@pytest.fixture
def call(tmp_path):
    """Run the tool among programs that do nothing; return its result and their command lines."""

    def run(*words, programs=PROGRAMS, daemon=0):
        (tmp_path / "bin").mkdir()
        for name in programs:
            program = tmp_path / "bin" / name
            program.write_text(RECORDER.format(folder=tmp_path, daemon=daemon))
            program.chmod(0o755)
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "images" / "build.py"), *words],
            env={**os.environ, "PATH": str(tmp_path / "bin"), "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        calls = tmp_path / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        # The names of temporary files are not the same twice.
        lines = [re.sub(rf"{tmp_path}/planish-[^/: ]*", "TEMPORARY", line) for line in lines]
        return done, [line for line in lines if not line.startswith(("sudo ", "docker info"))]

    return run


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_what_an_image_pins_is_a_file_that_meets_the_pins_of_the_package(name):
    extras, file = extras_and_pins(name)
    lines = (REPOSITORY / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) > 100
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name != "planish":
            assert requirement.specifier.contains(pins[requirement.name]), line


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_what_an_image_is_built_from_is_in_the_context_of_the_build(name):
    text = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text()
    nothing, *kept = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert nothing == "*"
    patterns = [line.removeprefix("!") for line in kept if line.startswith("!")]
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.*) ", text, re.M) for word in line.split()
    ]
    assert {"pyproject.toml", "src", "components", "pipelines"} < set(copied)
    for place in copied:
        assert (REPOSITORY / place).exists()
        assert any(fnmatch(place, pattern) for pattern in patterns), place


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_an_image_runs_as_nobody_and_keeps_neither_caches_nor_addresses(name):
    text = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text()
    first, last = text.split("FROM ${BASE}\n")
    assert "PIP_INDEX_URL" in first
    assert "PIP_INDEX_URL" not in last
    assert "pip install --no-cache-dir" in first
    assert "pip install" not in last
    assert re.findall(r"^USER (.*)$", text, re.M) == ["65532:65532"]
    assert last.count("apt-get update") == last.count("rm -rf /var/lib/apt/lists")


@pytest.mark.parametrize("name", sorted(GPU_IMAGES))
def test_an_image_of_a_gpu_stage_has_what_triton_builds_kernels_with(name, tmp_path):
    """gcc and the headers of libc; those of Python are in its image, or in the last package."""
    last = (REPOSITORY / "images" / f"{name}.Dockerfile").read_text().split("FROM ${BASE}\n")[1]
    assert 'ARG PACKAGES="gcc libc6-dev"' in last
    assert "apt-get install --no-install-recommends --yes ${PACKAGES}" in debian_packages(name)
    # The image test calls this in every such image.
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(".so")


def test_the_images_of_gpu_stages_are_known():
    assert {"rollout", "train"} == GPU_IMAGES


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(IMAGES))
def test_the_extras_of_an_image_resolve_to_what_its_constraints_pin(name, tmp_path):
    extras, file = extras_and_pins(name)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"),
            *(word for extra in extras for word in ("--extra", extra)),
            *("--constraint", file, "--no-header", "--no-annotate", "--python-version", "3.11"),
            *("--output-file", str(tmp_path / "resolved.txt")),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if re.search("client error|dns error|error sending request", done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    resolved = (tmp_path / "resolved.txt").read_text().splitlines()
    assert len(resolved) > 50
    # A line that is not pinned would be another version tomorrow.
    assert set(resolved) - set((REPOSITORY / file).read_text().splitlines()) == set()


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


@pytest.mark.parametrize("builder", ["podman", "buildah"])
def test_a_builder_without_a_daemon_gives_the_same_options(call, builder):
    words = ("--with", builder, "--only", "core", "--push", "mirror/team")
    done, calls = call(*words, "--load", "k3s")
    reference = f"mirror/team/core:{planish.__version__}"
    assert calls == [
        f"{builder} build -f images/core.Dockerfile -t {reference} .",
        f"{builder} push {reference} docker-archive:TEMPORARY/image.tar:{reference}",
        "k3s ctr images import TEMPORARY/image.tar",
        f"{builder} push --digestfile TEMPORARY {reference}",
    ]
    assert done.stdout == "--image core=mirror/team/core@sha256:2\n"


@pytest.mark.parametrize(
    ("programs", "daemon", "chosen"),
    [
        (("docker", "podman", "buildah"), 0, "docker"),
        (("docker", "podman", "buildah"), 1, "podman"),
        (("docker", "buildah"), 1, "buildah"),
    ],
)
def test_the_first_builder_that_answers_is_taken(call, programs, daemon, chosen):
    done, calls = call("--only", "core", programs=programs, daemon=daemon)
    assert done.returncode == 0
    assert [line.split()[0] for line in calls] == [chosen]


def test_a_docker_whose_daemon_is_away_is_no_builder(call):
    done, calls = call(programs=("docker",), daemon=1)
    assert (done.returncode, calls) == (2, [])
    assert "one of docker, podman, buildah must answer, got none; start" in done.stderr


def test_a_base_is_made_of_packages_where_no_registry_is_reached(call):
    done, calls = call("--only", "core", "--debian", "mirror", "--with", "buildah")
    assert done.returncode == 0, done.stderr
    making, importing, building = calls
    assert making.startswith("mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,")
    assert making.endswith(" bookworm TEMPORARY/base.tar mirror")
    assert importing == (
        "buildah build -f images/debian/Dockerfile -t planish/base:bookworm TEMPORARY"
    )
    assert "--build-arg BASE=planish/base:bookworm" in building


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("kind", "kind load image-archive {archive} --name kind"),
        ("minikube", "minikube image load {archive} --profile minikube"),
        ("k3s", "k3s ctr images import {archive}"),
        ("containerd", "ctr --namespace k8s.io images import {archive}"),
    ],
)
def test_images_are_loaded_onto_nodes_without_a_registry(call, loader, expected):
    done, calls = call("--only", "core", "--load", loader)
    assert done.returncode == 0, done.stderr
    archive = "TEMPORARY/image.tar"
    assert calls[1:] == [
        f"docker save -o {archive} {IMAGES['core']}",
        expected.format(archive=archive),
    ]
    assert done.stderr.splitlines()[-1] == f"loaded {IMAGES['core']} into {loader}"


def test_a_build_that_fails_ends_everything_in_one_line(call):
    done, calls = call("--build-arg", "BASE=broken", "--push", "mirror")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "docker must succeed, got exit code 7"
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "missing"), [(("--load", "kind"), "kind"), (("--debian",), "mmdebstrap")]
)
def test_a_program_that_is_not_there_is_named_before_anything_is_built(call, words, missing):
    done, calls = call(*words, programs=[name for name in PROGRAMS if name != missing])
    assert done.returncode == 2
    assert f"{missing} must be on the PATH" in done.stderr
    assert calls == []
