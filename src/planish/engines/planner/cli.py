"""The command line `planish rollout ...`: its options, and the function of each command.

Only argparse is imported before a command is known. Commands yield tables and lines of text; the
caller prints them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from planish.base.errors import ConfigError
from planish.base.text import Table

Progress = Callable[[str, int, int], None]
"""Function that is called with a text, steps done and steps in all (0: unknown)."""

Lines = Iterator[Table | str]
"""Output of a command, piece by piece."""

LARGEST = 1e12
RANK_PORT = 9610

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": (
        "planish.engines.planner.report:plan",
        "find the best deployment of attention and experts apart, or say that there is none",
    ),
    "simulate": (
        "planish.engines.planner.simulate:simulate",
        "run a plan on simulated ranks, with jitter, uneven experts and dead ranks",
    ),
    "profile": (
        "planish.engines.planner.profile:profile",
        "measure attention and one expert on this machine, for `plan --profile`",
    ),
    "manifests": (
        "planish.engines.deploy.manifests:manifests",
        "render the ranks of a plan for a Kubernetes cluster, as YAML",
    ),
    "rank": (
        "planish.engines.deploy.host:host",
        "wait for a coordinator and run one rank for it, on the machine of the rank",
    ),
}
"""Map from command to its `module:function` and its line of help."""


def counts(text: str) -> tuple[int, ...]:
    """Return the positive numbers of `1,2,4` or `1..16`, ascending.

    Example:
        >>> counts("1..3"), counts("8,2")
        ((1, 2, 3), (2, 8))
    """
    found: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        first, last = (int(x) if x.isdecimal() else 0 for x in (low, high if dots else low))
        if not 1 <= first <= last <= 4096:
            raise argparse.ArgumentTypeError(
                f"must be whole numbers from 1 to 4096 such as 1,2,4 or 1..16, got {text!r}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def replicas(text: str) -> tuple[int, ...] | str:
    """Return numbers like `counts`; the words `balance` and `around` stay as they are."""
    return text if text in ("balance", "around") else counts(text)


def positive(text: str) -> float:
    """Return a number above 0 and at most `LARGEST`, or `inf`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value <= LARGEST or value == math.inf):
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most {LARGEST:g}, or inf, got {text!r}"
        )
    return value


