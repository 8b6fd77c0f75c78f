"""The command `planish evaluate`: scores of a model on evaluation sets, without a run.

The stages do the work in this process. They write a root like that of a run, with the
configuration, the prompts, the imported policy and the evaluations. They reuse finished results of
an earlier call.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from planish.base.text import Table

if TYPE_CHECKING:
    from planish.run.stage import Context
    from planish.stages.evaluate.stage import Scored

INSPECTED = ("curate", "engine", "evaluate", "model", "run")
"""Sections that are inspected; the other sections are for training."""
OF_SETS = {
    "dataset_map": "columns: prompt=question,answer=label",
    "hub_config": "configuration name on the hub",
    "hub_split": "split on the hub (default test)",
    "hub_revision": "commit or tag on the hub",
    "verifier": "of rows that name none (default auto)",
    "prompt_prefix": "before each problem",
    "prompt_suffix": "behind each problem",
}
"""Settings of all sets on the command line, with their help texts."""
OF_EVALUATION: dict[str, tuple[type, str]] = {
    "max_response_tokens": (int, "of the longest response (default 20480)"),
    "temperature": (float, "of the sampled responses (default: of the policy's run, else 1)"),
    "top_p": (float, "nucleus of the sampled responses (default: of the policy's run, else 1)"),
    "max_prompts": (int, "of each set, the first by id (default all)"),
}
"""Settings of `[evaluate]` with an option, except the number of samples, and their types and help
texts."""


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers of `planish` (argparse does not export their class)."""
    parser = commands.add_parser("evaluate", help="measure a model on evaluation sets")
    parser.add_argument("model", help="folder, hub id, s3://, https:// or pinned policy of a run")
    parser.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="aime-2024, aime-2025, math-500, gsm8k, NAME=COPY of one of them, or a file, hub id, "
        "s3://, https://",
    )
    parser.add_argument("--engine", help="default transformers")
    parser.add_argument(
        "-n", "--num-samples", type=int, help="responses to each prompt (default 32)"
    )
    for name, (kind, text) in OF_EVALUATION.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    for name, text in OF_SETS.items():
        option = f"--{name.removeprefix('hub_').replace('_', '-')}"
        parser.add_argument(option, dest=name, metavar="TEXT", help=text)
    parser.add_argument(
        "--out", default="", metavar="ROOT", help="default: a folder below ./evaluations"
    )
    parser.add_argument(
        "-o",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any other setting, such as model.dtype=bfloat16; may be given again",
    )


def run(options: argparse.Namespace, _: Callable[[str, int, int], None]) -> Iterator[Any]:
    """Compute missing evaluations, and yield warnings, the root and the table of scores."""
    from planish.base.config import config_sha256
    from planish.records.refs import is_pin
    from planish.stages.curate.stage import make_sets
    from planish.stages.evaluate.stage import measure_policy
    from planish.stages.sft.stage import first_policy
    from planish.store import normal_pin, normal_uri

    is_policy = is_pin(options.model) and not options.model.startswith("https://")
    pin = normal_pin(options.model) if is_policy else ""
    path = pin.partition("#")[0] or options.model
    config, warnings = configuration(options, path)
    yield from (f"warning: {line}" for line in warnings)
    digest = config_sha256(config)
    name = re.sub(r"[^\w.-]+", "-", PurePosixPath(path.partition("#")[0]).name)[:60]
    root = normal_uri(options.out or f"evaluations/{name}-{digest[:8]}")
    yield f"root {root}"
    context = open_root(root, config, "" if pin else folder_stamp(path))
    sets = make_sets(context)
    pin = pin or str(first_policy(context, sets[0]).values["policy_pin"])
    names = [chosen["name"] for chosen in config["curate"]["evaluation_sets"]]
    rows: list[tuple[Scored, float]] = []
    began = time.monotonic()
    # Its lines say every few seconds how many responses there are, and how fast they come.
    logging.getLogger("planish.engines.base").setLevel(logging.INFO)
    for scored in measure_policy(context, pin, names):
        now = time.monotonic()
        rows.append((scored, now - began))
        began = now
    for scored, _seconds in rows:
        if refused := scored.report.scalars["refused_fraction"]:
            yield f"warning: the engine refused {refused:.1%} of the responses to {scored.name}"
    yield score_table(rows)


