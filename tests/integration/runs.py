"""Drive whole runs through kfp's local runner in a child process, and compare what they left."""

import contextlib
import json
import os
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from planish import store
from planish.records import layout
from tests.integration import programs
from tests.integration.programs import Program
from tests.integration.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "tests" / "golden" / "configs" / "tiny.toml"
LEARNS = "curate.max_operand_digits=1 sft.max_steps=100 sft.measure_every=100"
"""A cold start that is right now and then, so that the update has groups to learn from."""


def environment() -> dict[str, str]:
    """One thread a process, as in the demo."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def start(root: str, log: Path, *, iterations: int = 1, **parameters: Any) -> Program:
    """Start a run in a session of its own; its output goes to `log`."""
    parameters = {"config": str(TINY), "shards": 2, **parameters}
    line = ["--root", root, "--iterations", str(iterations)]
    for name, value in parameters.items():
        flag = f"--{name.replace('_', '-')}"
        line += [flag] if value is True else [flag, str(value)]
    return programs.start("pipelines.local", *line, log=log, environment=environment())


def finish(process: Program, log: Path, *, timeout: float = 600) -> None:
    """Wait for a run that must succeed."""
    code = process.wait(timeout=timeout)
    assert code == 0, log.read_text(errors="replace")[-6000:]


def run(root: str, log: Path, **parameters: Any) -> None:
    """Run to the end."""
    finish(start(root, log, **parameters), log)


def kill(process: Program) -> None:
    """End the run and every process that it started, without any warning."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def signal_task(process: Program, root: str, stage: str, iteration: int, *signals: int) -> int:
    """Send signals to the task of a stage once it has begun, not to the program that waits for it.

    It runs for moments only until then: however busy the machine is, it is not over before. Returns
    its id.
    """
    pid = wait_for(lambda: _task(process, stage), 600, f"a task of {stage}")
    os.kill(pid, signal.SIGSTOP)
    while not _has_begun(root, stage, iteration):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)
    for number in signals:
        os.kill(pid, number)
        time.sleep(0.2)
    return int(pid)


def _task(process: Program, component: str) -> int:
    """Return the id of the process that runs a component of a run; 0 where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            is_named = (folder / "comm").read_text().strip() == component
            if is_named and os.getsid(pid) == process.pid:
                return pid
    return 0


def wait_for_stage(root: str, stage: str, iteration: int, *, timeout: float = 600) -> None:
    """Wait until a task of the stage has begun."""
    wait_for(lambda: _has_begun(root, stage, iteration), timeout, f"stage {stage}")


def _has_begun(root: str, stage: str, iteration: int) -> bool:
    prefix = layout.stage_log(root, stage, iteration, 0)[: -len("00.json")]
    return any(uri.startswith(prefix) for uri in store.list_uris(layout.logs(root) + "/"))


def digests(root: str) -> dict[str, str]:
    """Return path under the root to sha256 for everything whose bytes a run promises."""
    result = {}
    for uri in store.list_uris(root + "/"):
        path = uri[len(root) + 1 :]
        if path.endswith(("manifest.json", "update.json")):
            result[path] = sha256(store.read(uri)).hexdigest()
    return result


def manifests(root: str, part: str) -> dict[str, dict[str, Any]]:
    """Return path to parsed manifest for all sets whose path holds `part`."""
    return {
        uri[len(root) + 1 :]: json.loads(store.read(uri))
        for uri in store.list_uris(root + "/")
        if uri.endswith("/manifest.json") and part in uri
    }


def newest_state(root: str) -> str:
    """Return the pinned URI of the newest train state."""
    found = manifests(root, "/states/")
    path = max(found)
    data = store.read(f"{root}/{path}")
    return f"{root}/{path.removesuffix('/manifest.json')}#sha256={sha256(data).hexdigest()}"
