"""The command line `planish`: start runs, follow them, keep checkpoints, find faulty machines.

Stages have their own (`python -m planish.run STAGE`).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planish import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from planish.checkpoint.cli.command import Lines

# Everything else is imported inside `main`, which answers Ctrl-C with one line at any time.


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from planish.checkpoint.cli import command as checkpoint_cli
    from planish.engines.planner import cli as rollout_cli
    from planish.minder.cli import command as minder_cli
    from planish.show import evaluate as evaluate_cli
    from planish.stages.export import publish as export_cli
    from planish.stages.prepare import command as prepare_cli
    from planish.submit import command as submit_cli
    from planish.submit.local import command as local_cli

    top = argparse.ArgumentParser(prog="planish", description=__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"planish {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    local_cli.add_commands(commands)
    _add_looks(commands)
    submit_cli.add_commands(commands)
    export_cli.add_commands(commands)
    evaluate_cli.add_commands(commands)
    commands.add_parser("doctor", help="say which extras, devices and servers are present")
    prepare_cli.add_commands(commands)
    checkpoint = commands.add_parser(
        "checkpoint", help="look at, check, convert and clear up states"
    )
    checkpoint_cli.add_commands(checkpoint)
    rollout = commands.add_parser(
        "rollout", help="plan, simulate and measure attention and experts apart"
    )
    rollout_cli.add_commands(rollout)
    verifier = commands.add_parser("verifier", help="list verifiers, and try one on rows of yours")
    verifier_commands = verifier.add_subparsers(dest="action", required=True, metavar="ACTION")
    verifier_commands.add_parser("list", help="built-in ones, and entry points that are installed")
    check = verifier_commands.add_parser(
        "check",
        help="hold one of yours to the contract: any text, in time, 0 to 1, the same each time; "
        "count what a built-in one judges right and wrong",
    )
    compare = verifier_commands.add_parser(
        "compare", help="show the rows that two verifiers judge differently"
    )
    for command in (check, compare):
        command.add_argument("name", help="built-in, package.module:function, or an entry point")
        command.add_argument(
            "--data",
            default="",
            required=command is compare,
            metavar="FILE",
            help=f"JSONL of `answer`, `response`{', and `score`' * (command is check)}",
        )
        command.add_argument(
            "--timeout-seconds", type=float, default=10.0, help="limit of one call (default 10)"
        )
    compare.add_argument("other", help="math-verify, or as NAME")
    minder = commands.add_parser("minder", help="find the faulty machine of a training job")
    minder_cli.add_commands(minder)
    if "_ARGCOMPLETE" in os.environ:
        # A shell asks, through what `register-python-argcomplete planish` printed.
        import argcomplete

        argcomplete.autocomplete(top)
    return top


def _add_looks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that look at runs."""
    show = commands.add_parser("show", help="print a record set, policy, report or run root")
    show.add_argument("uri", help="file:// or s3:// URI, pinned URI, or local path")
    show.add_argument(
        "--rows", type=int, default=1, metavar="N", help="rows of a record set in full (default 1)"
    )
    compare = commands.add_parser(
        "compare", help="lay the curves of runs over each other on one HTML page"
    )
    compare.add_argument("roots", nargs="+", metavar="ROOT", help="URI or path of a run")
    compare.add_argument(
        "--out", default="compare.html", metavar="FILE", help="URI or path (default compare.html)"
    )
    compare.add_argument(
        "--name", nargs="+", metavar="NAME", help="of each run (default: end of its root)"
    )
    track = commands.add_parser(
        "track", help="write the curves of a run to TensorBoard, MLflow or Weights & Biases"
    )
    track.add_argument("root", help="URI or path of the run")
    track.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="TRACKER",
        help="tensorboard[=FOLDER], mlflow[=URI] or wandb[=PROJECT]; may be given again",
    )
    track.add_argument(
        "--follow", action="store_true", help="go on until a signal; the run need not have begun"
    )
    track.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="between looks (default 5)"
    )
    track.add_argument(
        "--experiment", default="planish", metavar="NAME", help="of MLflow (default planish)"
    )
    track.add_argument(
        "--name", default="", metavar="NAME", help="of the run there (default: end of its root)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    try:
        return run_command(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("planish: interrupted; the same command resumes\n")
        return 128 + signal.SIGINT


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Do what `main` does, but for a `KeyboardInterrupt`, which rises."""
    from rich.console import Console

    from planish.base import telemetry
    from planish.base.errors import PlanishError, exit_code, named_error
    from planish.minder.cli import BAD_INPUT

    top = parser()
    options, unknown = top.parse_known_args(arguments)
    has_list = options.command in ("config", "plan")
    if unknown and has_list and not any(word.startswith("-") for word in unknown):
        # argparse takes what follows an option for no part of a list that began before it.
        options.overrides += unknown
    elif unknown:
        message = telemetry.redact(f"unrecognized arguments: {' '.join(unknown)}")
        if options.command != "minder":
            top.error(message)
        # There 2, the code of wrong arguments elsewhere, says that a machine is faulty.
        sys.stderr.write(f"planish minder: {message}\n")
        return BAD_INPUT
    telemetry.configure_logging(logging.WARNING)
    # A pipe has no width of its own: rows must not be folded at 80 characters there.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)
    try:
        if options.command == "doctor":
            from planish.show.doctor import doctor

            return doctor(console)
        if options.command == "run":
            from planish.submit.local.command import run

            return run(options)
        if options.command == "track":
            from planish.show.track import track

            console.print(track(options))
            return 0
        if options.command in IN_PIECES:
            module = importlib.import_module(IN_PIECES[options.command])
            return _print_pieces(module.run, options, console)
        if options.command == "minder":
            from planish.minder.cli import command as minder_cli

            with _Bar(bytes_=False) as bar:
                return minder_cli.run(options, bar.show)
        from planish.show.command import show

        show(options.uri, console, rows=options.rows)
    except (PlanishError, ModuleNotFoundError) as error:
        known = named_error(error)
        sys.stderr.write(f"planish: {telemetry.redact(' '.join(str(known).split()))}\n")
        return exit_code(known)
    except BrokenPipeError:
        # The reader has seen enough; nothing more can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


IN_PIECES: dict[str, str] = {
    "checkpoint": "planish.checkpoint.cli.command",
    "compare": "planish.show.compare",
    "config": "planish.stages.prepare.command",
    "evaluate": "planish.show.evaluate",
    "export": "planish.stages.export.publish",
    "plan": "planish.stages.prepare.command",
    "rollout": "planish.engines.planner.cli",
    "sweep": "planish.submit.local.sweep",
    "verifier": "planish.show.verifier",
    **dict.fromkeys(
        ("submit", "schedule", "upload", "status", "logs", "stop", "avoid", "cleanup"),
        "planish.submit.command",
    ),
}
"""Commands that yield what to print, and may take long; the module that has their `run`."""


def _print_pieces(run: Callable[..., Lines], options: argparse.Namespace, console: Console) -> int:
    """Print what a command yields, and how far long ones have come."""
    from rich.text import Text

    from planish.base.errors import Ended
    from planish.show.text import table

    with _Bar(bytes_=options.command == "checkpoint") as bar:
        try:
            for piece in run(options, bar.show):
                bar.close()
                if isinstance(piece, str):
                    # Pins and pages of text go through unfolded: scripts read them.
                    console.print(Text(piece), soft_wrap=True)
                else:
                    console.print(table(piece.title, *piece.columns, rows=piece.rows, width=200))
        except Ended as ended:
            return ended.code
    return 0


class _Bar:
    """A progress bar on standard error, there from the first report on; none in a pipe."""

    def __init__(self, *, bytes_: bool = True) -> None:
        self._bytes = bytes_
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, what: str, done: int, total: int) -> None:
        """Say that `done` of `total` (0: unknown) are done; may be called from any thread."""
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            from rich import progress
            from rich.console import Console

            counts: list[progress.ProgressColumn] = [progress.MofNCompleteColumn()]
            if self._bytes:
                counts = [progress.DownloadColumn(binary_units=True)]
                counts.append(progress.TransferSpeedColumn())
            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                *([progress.TaskProgressColumn()] if total else []),
                *counts,
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(what, total=total or None)
        self._progress.update(self._task, description=what, completed=done, total=total or None)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


if __name__ == "__main__":
    raise SystemExit(main())
