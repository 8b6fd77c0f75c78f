"""Build the images with Docker; push them to a registry, or load them onto the nodes of a cluster.

    python images/build.py                                  planish/core:0.1.0 and the others
    python images/build.py --only core --push registry.example/team
    python images/build.py --load kind --cluster kind

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
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent
NAMES = sorted(path.name.removesuffix(".Dockerfile") for path in FOLDER.glob("*.Dockerfile"))
LOADERS = ("kind", "k3s", "minikube", "containerd")
IMPORTS = {
    "k3s": ["k3s", "ctr", "images", "import", "-"],
    "containerd": ["ctr", "--namespace", "k8s.io", "images", "import", "-"],
}
"""Commands that read an archive; they talk to a socket of the root user."""


def version() -> str:
    """Return the version of the package, which is the tag of its images."""
    text = (REPOSITORY / "src/planish/__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]


def build(name: str, reference: str, arguments: Sequence[str]) -> None:
    """Build one image; `arguments` are `KEY=VALUE` of its file."""
    options = [word for argument in arguments for word in ("--build-arg", argument)]
    file = f"images/{name}.Dockerfile"
    run(["docker", "build", "-f", file, "-t", reference, *options, "."])


def push(reference: str) -> str:
    """Push an image and return its reference by digest."""
    run(["docker", "push", reference])
    command = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", reference]
    digests = json.loads(run(command, capture=True))
    repository = reference.rpartition(":")[0]
    return next(d for d in digests if d.startswith(f"{repository}@"))


def load(references: Sequence[str], loader: str, cluster: str) -> None:
    """Put images onto the node of this machine, or onto all nodes of a kind or minikube cluster."""
    if loader == "kind":
        run(["kind", "load", "docker-image", *references, "--name", cluster or "kind"])
    elif loader == "minikube":
        run(["minikube", "image", "load", *references, "--profile", cluster or "minikube"])
    else:
        as_root = [] if os.geteuid() == 0 else ["sudo"]
        save = ["docker", "save", *references]
        command = [*as_root, *IMPORTS[loader]]
        show(save, "|", command)
        with subprocess.Popen(save, stdout=subprocess.PIPE) as saved:
            subprocess.run(command, stdin=saved.stdout, check=True)
        if saved.returncode:
            raise subprocess.CalledProcessError(saved.returncode, save)


def run(command: Sequence[str], *, capture: bool = False) -> str:
    """Run a command in the repository and return what it printed, if that is wanted."""
    show(command)
    stdout = subprocess.PIPE if capture else None
    return (
        subprocess.run(command, check=True, cwd=REPOSITORY, stdout=stdout, text=True).stdout or ""
    )


def show(*parts: Sequence[str] | str) -> None:
    """Print a command before it runs."""
    words = " ".join(part if isinstance(part, str) else " ".join(part) for part in parts)
    sys.stderr.write(f"{words}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; prints one `--image` option of `submit` a line."""
    parser = argparse.ArgumentParser(
        prog="images/build.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=NAMES, help="build this one; repeatable")
    parser.add_argument("--build-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--push", default="", metavar="REGISTRY", help="such as registry/team")
    parser.add_argument(
        "--load", choices=LOADERS, help="put them onto the nodes without a registry"
    )
    parser.add_argument("--cluster", default="", help="name of the kind or minikube cluster")
    arguments = parser.parse_args(argv)
    names = arguments.only or NAMES
    prefix = arguments.push.rstrip("/") or "planish"
    references = {name: f"{prefix}/{name}:{version()}" for name in names}
    loader = IMPORTS.get(arguments.load, [arguments.load])[:1] if arguments.load else []
    missing = [program for program in ("docker", *loader) if shutil.which(program) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} must be on the PATH, got none; install it")
    try:
        for name, reference in references.items():
            build(name, reference, arguments.build_arg)
        if arguments.load:
            load(list(references.values()), arguments.load, arguments.cluster)
        if arguments.push:
            for name, reference in references.items():
                sys.stdout.write(f"--image {name}={push(reference)}\n")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error.cmd[0]} must succeed, got exit code {error.returncode}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
