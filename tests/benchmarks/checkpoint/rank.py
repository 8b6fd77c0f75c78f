"""One rank of a benchmark: a training loop that saves, or a process that loads, when told to.

`python -m tests.benchmarks.checkpoint.rank WORKLOAD SCALE` reads commands (JSON lines)
and answers each by one line. Any environment with torch runs it; systems are imported when named.

A step is a fixed number of small matrix products (`CPU_SECONDS` of one core at the start), a pause
of `PAUSE_SECONDS` as if an accelerator were busy, and an all-reduce. Four ranks on two cores: half
a second, half of both cores.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.checkpoint import limits, workloads
from tests.benchmarks.checkpoint.pending import Pending, System
from tests.benchmarks.checkpoint.systems import open_system

CPU_SECONDS = 0.12
PAUSE_SECONDS = 0.25
LONGEST_SAVE_SECONDS = 240.0
LONGEST_WAIT_SECONDS = 30.0


def all_durable(pending: Pending) -> bool:
    """Return whether the saves of all ranks are durable.

    Raises:
        RuntimeError: that of some rank failed.
    """
    flag = torch.tensor(pending.progress())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    if flag < 0:
        raise RuntimeError(f"the save of some rank failed; of this one: {pending.error!r}")
    return bool(flag)


class Loop:
    """A training loop of steps of fixed length."""

    def __init__(self) -> None:
        self.left, self.right = torch.randn(192, 192), torch.randn(192, 192)
        self.out = torch.empty(192, 192)
        self.products = 1
        self.cpu_seconds = 0.0
        """Of all products so far."""
        while self._compute() < CPU_SECONDS / 4:
            self.products *= 2
        self.products = max(1, round(self.products * CPU_SECONDS / self._compute()))

    def _compute(self) -> float:
        started = time.process_time()
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.out)
        spent = time.process_time() - started
        self.cpu_seconds += spent
        return spent

    def step(self, pending: Pending | None = None) -> bool:
        """Run a step; returns whether all ranks' saves are durable."""
        self._compute()
        time.sleep(PAUSE_SECONDS)
        if pending is None:
            pending = Pending()
        return all_durable(pending)

    def timed(self) -> float:
        """Return the seconds of a step."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started


def versions() -> dict[str, str]:
    """Return the versions of what this environment has of the systems."""
    found = {}
    for name in ("torch", "s3torchconnector", "s3fs", "bytecheckpoint", "minio"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def memory() -> dict[str, int]:
    """Return this process's resident, peak and shared bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "VmRSS", "Rss")))
    kib = {name: int(value.split()[0]) * 1024 for name, value in found.items()}
    return {"resident": kib["VmRSS"], "peak": kib["VmHWM"], "shared": kib["RssShmem"]}


def cpu_seconds(pid: int | str = "self") -> float:
    """Return the processor seconds of a process and of all that it has started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(child) for child in children)


def reset_peak() -> None:
    """Let the peak of resident memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def start_save(system: System, path: str) -> Pending:
    """Save; a failure is kept for the next time that ranks meet."""
    try:
        return system.save(path)
    except Exception as error:
        traceback.print_exc()
        failed = Pending()
        failed.error = error
        failed.finish()
        return failed


