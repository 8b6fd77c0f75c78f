"""Verbs that work on traces: simulate, train, run-once, replay."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.base.errors import ConfigError

if TYPE_CHECKING:
    from planish.minder.detect.config import MinderConfig
    from planish.minder.detect.detect import Models
    from planish.minder.lab.simulator.case import Case

TRAINING_SEED = 1_000_000
"""First seed of training; calibration and evaluation begin a million later each."""
_CLIPPED_SHARE = 0.01
"""More values than this beyond the limits of a metric say that the limits are wrong."""


def add_commands(verbs: Any) -> None:
    """Add the verbs' parsers."""
    one = verbs.add_parser("simulate", help="write the traces of a simulated job to a file")
    one.add_argument("out", type=Path, help="file that ends in .npz, .csv or .parquet")
    one.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    one.add_argument("--machines", type=int, metavar="N", help="default: drawn from 4 to 64")
    one.add_argument("--minutes", type=float, metavar="M", help="default: drawn from 20 to 60")
    one.add_argument("--fault", metavar="KIND", help="`any`, or one kind; default: healthy")
    one.add_argument("--metrics", metavar="A,B", help="default: nine; `all` for all 21")
    one.add_argument("--raw", action="store_true", help="samples as they came, out of order")
    one = verbs.add_parser("train", help="train the models on healthy traces")
    one.add_argument("out", type=Path, help="folder that gets the models")
    one.add_argument(
        "--from-file", type=Path, nargs="+", metavar="F", help="traces of healthy jobs"
    )
    one.add_argument("--simulated", type=int, default=40, metavar="N",
                     help="without files: so many simulated jobs (default 40)")  # fmt: skip
    one.add_argument("--seed", type=int, default=TRAINING_SEED, help="of the first simulated job")
    one.add_argument(
        "--seconds", type=float, default=150.0, help="of CPU time at most, for each metric"
    )
    _add_config(one)
    one = verbs.add_parser(
        "run-once", help="look at a trace, or ask Prometheus; exit code 2 if a machine is faulty"
    )
    _add_trace(one, required=False)
    one.add_argument("--end", type=float, metavar="T", help="unix seconds; default: its end")
    one.add_argument("--job", default="", help="name of the job; default: that of the file")
    one = verbs.add_parser("replay", help="look at a trace as the service would, minute by minute")
    _add_trace(one)
    one.add_argument("--every", type=int, default=0, metavar="SECONDS",
                     help="between two calls; default: as configured, 60")  # fmt: skip


def _add_trace(one: argparse.ArgumentParser, *, required: bool = True) -> None:
    one.add_argument("--from-file", type=Path, required=required, metavar="F",
                     help="npz, CSV or Parquet with ts, machine, metric, value")  # fmt: skip
    one.add_argument("--models", type=Path, metavar="DIR", help="default: those of this package")
    _add_config(one)


def _add_config(one: argparse.ArgumentParser) -> None:
    one.add_argument("--config", type=Path, metavar="TOML", help="settings; default: built in")
    one.add_argument("--profile", choices=("default", "paper"), help="wins over the settings")
    if "--metrics" not in one.format_help():
        one.add_argument("--metrics", metavar="A,B", help="wins over the settings")


def run(options: argparse.Namespace) -> int:
    """Do one verb and return the exit code."""
    verb = {"simulate": _simulate, "train": _train, "run-once": _run_once, "replay": _replay}
    return verb[options.verb](options)


def settings(options: argparse.Namespace) -> MinderConfig:
    """Return the configuration that options ask for.

    Raises:
        ConfigError: the file can not be read, or its settings can not be.
    """
    from planish.base.config import read_toml
    from planish.minder.detect.config import MinderConfig, minder_config

    raw = read_toml(options.config) if options.config else {}
    # A service's file has sections that matter to it alone.
    raw = {name: table for name, table in raw.items() if name in MinderConfig.model_fields}
    if options.profile:
        raw["profile"] = options.profile
    if options.metrics:
        minder_config(raw)  # `detect` is a table from here on
        raw["detect"] = {**raw.get("detect", {}), "metrics": options.metrics.split(",")}
    return minder_config(raw)


def _trace(options: argparse.Namespace) -> tuple[Case, Models, MinderConfig]:
    from planish.minder.detect.artefacts import default_models, load_models
    from planish.minder.lab.cases import read_case

    config = settings(options)
    case = read_case(options.from_file)
    models = load_models(options.models or default_models(), config.denoise, config.detect.metrics)
    return case, models, config


