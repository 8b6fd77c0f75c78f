"""How the processes of a comparison take turns: a line in is a turn, a line out is its result.

Only one of them computes at a time, so that other work on the machine disturbs all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Turns:
    """The trainer's end."""

    def __init__(self) -> None:
        # Libraries print what they like; only results may reach the other end.
        self._results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def ready(self) -> None:
        self.done({})

    def next(self) -> bool:
        """Wait for the next turn; False is the end."""
        return sys.stdin.readline().strip() == "go"

    def done(self, result: Mapping[str, Any]) -> None:
        self._results.write(json.dumps(result) + "\n")
        self._results.flush()


class Player:
    """The benchmark's end: one trainer process."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, **environment},
        )
        self._read()

    def turn(self) -> dict[str, Any]:
        """Let the trainer do one iteration."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a trainer ended: see {self._log}\n{self._log.read_text()[-2000:]}")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