def whole(text: str, most: int, what: str) -> int:
    """Return a whole number from 1 to `most`."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return int(text)


count = functools.partial(whole, most=10**7, what="a positive whole number")
port = functools.partial(whole, most=65533, what="a port from 1 to 65533")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command and its options to the parser of `planish rollout`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {
        name: commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        for name, (_, line) in COMMANDS.items()
    }
    add_plan_options(made["plan"])
    add = made["simulate"].add_argument
    add("plan", type=Path, metavar="PLAN", help="file of `planish rollout plan --json`")
    add("--requests", type=count, default=0, metavar="N", help="default: twice the plan's batch")
    add("--spread", type=float, default=0.5, help="of the log of response lengths (default 0.5)")
    add("--jitter", type=float, default=0.0, help="of the log of each time (default 0.0)")
    add("--imbalance", type=positive, default=1.0, help="busiest expert rank over mean (1.0)")
    add(
        "--dead",
        action="append",
        default=[],
        metavar="ROLE:RANK@SECONDS",
        help="a rank that dies: attention:0@1.5 or experts:3@2; repeatable (a plan with "
        "--redundancy outlives experts; the engines of this package end)",
    )
    add("--seed", type=int, default=0, help="of all draws (default 0)")
    add("--json", type=Path, metavar="FILE", help="gets every figure")
    add = made["profile"].add_argument
    add("--model", required=True, metavar="M", help="name of a published model, or a config.json")
    add("--out", type=Path, required=True, metavar="FILE", help="gets what was measured")
    rows = (16, 32, 64, 128, 256, 512, 1024)
    add("--rows", type=counts, default=rows, metavar="N", help="of a stage (16,32,64,...,1024)")
    add("--tp", type=counts, default=(1,), metavar="N", help="GPUs that share a matrix (1)")
    add("--length", type=positive, default=650.5, help="cached tokens of a row (650.5)")
    add("--repeats", type=count, default=20, metavar="N", help="runs of a point at most (20)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    add(
        "--transport",
        choices=("sockets", "nixl"),
        default="",
        help="measure frames between two processes too",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")

    add_manifests_options(made["manifests"])
    add = made["rank"].add_argument
    add("--host", required=True, help="address of this machine, for coordinator and other ranks")
    add("--port", type=port, default=RANK_PORT, help=f"the first of three ({RANK_PORT})")
    add("--device", default="cuda", help="torch device of the rank (cuda)")


def add_manifests_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `planish rollout manifests`."""
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN", help="file of `planish rollout plan --json`")
    add("--image", required=True, metavar="REFERENCE", help="of planish/rollout, for all ranks")
    add(
        "--kind",
        choices=("leaderworkerset", "statefulset"),
        default="leaderworkerset",
        help="of the sets of pods (default leaderworkerset)",
    )
    add("--engine", choices=("disagg", "vllm_disagg"), default="disagg", help="default disagg")
    add("--name", default="ranks", help="of the objects, before `-attention` (default ranks)")
    add("--namespace", default="planish", help="default planish")
    add(
        "--nodes",
        action="append",
        default=[],
        metavar="GPU:LABEL=VALUE",
        help="label of the nodes with a type of GPU; repeatable, needed where there are two types",
    )
    add("--gpu-resource", default="nvidia.com/gpu", help="default nvidia.com/gpu")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu asks for no GPU (cuda)")
    add("--cpu", default="10", metavar="N", help="cores that a pod requests (10)")
    add("--memory", default="100Gi", metavar="N", help="request and limit of a pod (100Gi)")
    add("--shared-memory", default="16Gi", metavar="N", help="/dev/shm of a GPU pod (16Gi)")
    add("--secret", default="planish-store", help="with the token and the store (planish-store)")
    add("--port", type=port, default=RANK_PORT, help=f"the first of three ({RANK_PORT})")
    add("--anyway", action="store_true", help="also where the plan says not to disaggregate")
    add("--out", type=Path, metavar="FILE", help="gets the YAML; else it is printed")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `planish rollout plan`."""
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="name of a published model, or a config.json")
    add("--attention-gpus", required=True, metavar="A,B", help="types tried for attention")
    add("--expert-gpus", required=True, metavar="A,B", help="types tried for experts")
    add(
        "--objective",
        choices=("gpu", "cost", "watt"),
        default="gpu",
        help="tokens per second are maximised per GPU (default), price or watt",
    )
    add(
        "--slo-ms",
        type=positive,
        default=150.0,
        metavar="MS",
        help="longest time between tokens (default 150; inf for rollouts nobody waits for)",
    )
    add("--input", type=positive, default=571.0, metavar="N", help="prompt tokens (default 571)")
    add("--output", type=positive, default=159.0, metavar="N", help="response tokens (default 159)")
    add(
        "--micro-batches",
        type=counts,
        default=(3, 4),
        metavar="3,4",
        help="numbers of micro-batches that are tried (default 3,4)",
    )
    add(
        "--replicas",
        type=replicas,
        default="around",
        metavar="1..16",
        help="attention replicas that are tried; `balance`: where both stages take as long, as "
        "the paper does; `around` (default): these, and on for as long as others are better",
    )
    sizes = (1, 2, 4, 8)
    add("--tp-a", type=counts, default=sizes, metavar="N", help="GPUs of a replica (1,2,4,8)")
    add("--tp-e", type=counts, default=sizes, metavar="N", help="GPUs of an expert node (1,2,4,8)")
    add(
        "--expert-nodes",
        type=counts,
        default=(),
        metavar="N",
        help="nodes that share the experts (default one expert each, and for more than 32 "
        "experts also their divisors from 8 on)",
    )
    add("--batch", type=count, default=0, metavar="N", help="requests at once (default: most)")
    add("--max-gpus", type=count, default=0, metavar="N", help="of a deployment (default: any)")
    add("--imbalance", type=positive, default=1.0, help="busiest expert node over the mean (1.0)")
    add("--redundancy", type=float, default=0.0, help="share of experts stored twice (0.0)")
    add(
        "--combine",
        choices=("exact", "local_sum"),
        default="exact",
        help="rows on the network: one per token and expert, or per token and expert node",
    )
    add(
        "--baseline",
        choices=("ideal", "framework"),
        default="ideal",
        help="what the ratio is to: colocated without overhead (default), or twice as long",
    )
    add("--baseline-gpu", default="", metavar="G", help="of it (default the best of those above)")
    add(
        "--gpu-data",
        action="append",
        default=[],
        metavar="G.FIGURE=X",
        help="other figure of a GPU, such as h100.price=4.5 or a800.network_rate=5e10; repeatable",
    )
    add(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=X",
        help="other constant of the performance model; repeatable",
    )
    add("--profile", type=Path, metavar="FILE", help="measured stages of `planish rollout profile`")
    add("--json", type=Path, metavar="FILE", help="gets everything, each evaluated plan too")


def write_output(option: str, path: Path | None, text: str) -> None:
    """Write the file that an option names, if it names one, or raise ConfigError."""
    try:
        if path is not None:
            path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"`{option}` must be a file that can be written, got {path}: {error}"
        ) from None


def run(options: argparse.Namespace, progress: Progress) -> Lines:
    """Run the command of the parsed options, and yield its output."""
    module, _, function = COMMANDS[options.action][0].partition(":")
    yield from getattr(importlib.import_module(module), function)(options, progress)
