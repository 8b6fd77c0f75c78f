"""Every image that a file of ours names can be pulled, today and later, or is built by us."""

import re
from pathlib import Path

import pytest

from components.images import IMAGES

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTRIES = ("quay.io/minio/", "docker.io/library/")
TABLE = "images/README.md"
"""Who publishes there stands in a table of this page, without digests."""
FOLDERS = ("manifests", "images", "examples", "docs", "monitoring", "pipelines", "src")
KINDS = (".yaml", ".yml", ".md", ".ipynb", ".j2", ".Dockerfile", ".sh", "")
NAMED = re.compile(
    r"(?:\bimage:\s*|--image[= ]|\b(?:BASE|[A-Z_]*IMAGE|newName)[=:]\s?|^FROM\s+|\bbase_image=)"
    r"""\\?["'`]?([^\s"'`,)\]|\\]+)""",
    re.MULTILINE,
)
PUBLIC = re.compile(
    r"\b(?:[a-z]+\.)*(?:docker\.io|quay\.io|gcr\.io|ghcr\.io|nvcr\.io|ecr\.aws|registry\.k8s\.io)"
    r"/[\w./-]+(?::[\w.-]+)?(?:@sha256:\w+)?"
)
OURS = re.compile(
    rf"(?:(?:registry\.example|mirror)/(?:[\w-]+/)*|planish/)(?:{'|'.join(IMAGES)})\b"
)
PLACEHOLDER = re.compile(
    r"registry\.example/team$|mirror/|(?:core|rollout|train|monitor|NAME)=|\$|\{|[A-Z]+$|scratch$|\.\.\."
)


def found_in(text):
    """Return the images that a text names: after a word that takes one, or of a public registry."""
    return {*NAMED.findall(text), *PUBLIC.findall(text)}


def fault_of(image):
    if OURS.match(image) or PLACEHOLDER.match(image):
        return ""
    if not image.startswith(REGISTRIES):
        return f"its registry is none of {REGISTRIES}"
    return "" if re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image) else "has no tag with digest"


def images_of_files():
    files = [path for name in FOLDERS for path in (REPOSITORY / name).rglob("*")]
    return {
        (path.relative_to(REPOSITORY).as_posix(), image)
        for path in (REPOSITORY / "README.md", *files)
        if path.suffix in KINDS and path.is_file()
        for image in found_in(path.read_text())
    }


def test_every_image_is_ours_or_of_a_known_publisher_by_digest_and_in_the_table():
    page = (REPOSITORY / TABLE).read_text()
    told = re.findall(r"^\| `((?:quay|docker)\.io/[^`]+)` \|", page, re.MULTILINE)
    named = images_of_files() - {(TABLE, image) for image in told}
    assert {name.partition("/")[0] for name, _ in named} >= {"manifests", "images", "monitoring"}
    faults = {(name, image): fault_of(image) for name, image in named if fault_of(image)}
    assert faults == {}
    others = {image.partition("@")[0] for _, image in named if image.startswith(REGISTRIES)}
    assert sorted(told) == sorted(others)


@pytest.mark.parametrize(
    "line",
    [
        "          image: minio/minio",
        "image: minio/mc:RELEASE.2025-04-16T18-13-26Z",
        "FROM python:3.11-slim-bookworm AS build",
        "ARG BASE=python:3.11-slim-bookworm",
        "kubectl debug node/NODE -it --image=ubuntu -- chroot /host",
        "  - newName: quay.io/minio/minio",
        '@dsl.component(base_image="python:3.11")',
        "kubectl run shell --image docker.io/library/busybox:1.37",
        f"image: docker.io/library/busybox@sha256:{'a' * 63}",
        f"image: evil.example/minio/minio:1@sha256:{'a' * 64}",
        "pull nvcr.io/nvidia/pytorch:25.01-py3 first",
    ],
)
def test_an_image_that_may_vanish_or_change_is_found(line):
    assert [image for image in found_in(line) if fault_of(image)]


@pytest.mark.parametrize(
    "line",
    [
        "image: planish/core:0.1.0",
        "planish submit s3://b/r --image registry.example/team --profile cpu-tiny",
        "docker build --build-arg IMAGE=planish/rollout:0.1.0 -t registry.example/rollout:own .",
        f"image: quay.io/minio/mc:RELEASE.2025-08-13T08-35-41Z@sha256:{'0' * 64}",
        "FROM ${BASE}",
    ],
)
def test_an_image_of_ours_or_by_digest_passes(line):
    assert not [image for image in found_in(line) if fault_of(image)]
