"""The commands `planish config show` and `planish plan`: settings of a run, and what they need.

They yield plain tables and lines, which the caller prints.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from planish.base.text import Table

Progress = Callable[[str, int, int], None]
"""Callback with activity, steps done and all steps; these commands are fast and never call it."""

Lines = Iterator[Table | str]
"""Output of a command, piece by piece."""


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of `planish` (their class is private to argparse)."""
    config = commands.add_parser("config", help="print every setting of a run")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="preset or file with overrides and defaults, as TOML")
    _add_settings(show)

    plan = commands.add_parser(
        "plan", help="count the memory of each GPU, and refuse what does not fit"
    )
    _add_settings(plan)
    plan.add_argument(
        "--profile", default="gpu-1x8", help="pods of the run (default gpu-1x8), as for submission"
    )
    plan.add_argument(
        "--gpu-memory", type=float, default=0.0, metavar="GB", help="of one GPU (default 80)"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", help="name of a preset, or path or URI of a TOML file; both: the file wins"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="section.key=value, such as run.seed=1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, _: Progress) -> Lines:
    """Run the command of the parsed options, and yield its output."""
    yield from (show_config if options.command == "config" else show_plan)(options)


def resolved(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the resolved configuration that the command line names."""
    from planish.base.config import preset_names
    from planish.base.errors import ConfigError
    from planish.stages.prepare.settings import build_config

    names, overrides = [options.config], list(options.overrides)
    if overrides and (_is_file(overrides[0]) or overrides[0] in preset_names()):
        names.append(overrides.pop(0))
    files = [name for name in names if _is_file(name)]
    presets = [name for name in names if not _is_file(name)]
    if len(names) > 1 and len(files) != 1:
        raise ConfigError(
            f"a configuration must be named by one preset, one file, or one of each, got {names}"
        )
    return build_config(
        preset="".join(presets),
        config="".join(files),
        overrides=shlex.join(overrides),
        model="",
        dataset="",
        seed=-1,
    )


def _is_file(word: str) -> bool:
    return "=" not in word and any(mark in word for mark in ("/", ".toml"))


def toml_text(config: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Return a resolved configuration as TOML that resolves to the same one.

    Example:
        >>> print(toml_text({"run": {"seed": 1}}))
        [run]
        seed = 1
    """
    from planish.base.config import toml_value

    return "\n\n".join(
        "\n".join([f"[{section}]", *(f"{key} = {toml_value(table[key])}" for key in table)])
        for section, table in config.items()
    )


def show_config(options: argparse.Namespace) -> Lines:
    """Yield every setting of a run, defaults and overrides included."""
    config = resolved(options)
    yield json.dumps(config, indent=2) if options.json else toml_text(config)


def show_plan(options: argparse.Namespace) -> Lines:
    """Yield the memory demand of each device of each stage; then raise the faults."""
    from planish.base.config import parse_settings
    from planish.base.errors import ConfigError
    from planish.base.text import bytes_text
    from planish.stages.prepare import devices
    from planish.stages.prepare.trained import trained_warnings

    config = parse_settings(resolved(options))
    requests = devices.profile_requests(options.profile)
    if options.gpu_memory:
        if not 1 <= options.gpu_memory <= 10_000:
            raise ConfigError(
                f"`--gpu-memory` must be 1 to 10000 GB, got {options.gpu_memory:g}; 80 is usual"
            )
        requests = replace(requests, gpu_bytes=int(options.gpu_memory * 10**9))
    shape = devices.find_shape(config)
    found, impossible, tight = devices.judge(config, shape, requests)
    faults = [*devices.device_faults(config, requests), *impossible, *tight]
    warnings = [*trained_warnings(config), *devices.device_warnings(config, requests)]
    if options.json:
        document = {
            "profile": options.profile,
            "gpu_bytes": requests.gpu_bytes,
            "model": {**asdict(shape), "parameters": shape.parameters},
            "demands": [demand.document() for demand in found],
            "faults": faults,
            "warnings": warnings,
        }
        yield json.dumps(document, indent=2)
    else:
        name = config.model.path or "a model from scratch"
        yield f"{name}: {shape.parameters:,} parameters, {options.profile}"
        for demand in found:
            rows = [[part.name, bytes_text(part.num_bytes), part.how] for part in demand.parts]
            room, total = bytes_text(demand.room_bytes), bytes_text(demand.num_bytes)
            rows.append(["all", total, f"of {room}: {'too much' if demand.fault else 'fits'}"])
            yield Table(f"{demand.stage}, {demand.device}", ("what", "bytes", "how"), rows)
        yield from (f"warning: {line}" for line in warnings)
    if faults:
        raise ConfigError("; ".join(faults))
