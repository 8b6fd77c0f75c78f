"""Build images, install the packages of the others, and run a tiny run, each stage in its own.

    python -m tests.images
    python -m tests.images --folder /tmp/images     kept, and what lies there is not made again

Needs buildah and mmdebstrap, and root; a temporary folder with room for a few gigabytes.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from components.images import IMAGES, PROFILES, STAGE_IMAGES
from pipelines.post_train import build_post_train, profile_named
from planish.engines import ENGINES
from planish.run.__main__ import STAGES
from planish.submit.parameters import with_data
from tests.images.containers import BASE, Containers
from tests.images.pipeline import run_tasks
from tests.images.rehearsal import rehearse
from tests.integration.own_model import make_model
from tests.integration.test_own_model import SMALL, write_rows

GPU_IMAGES = frozenset(
    STAGE_IMAGES[stage] for p in PROFILES.values() for stage, pod in p.stages.items() if pod.gpus
)
"""Images of stages that some profile gives GPUs; Triton needs a C compiler in each."""
USER = 65532
INSTALLED = ("train", "rollout")
"""Images of several gigabytes: only their packages are installed."""

IMPORT = """
import importlib, os, pkgutil, sys
assert os.getuid() == 65532, os.getuid()
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found = pkgutil.walk_packages(getattr(module, "__path__", ()), name + ".")
    print(name, 1 + sum(importlib.import_module(part.name) is not None for part in found))
"""
"""Imports every module of the packages named, and says how many."""


BUILD = """
import sysconfig, tempfile
from triton.runtime.build import _build
with tempfile.TemporaryDirectory() as folder:
    source = folder + "/one.c"
    with open(source, "w") as file:
        file.write("#include <Python.h>")
    print(_build("one", source, folder, [], [], [], []))
"""
"""Builds a C module as Triton does for each kernel; that asks for no GPU."""


def main() -> int:
    """Do every step and print how long each took; 1 with the reason after the first that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="keep images and environments there")
    given = parser.parse_args()
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid():
        sys.stdout.write(
            f"root with buildah and mmdebstrap is needed, got uid {os.geteuid()} without "
            f"{missing}; apt-get install buildah mmdebstrap\n"
        )
        return 1
    with contextlib.ExitStack() as stack:
        if given.folder is None:
            given.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planish-")))
            # What tasks write lies below, and they are another user.
            given.folder.chmod(0o755)
        containers = Containers(given.folder.resolve())
        stack.callback(containers.close)
        timings: list[tuple[str, float]] = []
        make(containers, timings)
        try_out(containers, timings)
    for what, seconds in [*timings, ("total", sum(seconds for _, seconds in timings))]:
        sys.stdout.write(f"{what:40} {seconds:6.0f} s\n")
    return 0


@contextlib.contextmanager
def step(what: str, timings: list[tuple[str, float]]) -> Iterator[None]:
    """Say what begins, and measure it."""
    sys.stdout.write(f"== {what}\n")
    sys.stdout.flush()
    began = time.monotonic()
    yield
    timings.append((what, time.monotonic() - began))
    sys.stdout.write(f"== {timings[-1][1]:.0f} s\n")


def make(containers: Containers, timings: list[tuple[str, float]]) -> None:
    """Build the images and install the environments that are not there yet."""
    if not containers.has(IMAGES["core"]):
        with step("base and image core built", timings):
            containers.build("--debian", "--only", "core")
    if not containers.has(IMAGES["monitor"]):
        with step("image monitor built", timings):
            containers.build("--only", "monitor", "--build-arg", f"BASE={BASE}")
    for name in INSTALLED:
        if not containers.environment(name).exists():
            with step(f"packages of {name} installed", timings):
                containers.install(name)
    for name in IMAGES:
        containers.open(name)


def try_out(containers: Containers, timings: list[tuple[str, float]]) -> None:
    """Import, ask and run what was made."""
    for name in IMAGES:
        modules = [
            STAGES[s].rpartition(".")[0] for s, image in STAGE_IMAGES.items() if image == name
        ]
        if name == "rollout":
            modules += [engine.partition(":")[0] for engine in ENGINES.values()]
        with step(f"stages imported in {name}", timings):
            containers.run(name, "python", "-c", IMPORT, *dict.fromkeys(modules))
        if name in GPU_IMAGES:
            with step(f"a kernel's module built in {name}", timings):
                containers.run(name, "python", "-c", BUILD)
    with step("planish doctor in core", timings):
        answer = containers.run("core", "sh", "-c", "id -u && planish doctor")
        assert answer.startswith(f"{USER}\n"), answer
        assert " wrong " not in answer, answer
    with step("one iteration, each stage in its image", timings):
        one_iteration(containers, emptied(containers.folder / "work"))
    with step("one iteration, each stage a pod of a cluster", timings):
        rehearse(containers, emptied(containers.folder / "rehearsal"))


def emptied(folder: Path) -> Path:
    """Return a folder with nothing in it, where everybody may write."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def one_iteration(containers: Containers, work: Path) -> None:
    """Train a tiny model on rows of a file, and look at what was written and by whom."""
    root = work / "root"
    model = make_model("Qwen2", work / "model")
    for path in model.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone, and stages are another user
    parameters = {
        "root": root.as_uri(),
        "preset": "dapo-tiny",
        "model": str(model),
        "dataset": str(write_rows(work / "mine.jsonl")),
        "overrides": SMALL,
    }

    def run_task(image: str, command: Sequence[str], variables: Mapping[str, str]) -> int:
        name = next(name for name, reference in IMAGES.items() if reference == image)
        mounts = {str(work): work}
        line = containers.command(name, command, environment=variables, mounts=mounts)
        return subprocess.run(line, env={**os.environ, **containers.settings}).returncode

    profile = profile_named("cpu-tiny", num_iterations=1, num_shards=1)
    pipeline = build_post_train(profile, one_machine=True)
    run_tasks(
        pipeline, with_data(parameters, "answer=label"), emptied(work / "artifacts"), run_task
    )
    shown = containers.run("core", "planish", "show", parameters["root"], mounts={str(work): work})
    assert "iteration" in shown
    owners = {path.stat().st_uid for path in root.rglob("*") if path.is_file()}
    assert owners == {USER}, owners
    logs = [json.loads(path.read_text()) for path in (root / "logs").glob("*.json")]
    assert {log["state"] for log in logs} == {"done"}
    ran = {log["stage"] for log in logs}
    wanted = {"prepare", "curate", "sft", "rollout", "reward", "train", "checkpoint", "evaluate"}
    assert wanted <= ran, ran


if __name__ == "__main__":
    raise SystemExit(main())
