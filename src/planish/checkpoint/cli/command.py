"""The command line `planish checkpoint ...`: its options, and which function does what.

Functions hand back plain tables and lines; whoever owns the screen prints them. Nothing heavier
than argparse is imported before a command is known, and torch only to exchange with its format.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.store import file_uri

Progress = Callable[[str, int, int], None]
"""Called with what goes on, bytes done and bytes in all (0: unknown)."""

COMMANDS: dict[str, tuple[str, str]] = {
    "ls": ("catalog:ls", "list the committed checkpoints below a root"),
    "info": ("catalog:info", "say what a checkpoint is: step, layout, roles, sizes"),
    "verify": ("work:verify", "check that every object is there and every block is intact"),
    "inspect": ("catalog:inspect", "list the tensors, and where each part of them lies"),
    "latest": ("catalog:latest", "print the pin of the newest committed checkpoint"),
    "rm": ("catalog:rm", "remove one checkpoint"),
    "retain": ("catalog:retain", "remove the checkpoints below a root that no rule keeps"),
    "gc": ("catalog:gc", "clear away what saves, retention and crashes have left"),
    "export-hf": ("work:export_hf", "write the policy as a Hugging Face folder"),
    "reshard": ("work:reshard", "write a checkpoint anew for another layout"),
    "diff": ("work:diff", "compare two checkpoints, whatever their layouts; 0 if equal"),
    "report": ("work:report", "show what each rank and stage of a save or load cost"),
    "import-dcp": ("work:import_dcp", "turn a torch.distributed.checkpoint folder into one"),
    "export-dcp": ("work:export_dcp", "turn one into a torch.distributed.checkpoint folder"),
}
"""Command to its function, and its line of help."""


@dataclass(frozen=True)
class Table:
    """Rows to print below a title.

    Example:
        >>> Table("file:///r", ("step", "bytes"), [[7, "1.0 KiB"]]).columns
        ('step', 'bytes')
    """

    title: str
    """Heading."""
    columns: tuple[str, ...]
    """Names, empty texts for none."""
    rows: list[list[Any]]
    """Cells; text in them is untrusted."""


Lines = Iterator[Table | str]
"""What a command prints, piece by piece; a text is one or more lines as they are."""


class Ended(Exception):
    """A command has printed all, and wants another exit code than 0.

    Example:
        >>> Ended(1).code
        1
    """

    def __init__(self, code: int) -> None:
        """Keep the code."""
        super().__init__(code)
        self.code = code


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command and its options to the parser of `planish checkpoint`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {
        name: commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        for name, (_, line) in COMMANDS.items()
    }
    for name in ("ls", "latest", "retain", "gc"):
        made[name].add_argument("root", help="folder of checkpoints: s3://, file:// or a path")
    for name in ("info", "verify", "inspect", "rm", "export-hf", "reshard", "report"):
        made[name].add_argument(
            "path", help="checkpoint: URI, path, or pin (<uri>#sha256=<digest>)"
        )
    _catalog_options(made)
    _work_options(made)


def _catalog_options(made: dict[str, argparse.ArgumentParser]) -> None:
    for name in ("ls", "info"):
        made[name].add_argument("--json", action="store_true", help="print JSON")
    add = made["inspect"].add_argument
    add("--name", default="*", metavar="GLOB", help="tensors whose name matches (default all)")
    add("--shards", action="store_true", help="also print the box, file and bytes of each part")
    made["rm"].add_argument("--yes", action="store_true", help="do it; otherwise only say so")
    for name in ("retain", "gc"):
        made[name].add_argument("--dry-run", action="store_true", help="only say what would go")
    add = made["retain"].add_argument
    add("--keep-last", type=int, default=3, metavar="N", help="newest that stay (default 3)")
    add("--keep-every", type=int, default=0, metavar="STEPS", help="multiples of it stay too")
    add("--pin", action="append", default=[], metavar="STEP|URI", help="stays too; repeatable")
    made["gc"].add_argument(
        "--grace-seconds",
        type=float,
        default=86400.0,
        help="leave alone what was written to within so many seconds (default one day)",
    )


def _work_options(made: dict[str, argparse.ArgumentParser]) -> None:
    made["verify"].add_argument(
        "--level",
        choices=("meta", "size", "crc"),
        default="crc",
        help="meta: the metadata alone; size: also one listing; crc: also every byte (default)",
    )
    add = made["diff"].add_argument
    add("a", help="one checkpoint")
    add("b", help="the other")
    add("--limit", type=int, default=20, metavar="N", help="differing tensors to print")
    for name in ("export-hf", "reshard"):
        made[name].add_argument("out", help="URI or path of the result")
        made[name].add_argument(
            "--source", default="", help="policy or folder that gives configuration and tokenizer"
        )
        made[name].add_argument("--role", default="", help="one role of several")
    add = made["reshard"].add_argument
    add("layout", help="`merged` (as export-hf), or degrees such as tp=4 or fsdp=8,tp=2")
    add("--parts", choices=("all", "model"), default="all", help="model: without optimizer")
    add("--overwrite", action="store_true", help="replace another checkpoint there")
    add = made["report"].add_argument
    add("--rank", type=int, default=None, help="whose timeline (default the slowest)")
    add("--load", action="store_true", help="the last load that stored its timings, not the save")
    add("--html", type=Path, default=None, metavar="FILE", help="write the page there as well")
    made["import-dcp"].add_argument("folder", help="local folder with `.metadata`")
    made["import-dcp"].add_argument("out", help="URI or path of the new checkpoint")
    made["import-dcp"].add_argument("--step", type=int, default=0, help="training step (default 0)")
    made["import-dcp"].add_argument("--role", default="main", help="name of its role (main)")
    made["import-dcp"].add_argument(
        "--overwrite", action="store_true", help="replace what is there"
    )
    made["export-dcp"].add_argument("--role", default="", help="one role of several")
    made["export-dcp"].add_argument("path", help="checkpoint: URI, path or pin")
    made["export-dcp"].add_argument("folder", help="local folder that is written")


def run(options: argparse.Namespace, progress: Progress) -> Lines:
    """Do what the parsed options ask for, and yield what to print.

    Raises:
        Ended: after the last piece, with another exit code than 0.
        PlanishError: it could not be done.
    """
    module, _, name = COMMANDS[options.action][0].partition(":")
    found = importlib.import_module(f"planish.checkpoint.cli.{module}")
    yield from getattr(found, name)(options, progress)


def place_of(text: str) -> str:
    """Return a URI for what a user typed: local paths become `file://`, pins stay.

    Example:
        >>> place_of("s3://bucket/run/")
        's3://bucket/run'
    """
    place, mark, digest = text.partition("#")
    uri = place if "://" in place else file_uri(Path(place).resolve())
    return f"{uri.rstrip('/')}{mark}{digest}"


def checkpoint_of(text: str) -> str:
    """Return the URI or pin of a checkpoint for what a user typed, also for a train state's pin."""
    from planish.checkpoint.train_state import checkpoint_place

    return checkpoint_place(place_of(text))
