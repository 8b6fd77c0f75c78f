"""The ranks of one job as child processes that wait for commands."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.servers.program import REPOSITORY, free_port

START_SECONDS = 300.0
COMMAND_SECONDS = 300.0


class GroupFailed(RuntimeError):
    """A rank ended, answered with an error or did not answer in time."""


class Group:
    """Ranks of one workload in one environment; all get each command and answer it."""

    def __init__(
        self, python: str, workload: str, scale: float, world: int, place: Mapping[str, str],
        log: Path,
    ) -> None:  # fmt: skip
        self.world, self.workload = world, workload
        self._log = log
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            **place,
        }
        line = [python, "-m", "tests.benchmarks.checkpoint.rank", workload, str(scale)]
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(world):
            self._ranks.append(
                subprocess.Popen(
                    line,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.with_suffix(f".{rank}").open("w"),
                    text=True,
                    cwd=REPOSITORY,
                    start_new_session=True,
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
        try:
            self.about = self._answers(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def call(self, do: str, *, lost: int = -1, **arguments: Any) -> list[dict[str, Any]]:
        """Let all ranks do something; returns their answers but that of rank `lost`, who dies.

        Raises:
            GroupFailed: the group is of no use any more and must be killed.
        """
        if lost >= 0:
            arguments["lost"] = lost
        line = json.dumps({"do": do, **arguments}) + "\n"
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._answers(COMMAND_SECONDS, lost)

    def _answers(self, seconds: float, lost: int = -1) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        found: dict[int, dict[str, Any]] = {}
        expected = [rank for rank in range(self.world) if rank != lost]
        with selectors.DefaultSelector() as selector:
            for rank in expected:
                stream = self._ranks[rank].stdout
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, rank)
            while len(found) < len(expected):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(expected) - set(found))
                    raise GroupFailed(f"ranks {missing} did not answer in {seconds} s")
                for key, _ in ready:
                    answer = self._read(key.data)
                    if "error" in answer:
                        raise GroupFailed(f"rank {key.data}: {answer['error']}; see {self._log}.*")
                    found[key.data] = answer
                    selector.unregister(key.fileobj)
        return [found[rank] for rank in expected]

    def _read(self, rank: int) -> dict[str, Any]:
        stream = self._ranks[rank].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            log = self._log.with_suffix(f".{rank}")
            raise GroupFailed(f"rank {rank} ended: see {log}\n{log.read_text()[-1500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [process.pid for process in self._ranks]

    def close(self) -> None:
        """Let the ranks end."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once, with what they have started and left behind."""
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