def configuration(options: argparse.Namespace, path: str) -> tuple[dict[str, Any], list[str]]:
    """Open model and data; return the resolved settings, and warnings about model and data."""
    from planish.base.config import merge, parse_settings, resolve_config
    from planish.base.errors import ConfigError
    from planish.stages.curate.config import KNOWN_SETS
    from planish.stages.evaluate.stage import sampling_of
    from planish.stages.prepare.checks import check_run
    from planish.stages.prepare.inspect import inspect_sources

    given = {key: value for key, value in vars(options).items() if value is not None}
    of_sets = {key: given[key] for key in OF_SETS if key in given}
    sets = []
    for word in options.data:
        name, _, copy = word.partition("=")
        known = {"name": name, **({"dataset": copy} if copy else {})}
        sets.append({**(known if name in KNOWN_SETS else {"dataset": word}), **of_sets})
    layers: dict[str, dict[str, Any]] = {
        "model": {"path": path},
        "engine": {"name": options.engine} if options.engine else {},
        "evaluate": sampling_of(path)
        | {k: given[k] for k in ("num_samples", *OF_EVALUATION) if k in given},
        "curate": {"evaluation_sets": sets},
    }
    if options.num_samples:
        layers["evaluate"]["pass_at"] = sorted({1, 8, 32, options.num_samples})
    settings = merge({}, overrides=options.settings)
    config = resolve_config(merge(layers, settings))
    if faults := check_run(parse_settings(config), 1):
        raise ConfigError("; ".join(faults))
    found = inspect_sources({section: config[section] for section in INSPECTED})
    own = found.model_config.get("dtype", found.model_config.get("torch_dtype"))
    if own == "bfloat16" and "dtype" not in settings.get("model", {}):
        config["model"]["dtype"] = own
    return config, found.warnings


def folder_stamp(path: str) -> str:
    """Return a text that changes with the files of a local folder; empty for other addresses."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return ""
    stats = {file.name: file.stat() for file in sorted(folder.iterdir())}
    return " ".join(f"{name}:{s.st_size}:{s.st_mtime_ns}" for name, s in stats.items())


def open_root(root: str, config: Mapping[str, Mapping[str, Any]], stamp: str) -> Context:
    """Lock a root and write its configuration; results also depend on `stamp`."""
    from planish.run.lock import acquire, current_holder
    from planish.run.stage import Context
    from planish.stages.prepare.run_file import open_run_file, write_run_file

    acquire(root, current_holder())
    file, _, _ = open_run_file(root, config, resume_from="", allow_config_change=False)
    write_run_file(root, file)
    digest = hashlib.sha256(f"{file.sha256} {stamp}".encode()).hexdigest()
    return Context(root, "evaluate", 0, 0, config, digest, file.document())


def score_table(rows: Sequence[tuple[Scored, float]]) -> Table:
    """Return a table with the scores of all sets; errors are standard errors over samples, for
    fixed prompts.
    """
    first = rows[0][0].report.scalars
    passes = [name for name in first if name.startswith("pass@") and name != "pass@1"]
    passes.sort(key=lambda name: int(name[5:]))
    shown = [*passes, *(["greedy"] if "greedy" in first else []), "truncated_fraction"]
    heads = [name.replace("truncated_fraction", "cut off") for name in shown]
    cells = []
    for scored, seconds in rows:
        scores = scored.report.scalars
        error = scores.get("accuracy_standard_error")
        spread = f" +- {100 * error:.1f}" if error is not None else ""
        cells.append(
            [
                scored.name,
                f"{scores['num_prompts']:.0f}",
                f"{100 * scores['accuracy']:.1f}{spread} %",
                *(f"{100 * scores[name]:.1f} %" for name in shown),
                f"{seconds:.1f}" if scored.is_new else "done before",
            ]
        )
    columns = ("set", "prompts", f"avg@{first['num_samples']:.0f}", *heads, "seconds")
    return Table("scores", columns, cells)
