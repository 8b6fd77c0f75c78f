"""The command `planish config show`: what a run would have as settings.

It yields plain tables and lines, which the caller prints.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planish.base.text import Table

Progress = Callable[[str, int, int], None]
"""Called with what goes on, steps done and steps in all; nothing here takes long."""

Lines = Iterator[Table | str]
"""What a command prints, piece by piece."""


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of `planish`, whose class argparse keeps to itself."""
    config = commands.add_parser("config", help="print every setting of a run")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="preset or file with overrides and defaults, as TOML")
    _add_settings(show)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="name of a preset, or path or URI of a TOML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="section.key=value, such as run.seed=1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def resolved(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configuration that a command line names.

    Raises:
        ConfigError: every fault of every section in one message.
    """
    from planish.stages.prepare.settings import build_config

    is_file = any(mark in options.config for mark in ("/", ".toml"))
    return build_config(
        preset="" if is_file else options.config,
        config=options.config if is_file else "",
        overrides=shlex.join(options.overrides),
        model="",
        dataset="",
        seed=-1,
    )


def toml_text(config: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Return a resolved configuration as TOML that resolves to the same one.

    Example:
        >>> print(toml_text({"run": {"seed": 1}}))
        [run]
        seed = 1
    """
    parts = []
    for section, table in config.items():
        lines = [f"[{section}]"]
        for key, value in table.items():
            # A JSON text is a TOML text but for the one control character that JSON lets stand.
            text = json.dumps("none" if value is None else value, ensure_ascii=False)
            lines.append(f"{key} = {text}".replace("\x7f", "\\u007f"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def show_config(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield every setting of a run, defaults and overrides included.

    Raises:
        ConfigError: as `resolved`.
    """
    config = resolved(options)
    yield json.dumps(config, indent=2) if options.json else toml_text(config)
