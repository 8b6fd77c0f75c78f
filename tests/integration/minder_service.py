"""Starting `planish minder serve` for tests, and configurations in which faults show in seconds."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.minder.detect.model_files import save_limits
from tests import pages
from tests.integration.waiting import wait_for
from tests.servers.program import Program, free_port

METRICS = ("cpu_usage", "gpu_duty_cycle", "gpu_graphics_engine_activity")
"""With limits that need no training."""


def raw_settings(folder: Path, url: str, machines, **sections: Any) -> dict[str, Any]:
    """Return a configuration without models, in which 10 seconds are long enough for a fault."""
    save_limits(folder / "models", {})
    base: dict[str, Any] = {
        "prometheus": {"url": url, "delay_seconds": 1, "late_seconds": 5},
        "models": {"folder": str(folder / "models")},
        "denoise": {"denoiser": "none"},
        "detect": {"metrics": list(METRICS), "continuity_seconds": 10, "gap_tolerance": 1,
                   "role_baseline": False, "warmup_seconds": 0},
        "preprocess": {"silent_after_seconds": 8, "join_grace_seconds": 0},
        "service": {"interval_seconds": 1, "window_seconds": 60, "call_timeout_seconds": 10.0},
        "server": {"host": "127.0.0.1", "discovery_seconds": 1,
                   "state_file": str(folder / "state.json")},
        "jobs": [{"name": "job", "machines": list(machines)}],
    }  # fmt: skip
    for name, section in sections.items():
        base[name] = {**base[name], **section} if isinstance(base.get(name), dict) else section
    return base


def write_toml(path: Path, raw: dict[str, Any]) -> Path:
    """Write a configuration; values of JSON are values of TOML but for tables."""

    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ", ".join(value(v) for v in one) + "]"
        return json.dumps(one)

    path.write_text("".join(f"{key} = {value(one)}\n" for key, one in raw.items()), "utf-8")
    return path


@dataclass
class Served:
    """A running `planish minder serve`."""

    config: Path
    port: int

    def __post_init__(self) -> None:
        self.program = Program(self.config.parent / "serve.log")

    def start(self) -> None:
        self.program.start(
            [sys.executable, "-m", "planish", "minder", "serve", "--config", str(self.config)]
        )

    @property
    def log(self) -> str:
        return self.program.log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 for no answer."""
        return pages.get(f"http://127.0.0.1:{self.port}{path}")

    def metric(self, line: str) -> float | None:
        """Return one of its own metrics."""
        return pages.samples(self.get("/metrics")[1]).get(line)

    def terminate(self) -> tuple[int, float]:
        """End it politely; return exit code and seconds."""
        begun = time.monotonic()
        return self.program.terminate(), time.monotonic() - begun

    def kill(self) -> None:
        self.program.kill()


def serving(folder: Path, raw: dict[str, Any], *, port: int = 0) -> Served:
    """Start the service and wait until it listens."""
    served = Served(folder / "minder.toml", port or free_port())
    raw["server"] = {**raw["server"], "port": served.port}
    write_toml(served.config, raw)
    served.start()
    wait_for(lambda: served.get("/healthz")[0] == 200, 60, lambda: served.log)
    return served
