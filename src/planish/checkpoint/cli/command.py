"""Command line `planish checkpoint ...`: its options, and the dispatch to a command's function.

The module imports nothing heavier than argparse before a command is known; only the commands of
torch's format import torch. Commands yield plain tables and lines; the caller prints them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator

from planish.base.text import Table
from planish.checkpoint.format.strict_json import Fields

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, bytes done and bytes in all (0: unknown)."""

COMMANDS: dict[str, str] = {
    "ls": "list the committed checkpoints below a root",
    "info": "say what a checkpoint is: step, layout, roles, sizes",
    "verify": "check that every object is there and every block is intact",
    "inspect": "list the tensors",
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
"""Command -> its line of help; `cli.actions` has a function of the same name for each."""


Lines = Iterator[Table | str]
"""Output of a command, piece by piece; a text is one or more complete lines."""


_YES: Fields = {"action": "store_true"}
_ROLE: Fields = {"default": ""}
_ARGUMENTS: tuple[tuple[str, str, str, Fields], ...] = (
    ("ls latest retain gc", "root", "folder of checkpoints: s3://, file:// or a path", {}),
    ("export-dcp", "--role", "one role of several", _ROLE),
    (
        "info verify inspect rm export-hf reshard report export-dcp",
        "path",
        "checkpoint: URI, path, or pin (<uri>#sha256=<digest>)",
        {},
    ),
    ("ls info", "--json", "print JSON", _YES),
    (
        "inspect",
        "--name",
        "tensors whose name matches (default all)",
        {"default": "*", "metavar": "GLOB"},
    ),
    ("rm", "--yes", "do it; otherwise only say so", _YES),
    ("retain gc", "--dry-run", "only say what would go", _YES),
    (
        "retain",
        "--keep-last",
        "newest that stay (default 3)",
        {"type": int, "default": 3, "metavar": "N"},
    ),
    (
        "retain",
        "--keep-every",
        "multiples of it stay too",
        {"type": int, "default": 0, "metavar": "STEPS"},
    ),
    (
        "retain",
        "--pin",
        "stays too; repeatable",
        {"action": "append", "default": [], "metavar": "STEP|URI"},
    ),
    (
        "gc",
        "--grace-seconds",
        "leave alone what was written to within so many seconds (default one day)",
        {"type": float, "default": 86400.0},
    ),
    (
        "verify",
        "--level",
        "meta: the metadata alone; size: also one listing; crc: also every byte (default)",
        {"choices": ("meta", "size", "crc"), "default": "crc"},
    ),
    ("diff", "a", "one checkpoint", {}),
    ("diff", "b", "the other", {}),
    (
        "diff",
        "--limit",
        "differing tensors to print",
        {"type": int, "default": 20, "metavar": "N"},
    ),
    ("export-hf reshard", "out", "URI or path of the result", {}),
    (
        "export-hf reshard",
        "--source",
        "policy or folder that gives configuration and tokenizer",
        {"default": ""},
    ),
    ("export-hf reshard", "--role", "one role of several", _ROLE),
    ("reshard", "layout", "`merged` (as export-hf), or degrees such as tp=4 or fsdp=8,tp=2", {}),
    (
        "reshard",
        "--parts",
        "model: without optimizer",
        {"choices": ("all", "model"), "default": "all"},
    ),
    ("reshard", "--overwrite", "replace another checkpoint there", _YES),
    ("report", "--rank", "whose timeline (default the slowest)", {"type": int}),
    ("report", "--load", "the last load that stored its timings, not the save", _YES),
    ("import-dcp", "folder", "local folder with `.metadata`", {}),
    ("import-dcp", "out", "URI or path of the new checkpoint", {}),
    (
        "import-dcp",
        "--step",
        "training step (default: the folder's own `step`, else 0)",
        {"type": int},
    ),
    ("import-dcp", "--role", "name of its role (main)", {"default": "main"}),
    ("import-dcp", "--overwrite", "replace what is there", _YES),
    ("export-dcp", "folder", "local folder that is written", {}),
)
"""Commands, argument or option, its help, and settings of `add_argument`."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command and its options to the parser of `planish checkpoint`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {
        name: commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        for name, line in COMMANDS.items()
    }
    for names, option, text, settings in _ARGUMENTS:
        for name in names.split():
            made[name].add_argument(option, help=text, **settings)


def run(options: argparse.Namespace, progress: Progress) -> Lines:
    """Run the command of the parsed options, and yield its output."""
    actions = importlib.import_module("planish.checkpoint.cli.actions")
    yield from getattr(actions, options.action.replace("-", "_"))(options, progress)
