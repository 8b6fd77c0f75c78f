"""A whole run as one function call, e.g. in a notebook: `planish.run_pipeline`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.base.config import toml_value
from planish.base.errors import EXIT_CONFIG, ConfigError, PlanishError
from planish.stages.prepare.settings import flatten


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    root: str
    policy: str
    accuracy_before: float | None
    """Held-out accuracy before reinforcement learning, 0 to 1; None if it was not measured."""
    accuracy_after: float | None
    """Held-out accuracy after reinforcement learning, 0 to 1; None if it was not measured."""
    control: Mapping[str, float] | None
    """Accuracies after the control, which is as much time of supervised training in place of
    reinforcement learning; None if the control did not run."""
    report: str
    summary: Mapping[str, Any]
    """JSON of the last line that `planish run` prints."""


def run_pipeline(
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    preset: str = "",
    **options: Any,
) -> Result:
    """Run the pipeline on this machine in child processes, and print the progress.

    A second call with the same arguments continues the run; finished work is not repeated.

    Args:
        config: settings that override the preset, as sections (`{"train": {"learning_rate":
            1e-3}}`) or as `{"train.learning_rate": 1e-3}`; or the path of a TOML file.
        preset: name of the preset to start from; empty takes `dapo-small` with a `model`, else
            `dapo-tiny`.
        options: options of `planish run` by their names: `root="/tmp/run"`, `iterations=2`,
            `dataset="mine.jsonl"`, `no_control=True`.

    Raises:
        ConfigError: settings or options are wrong, or the extra `demo` is missing.
        PlanishError: the run failed.

    Example::

        result = planish.run_pipeline({"train.learning_rate": 1e-3}, root="runs/first")
        print(result.accuracy_before, result.accuracy_after)
    """
    words = ["--preset", preset]
    if isinstance(config, Mapping):
        words += [word for setting in settings(config) for word in ("-o", setting)]
    elif config is not None:
        words += ["--config", str(config)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False):
            words += [f"{option}={value}"]
    return run_command(words)


def settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of nested tables as `section.key=value`, with values in TOML."""
    return [f"{path}={toml_value(value)}" for path, value in flatten(config).items()]


def run_command(words: Sequence[str]) -> Result:
    """Run `planish run` with these options, print its output, and return the JSON of its last
    line.
    """
    command = [sys.executable, "-m", "planish", "run", *words]
    printed: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                printed += filter(None, [line.strip()])
        except BaseException:
            # The tasks of the run end with the process.
            process.terminate()
            raise
    if process.returncode != 0:
        kind = ConfigError if process.returncode == EXIT_CONFIG else PlanishError
        raise kind(" ".join(printed[-1:]).removeprefix("planish: "))
    summary = json.loads(next(line for line in reversed(printed) if line.startswith("{")))
    names = ("root", "policy", "accuracy_before", "accuracy_after", "report")
    return Result(
        **{name: summary[name] for name in names},
        control=summary.get("control"),
        summary=summary,
    )
