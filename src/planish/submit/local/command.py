"""Commands `planish run` and `planish sweep`: the pipeline on this machine, once or many times."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers of `planish` (argparse does not export their class)."""
    run = commands.add_parser("run", help="run the pipeline on this machine and show what happens")
    run_parameters(run)
    run.add_argument("--no-control", action="store_true", help="skip the supervised control")
    run.add_argument(
        "--track",
        action="append",
        metavar="TRACKER",
        help="tensorboard[=FOLDER], mlflow[=URI] or wandb[=PROJECT]; may be given again "
        "(default: tensorboard, below the root)",
    )
    run.add_argument("--no-track", action="store_true", help="write to no tracker")
    sweep = commands.add_parser("sweep", help="do the runs that a file lists, one after the other")
    sweep.add_argument("file", metavar="FILE", help="TOML with a table [[runs]] for each")
    sweep.add_argument("--root", default="", help="of all runs (default runs/ and FILE's name)")
    sweep.add_argument(
        "--kubeflow",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="submit them all to a cluster; what follows are options of `planish submit`",
    )


def run_parameters(parser: argparse.ArgumentParser, *, root_required: bool = False) -> None:
    """Add the run parameters of the pipeline `post_train` that apply to one machine."""
    parser.add_argument(
        "--root", required=root_required, help="folder of the run: a path or s3://..."
    )
    parser.add_argument(
        "--preset",
        default="",
        help="shipped settings to start from (default dapo-small with a model, else dapo-tiny)",
    )
    parser.add_argument("--config", default="", help="TOML file laid over the preset")
    _setting(parser, "-o", shlex.quote, "SECTION.KEY=VALUE", "a setting; may be given again")
    _setting(parser, "--overrides", str, "SETTINGS", "several of them, separated by spaces")
    for option, key in (("--engine", "engine.name"), ("--trainer", "train.trainer")):
        named = lambda name, key=key: shlex.quote(f"{key}={name}")  # noqa: E731
        _setting(parser, option, named, "NAME", f"same as -o {key}=NAME")
    parser.add_argument("--skip-bad", action="store_true", help="drop malformed lines of the data")
    parser.add_argument(
        "--model", default="", help="smollm2, folder, hub id, s3://, https://; empty: of the preset"
    )
    parser.add_argument("--dataset", default="", help="file, hub id, s3://, https://; empty: tasks")
    parser.add_argument("--dataset-map", default="", help="columns: prompt=question,answer=label")
    parser.add_argument("--seed", type=int, default=-1, help="same as -o run.seed=N")
    parser.add_argument("--resume-from", default="", help="root or pin of an earlier run")
    parser.add_argument("--chain-index", type=int, default=0)
    parser.add_argument("--allow-config-change", action="store_true")
    parser.add_argument("--profile", default="cpu-tiny", help="name of a compiled profile")
    parser.add_argument("--iterations", type=int, help="in place of the profile's number")
    parser.add_argument("--shards", type=int, help="of the rollouts of an iteration, as above")
    resident_option(parser)


def resident_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that runs several iterations in one task."""
    parser.add_argument(
        "--resident",
        type=int,
        nargs="?",
        const=4,
        metavar="N",
        help="N iterations (default 4) as one task that keeps trainer and engine in memory; 0: a "
        "task for each stage",
    )


def _setting(
    parser: argparse.ArgumentParser, option: str, kind: Any, metavar: str, text: str
) -> None:
    """Add an option whose value is appended to `overrides`, in the order of the command line."""
    parser.add_argument(
        option,
        dest="overrides",
        action="append",
        type=kind,
        default=[],
        metavar=metavar,
        help=text,
    )


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """If a signal ends the block, print that the same command continues the run."""
    from planish.run.signals import Terminated, on_signal

    def stop(number: int) -> None:
        raise Terminated(number, 128 + number)

    try:
        with on_signal(stop):
            yield
    except Terminated as stopped:
        sys.stderr.write(f"{stopped}; the same command resumes\n")
        raise


def run(options: argparse.Namespace) -> int:
    """Run the pipeline and print its progress; the last line of standard output is JSON."""
    from rich.console import Console

    from planish.submit.local.run import show_run

    # Paths, settings and errors may contain brackets, which rich would read as markup.
    console = Console(soft_wrap=True, markup=False, emoji=False)
    with resumable():
        return show_run(options, console)