def _simulate(options: argparse.Namespace) -> int:
    from planish.minder.detect.metrics_table import METRICS
    from planish.minder.lab.cases import facts_of
    from planish.minder.lab.files import write_frame, write_samples
    from planish.minder.lab.simulator import SIMULATED, simulate

    names = {None: SIMULATED, "all": tuple(METRICS)}.get(options.metrics)
    case = simulate(
        options.seed,
        machines=options.machines,
        minutes=options.minutes,
        fault=options.fault,
        metrics=names or options.metrics.split(","),
        keep_samples=options.raw,
    )
    if options.raw and options.out.suffix == ".npz":
        raise ConfigError("raw samples need the long form: name a .csv or .parquet file")
    if options.raw:
        write_samples(options.out, case.samples)
    else:
        write_frame(options.out, case.frame)
    sys.stdout.write(json.dumps(facts_of(case), sort_keys=True) + "\n")
    return 0


def _train(options: argparse.Namespace) -> int:
    from planish.minder.detect.metrics_table import METRICS
    from planish.minder.lab.files import read_frame
    from planish.minder.lab.simulator import simulate
    from planish.minder.lab.train import train_models
    from planish.minder.lab.vae import Training

    config = settings(options)
    frames = []
    wanted = options.from_file or range(options.seed, options.seed + options.simulated)
    for done, one in enumerate(wanted):
        options.progress("traces", done, len(wanted))
        frames.append(
            read_frame(one)
            if isinstance(one, Path)
            else simulate(one, metrics=config.detect.metrics).frame
        )
    training = Training(max_seconds=options.seconds)
    facts = train_models(
        frames,
        options.out,
        config,
        training,
        progress=lambda name, epoch, _: options.progress(
            f"train {name}", epoch, training.max_epochs
        ),
    )
    for name in METRICS:
        if name in facts:
            plain = {**dataclasses.asdict(facts[name]), "quality": facts[name].quality}
            sys.stdout.write(json.dumps(plain, sort_keys=True) + "\n")
    return 0


def _run_once(options: argparse.Namespace) -> int:
    """Look at the last window before the end; what was before it trains the baseline."""
    from planish.minder.cli.command import BAD_INPUT, CLEAN, FAULT_FOUND
    from planish.minder.lab.replay import replay

    if options.from_file is None:
        from planish.minder.cli.service import run_once_live

        return run_once_live(options)
    case, models, config = _trace(options)
    first = int(case.frame.ts[0])
    frame = dataclasses.replace(case.frame, job=options.job or case.frame.job)
    if options.end is not None:
        frame = frame.slice(first, int(options.end))
    if not frame.num_seconds:
        sys.stderr.write(f"planish minder: `--end` must be after {first}, got {options.end}\n")
        return BAD_INPUT
    call = None
    for call in replay(frame, models, config, stages=case.stages, board=case.board):
        options.progress("calls", call.now - first, frame.num_seconds)
    assert call is not None
    sys.stdout.write(call.result.to_json() + "\n")
    return FAULT_FOUND if call.result.findings else CLEAN


def _replay(options: argparse.Namespace) -> int:
    """Print a line for each alert that begins, and one with what the calls took."""
    from planish.minder.lab.replay import replay

    case, models, config = _trace(options)
    frame = case.frame
    if options.every < 0:
        raise ConfigError(f"`--every` must be a number of seconds, got {options.every}")
    costs = []
    clipped: defaultdict[str, float] = defaultdict(float)
    for call in replay(
        frame, models, config, every=options.every, stages=case.stages, board=case.board
    ):
        options.progress("calls", call.now - int(frame.ts[0]), frame.num_seconds)
        costs.append(call.seconds)
        for metric, share in call.result.clipped.items():
            clipped[metric] += share
        for alert in call.alerts:
            sys.stdout.write(json.dumps(alert) + "\n")
            sys.stdout.flush()
    last = {
        "calls": len(costs),
        "seconds_per_call": round(sum(costs) / max(1, len(costs)), 5),
        "seconds_max": round(max(costs, default=0.0), 5),
    }
    for metric, total in sorted(clipped.items()):
        share = total / len(costs)
        if share > _CLIPPED_SHARE:
            sys.stderr.write(
                f"planish minder: {share:.0%} of {metric} lies outside its limits; give those of "
                "this hardware in the table `limits` (`planish minder calibrate --traces`)\n"
            )
    sys.stdout.write(json.dumps(last) + "\n")
    return 0
