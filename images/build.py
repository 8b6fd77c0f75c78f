"""Build the images; push them to a registry, or load them onto the nodes of a cluster.

    python images/build.py                                  planish/core:0.1.0 and the others
    python images/build.py --only core --push registry.example/team
    python images/build.py --load kind --cluster kind
    python images/build.py --with buildah --debian          no daemon and no registry of images

Needs no package: `make images ARGS='...'` is the same. Pods take an image that is on their node and
pull nothing then (`IfNotPresent`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent
NAMES = sorted(path.name.removesuffix(".Dockerfile") for path in FOLDER.glob("*.Dockerfile"))
BUILDERS = ("docker", "podman", "buildah")
"""In the order of preference; the last needs no daemon, and in a container no privilege."""

LOADERS = {
    "kind": "kind load image-archive {archive} --name {cluster}",
    "k3s": "{sudo} k3s ctr images import {archive}",
    "minikube": "minikube image load {archive} --profile {cluster}",
    "containerd": "{sudo} ctr --namespace k8s.io images import {archive}",
}
"""Where images are loaded to -> command that reads an archive of one image."""

DEBIAN = "planish/base:bookworm"
"""The base that `--debian` makes."""

DEBIAN_PACKAGES = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
AUTHORITIES = Path("/usr/local/share/ca-certificates")
"""Certificate authorities that the administrator of a Debian machine has added."""


def version() -> str:
    """Return the version of the package, which is the tag of its images."""
    text = (REPOSITORY / "src/planish/__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]


def answers(builder: str) -> bool:
    """Tell whether a program is there and, where it needs a daemon, the daemon answers."""
    if shutil.which(builder) is None:
        return False
    return (
        builder != "docker"
        or not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


def make_debian(builder: str, mirror: str) -> None:
    """Make the base from packages of Debian; it trusts the authorities that this machine trusts.

    Args:
        builder: one of `BUILDERS`.
        mirror: URL of a mirror of Debian; empty for the one that mmdebstrap knows.
    """
    with tempfile.TemporaryDirectory(prefix="planish-base-") as folder:
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={DEBIAN_PACKAGES}"]
        if any(AUTHORITIES.glob("*.crt")):
            # Without them pip reaches no index behind a proxy that looks into connections.
            command += [f"--customize-hook=copy-in {AUTHORITIES} {AUTHORITIES.parent}"]
            command += ['--customize-hook=chroot "$1" update-ca-certificates']
        run([*command, "bookworm", f"{folder}/base.tar", *filter(None, [mirror])])
        run([builder, "build", "-f", "images/debian/Dockerfile", "-t", DEBIAN, folder])


def build(builder: str, name: str, reference: str, arguments: Sequence[str]) -> None:
    """Build one image; `arguments` are `KEY=VALUE` of its file."""
    options = [word for argument in arguments for word in ("--build-arg", argument)]
    file = f"images/{name}.Dockerfile"
    run([builder, "build", "-f", file, "-t", reference, *options, "."])


def push(builder: str, reference: str) -> str:
    """Push an image and return its reference by digest."""
    repository = reference.rpartition(":")[0]
    if builder == "docker":
        run(["docker", "push", reference])
        command = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", reference]
        digests = json.loads(run(command, capture=True))
        return next(d for d in digests if d.startswith(f"{repository}@"))
    with tempfile.NamedTemporaryFile("r", prefix="planish-digest-") as file:
        run([builder, "push", "--digestfile", file.name, reference])
        return f"{repository}@{file.read().strip()}"


def load(builder: str, reference: str, loader: str, cluster: str) -> None:
    """Put an image onto the node of this machine, or onto all of a kind or minikube cluster."""
    with tempfile.TemporaryDirectory(prefix="planish-image-") as folder:
        archive = f"{folder}/image.tar"
        if builder == "docker":
            run(["docker", "save", "-o", archive, reference])
        else:
            # Under its short name: by `save` it would be an image of this machine alone.
            run([builder, "push", reference, f"docker-archive:{archive}:{reference}"])
        sudo = "" if os.geteuid() == 0 else "sudo"
        line = LOADERS[loader].format(archive=archive, cluster=cluster or loader, sudo=sudo)
        run(line.split())


def run(command: Sequence[str], *, capture: bool = False) -> str:
    """Run a command in the repository and return what it printed, if that is wanted."""
    sys.stderr.write(f"{' '.join(command)}\n")
    began = time.monotonic()
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(command, check=True, cwd=REPOSITORY, stdout=stdout, text=True)
    sys.stderr.write(f"{time.monotonic() - began:.0f} s\n")
    return done.stdout or ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with a builder that is there; says what is missing and ends otherwise."""
    parser = argparse.ArgumentParser(
        prog="images/build.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=NAMES, help="build this one; repeatable")
    parser.add_argument(
        "--with", choices=BUILDERS, dest="builder", help="default: the first that answers"
    )
    parser.add_argument(
        "--debian",
        nargs="?",
        const="",
        metavar="MIRROR",
        help="make the base with mmdebstrap, as root; nothing is pulled",
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--push", default="", metavar="REGISTRY", help="such as registry/team")
    parser.add_argument(
        "--load", choices=LOADERS, help="put them onto the nodes without a registry"
    )
    parser.add_argument("--cluster", default="", help="name of the kind or minikube cluster")
    given = parser.parse_args(argv)
    given.builder = given.builder or next(filter(answers, BUILDERS), "")
    if not given.builder:
        parser.error(
            f"one of {', '.join(BUILDERS)} must answer, got none; start the daemon of docker, or "
            "install buildah, which needs none"
        )
    needed = [given.builder, *(["mmdebstrap"] if given.debian is not None else [])]
    if given.load:
        needed += LOADERS[given.load].format(archive="", cluster="", sudo="").split()[:1]
    if missing := [program for program in needed if shutil.which(program) is None]:
        parser.error(f"{' and '.join(missing)} must be on the PATH, got none; install it")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; prints one `--image` option of `planish submit` a line."""
    given = parse(argv)
    prefix = given.push.rstrip("/") or "planish"
    references = {name: f"{prefix}/{name}:{version()}" for name in given.only or NAMES}
    arguments = list(given.build_arg)
    try:
        if given.debian is not None:
            make_debian(given.builder, given.debian)
            arguments += [f"BASE={DEBIAN}", "PACKAGES=gcc python3-dev"]
        for name, reference in references.items():
            build(given.builder, name, reference, arguments)
        if given.load:
            for reference in references.values():
                load(given.builder, reference, given.load, given.cluster)
            sys.stderr.write(f"loaded {' '.join(references.values())} into {given.load}\n")
        if given.push:
            for name, reference in references.items():
                sys.stdout.write(f"--image {name}={push(given.builder, reference)}\n")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error.cmd[0]} must succeed, got exit code {error.returncode}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
