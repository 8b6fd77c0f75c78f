"""The command `planish sweep`: runs a list of runs from a file, here or on a cluster.

::

    preset = "dapo-tiny"
    [[runs]]
    name = "slow"
    overrides = { "train.learning_rate" = 1e-4 }
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from planish.base.config import Section, parse_section, read_toml
from planish.base.errors import EXIT_FAILED, ConfigError, Ended, ObjectMissing, PlanishError
from planish.base.text import Table
from planish.stages.prepare.settings import flatten
from planish.store import normal_uri
from planish.store.documents import read_json, write_json
from planish.submit import command as submit
from planish.submit.local.command import resumable
from planish.submit.local.pipeline import run_command, settings


class RunSettings(Section):
    """Settings of one run of a sweep, or of all its runs."""

    preset: str | None = None
    """Preset to start from; None takes the default."""
    iterations: int | None = None
    """Number of iterations of each run; None takes the number of the profile."""
    seed: int | None = None
    """Seed of every random choice; None takes the default."""
    overrides: dict[str, Any] = Field(default={})
    """Settings that override the preset: `"section.key" = value`, or a table for each section."""


class SweepRun(RunSettings):
    """Settings of one run; a missing setting has the value of the sweep."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run, which is also its folder below the root of the sweep."""


class Sweep(RunSettings):
    """A list of runs, and their common settings."""

    runs: list[SweepRun] = Field(min_length=1)
    """The runs, in the order in which they are executed."""


Progress = Callable[[str, int, int], None]


def run(options: argparse.Namespace, progress: Progress) -> Iterator[Table | str]:
    """Run or submit all runs, and yield a table of them.

    Raises:
        Ended: a run failed.
    """
    sweep = parse_section(Sweep, read_toml(Path(options.file)), section="sweep")
    names = [each.name for each in sweep.runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"`sweep.runs` must each have a name of its own, got {names}")
    is_here = options.kubeflow is None
    root = options.root or f"runs/{Path(options.file).stem}"
    root = normal_uri(root) if is_here else root.rstrip("/")
    rows, done = [], []
    with resumable():
        for each in sweep.runs:
            place = f"{root}/{each.name}"
            row = [each.name, " ".join(settings(_given(each)))]
            yield " ".join(row)
            try:
                given = {**_given(sweep), **_given(each)}
                if is_here:
                    row += _run_here(place, given)
                else:
                    row += [_submit(place, given, options.kubeflow, progress)]
                done.append(place)
            except PlanishError as error:
                yield f"{each.name}: {error}"
                row += ["failed", ""] if is_here else ["failed"]
            rows.append(row)
    columns = ("before", "after") if is_here else ("run",)
    yield Table(root, ("name", "what differs", *columns), rows)
    if len(done) > 1:
        yield f"planish compare {shlex.join(done)}"
    if len(done) < len(rows):
        raise Ended(EXIT_FAILED)


def _given(part: RunSettings) -> dict[str, Any]:
    """Return the settings in a table of the file; overrides are entries `section.key`."""
    given = part.model_dump(exclude_unset=True, exclude={"name", "runs", "overrides"})
    return {**given, **flatten(part.overrides)}


def _run_here(root: str, given: Mapping[str, Any]) -> list[Any]:
    """Execute a run unless it was done with the same settings; return its accuracies."""
    parameters, overrides = _split(given)
    words = [f"--{name}={value}" for name, value in parameters.items()]
    words += [word for setting in overrides for word in ("-o", setting)]
    try:
        document = read_json(f"{root}.json")
    except ObjectMissing:
        document = {}
    if document.get("options") != words:
        result = run_command(["--root", root, *words])
        accuracies = [result.accuracy_before, result.accuracy_after]
        document = {"options": words, "accuracies": accuracies}
        write_json(f"{root}.json", document)
    found: list[Any] = document["accuracies"]
    return found


def _submit(root: str, given: Mapping[str, Any], more: Sequence[str], progress: Progress) -> str:
    """Submit a run with further options of `planish submit`; return its id."""
    parameters, overrides = _split(given)
    words = ["submit", root, "--experiment", root.split("/")[-2]]
    if iterations := parameters.pop("iterations", None):
        words += ["--iterations", str(iterations)]
    parameters["overrides"] = shlex.join(overrides)
    words += [word for item in parameters.items() for word in ("-p", "{}={}".format(*item))]
    parser = argparse.ArgumentParser(prog="planish")
    submit.add_commands(parser.add_subparsers(dest="command"))
    options = parser.parse_args([*words, *more])
    pieces = [str(piece) for piece in submit.run(options, progress)]
    return "" if options.dry_run else pieces[-1]


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters of a run, and its overrides as `section.key=value`."""
    parameters = {name: value for name, value in given.items() if "." not in name}
    return parameters, settings({n: value for n, value in given.items() if "." in n})
