"""The command line `planish checkpoint ...`: its options, and which function does what.

Nothing heavier than argparse is imported before a command is known, and torch only to exchange
with its format. Commands yield plain tables and lines; the caller prints them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator

from planish.base.text import Table

Progress = Callable[[str, int, int], None]
"""Called with what goes on, bytes done and bytes in all (0: unknown)."""

COMMANDS: dict[str, str] = {
    "ls": "list the committed checkpoints below a root",
    "info": "say what a checkpoint is: step, layout, roles, sizes",
    "verify": "check that every object is there and every block is intact",
    "inspect": "list the tensors, and where each part of them lies",
    "latest": "print the pin of the newest committed checkpoint",
    "rm": "remove one checkpoint",
    "retain": "remove the checkpoints below a root that no rule keeps",
    "gc": "clear away what saves, retention and crashes have left",
    "export-hf": "write the policy as a Hugging Face folder",
    "reshard": "write a checkpoint anew for another layout",
    "diff": "compare two checkpoints, whatever their layouts; 0 if equal",
    "report": "show what each rank and stage of a save or load cost",
    "import-dcp": "turn a torch.distributed.checkpoint folder into one",
    "export-dcp": "turn one into a torch.distributed.checkpoint folder",
}
"""Command to its line of help; `cli.actions` has a function of the same name for each."""


Lines = Iterator[Table | str]
"""What a command prints, piece by piece; a text is one or more lines as they are."""


class Ended(Exception):
    """A command has printed all, and wants another exit code than 0."""

    def __init__(self, code: int) -> None:
        """Keep the code."""
        super().__init__(code)
        self.code = code


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command and its options to the parser of `planish checkpoint`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {
        name: commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        for name, line in COMMANDS.items()
    }
    for name in ("ls", "latest", "retain", "gc"):
        made[name].add_argument("root", help="folder of checkpoints: s3://, file:// or a path")
    for name in ("info", "verify", "inspect", "rm", "export-hf", "reshard", "report"):
        made[name].add_argument(
            "path", help="checkpoint: URI, path, or pin (<uri>#sha256=<digest>)"
        )
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
    add = made["import-dcp"].add_argument
    add("folder", help="local folder with `.metadata`")
    add("out", help="URI or path of the new checkpoint")
    add("--step", type=int, help="training step (default: the folder's own `step`, else 0)")
    add("--role", default="main", help="name of its role (main)")
    add("--overwrite", action="store_true", help="replace what is there")
    add = made["export-dcp"].add_argument
    add("--role", default="", help="one role of several")
    add("path", help="checkpoint: URI, path or pin")
    add("folder", help="local folder that is written")


def run(options: argparse.Namespace, progress: Progress) -> Lines:
    """Do what the parsed options ask for, and yield what to print.

    Raises:
        Ended: after the last piece, with another exit code than 0.
        PlanishError: it could not be done.
    """
    actions = importlib.import_module("planish.checkpoint.cli.actions")
    yield from getattr(actions, options.action.replace("-", "_"))(options, progress)