class Rank:
    """Answers commands."""

    def __init__(self, workload: str, scale: float) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.state = workloads.build(workload, scale, self.rank, self.world)
        self.systems: dict[str, System] = {}
        self.loop = Loop()

    def system(self, name: str) -> System:
        """Open a system when it is first used, on all ranks."""
        if name not in self.systems:
            self.systems[name] = open_system(name, self.state)
        return self.systems[name]

    def describe(self) -> dict[str, Any]:
        held = sum(piece.data.nbytes for piece in self.state.pieces)
        found = {"unique_bytes": self.state.unique_bytes, "held_bytes": held}
        return {**found, "versions": versions(), **memory()}

    def save(self, system: str, path: str, steps_before: int, steps: bool) -> dict[str, Any]:
        """Run a few steps, the step that saves, and steps until the save is durable."""
        saver = self.system(system)
        gc.collect()
        before = [self.loop.timed() for _ in range(steps_before)]
        reset_peak()
        start_memory = memory()
        start_cpu = cpu_seconds() - self.loop.cpu_seconds
        dist.barrier()
        started = time.perf_counter()
        pending = start_save(saver, path)
        call = time.perf_counter() - started
        finished = self.loop.step(pending)
        saving_step = time.perf_counter() - started
        during = []
        while not finished:
            if time.perf_counter() - started > LONGEST_SAVE_SECONDS:
                raise TimeoutError(f"{system} was not durable after {LONGEST_SAVE_SECONDS} s")
            if steps:
                step_started = time.perf_counter()
                finished = self.loop.step(pending)
                during.append(time.perf_counter() - step_started)
            else:
                time.sleep(0.02)
                finished = all_durable(pending)
        end = pending.seconds_since(started)
        after = memory()
        return {
            "steps_before": before,
            "call_seconds": call,
            "saving_step_seconds": saving_step,
            # The last of these steps is partly after the end.
            "steps_during": during[:-1],
            "save_seconds": end,
            "cpu_seconds": cpu_seconds() - self.loop.cpu_seconds - start_cpu,
            "memory_growth_bytes": max(0, after["peak"] - start_memory["resident"]),
            "shared_growth_bytes": max(0, after["shared"] - start_memory["shared"]),
            "details": pending.details,
        }

    def load(self, system: str, path: str, check: bool) -> dict[str, Any]:
        """Load into the state, zeroed before."""
        loader = self.system(system)
        workloads.clear(self.state)
        gc.collect()
        reset_peak()
        start_memory = memory()
        dist.barrier()
        started = time.perf_counter()
        details = loader.load(path)
        own = time.perf_counter() - started
        dist.barrier()
        seconds = time.perf_counter() - started
        peak = memory()["peak"]
        wrong = workloads.wrong_tensors(self.state) if check else []
        if wrong:
            raise ValueError(f"{system} left {len(wrong)} tensors wrong: {wrong[:3]}")
        return {
            "load_seconds": seconds,
            "own_seconds": own,
            "memory_growth_bytes": max(0, peak - start_memory["resident"]),
            "details": details,
        }

    def lose_rank(self, system: str, path: str, lost: int) -> dict[str, Any]:
        """Save, kill rank `lost`, and tell when this rank hears of it."""
        saver = self.system(system)
        dist.barrier()
        pending = start_save(saver, path)
        if self.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.perf_counter()
        while not pending.progress() and time.perf_counter() - started < LONGEST_WAIT_SECONDS:
            time.sleep(0.01)
        return {"seconds": time.perf_counter() - started, "heard": repr(pending.error)[:300]}

    def refill(self) -> dict[str, Any]:
        """Give every element its value again."""
        workloads.fill(self.state)
        return {}

    def run_limit(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Measure a physical limit on all ranks at once."""
        measure = limits.MEASURES[name]
        dist.barrier()
        return measure(self.rank, **arguments)

    def close_systems(self) -> dict[str, Any]:
        """Free what systems keep between saves; each is opened anew when it is used again."""
        while self.systems:
            self.systems.popitem()[1].close()
        gc.collect()
        return {}

    def close(self) -> None:
        for system in self.systems.values():
            system.close()


def main() -> None:
    # Libraries print what they like; only answers may reach the other end.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    workload, scale = sys.argv[1:]

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    rank = Rank(workload, float(scale))
    answer(rank.describe())
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        call: Callable[..., dict[str, Any]] = getattr(rank, command.pop("do"))
        try:
            answer(call(**command))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"[:2000]})
    rank.close()
    dist.barrier()
    # Some systems leave threads and processes behind that do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
