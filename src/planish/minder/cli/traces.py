"""Verbs that read recorded traces: run-once, replay, train, calibrate, evaluate."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError
from planish.minder.cli import BAD_INPUT, CLEAN, FAULT_FOUND
from planish.minder.cli.service import run_once_live
from planish.minder.detect.config import SITE_FILE, MinderConfig, minder_config, read_settings
from planish.minder.detect.denoise import Models
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.detect.result import Result
from planish.minder.lab.calibrate import (
    LEAST_FAULTS,
    calibrate,
    fitted_limits,
    fitted_roles,
    record,
    site_tables,
    toml_of,
)
from planish.minder.lab.cases import Case, read_case, trace_files
from planish.minder.lab.evaluate import in_processes, markdown, outcome_of, report
from planish.minder.lab.files import read_frame
from planish.minder.lab.prioritise import labelled, rank
from planish.minder.lab.replay import Call, notes_of, replay


def run(options: argparse.Namespace) -> int:
    """Run one verb and return its exit code."""
    verbs = {
        "run-once": _run_once,
        "replay": _replay,
        "train": _train,
        "calibrate": _calibrate,
        "evaluate": _evaluate,
    }
    return verbs[options.verb](options)


def _tables(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables of the configuration file with the options merged in."""
    raw = read_settings(options.config) if options.config else {}
    # A file of the service has tables that only the service reads.
    raw = {name: table for name, table in raw.items() if name in MinderConfig.model_fields}
    if options.profile:
        raw["profile"] = options.profile
    if options.metrics:
        minder_config(raw)  # after this check `detect` is known to be a table
        raw["detect"] = {**raw.get("detect", {}), "metrics": options.metrics.split(",")}
    return raw


def _models(options: argparse.Namespace, config: MinderConfig) -> Models:
    return load_models(options.models or default_models(), config.denoise, config.detect.metrics)


def _calls(options: argparse.Namespace, case: Case, every: int = 0) -> Iterator[Call]:
    """Yield the calls that the service would make on a trace, and show the progress."""
    config, frame = minder_config(_tables(options)), case.frame
    models = _models(options, config)
    for call in replay(case, models, config, every=every):
        options.progress("calls", call.now - int(frame.ts[0]), frame.num_seconds)
        yield call


def _run_once(options: argparse.Namespace) -> int:
    """Print the result for the last window before `--end`; the earlier part trains the baseline."""
    if options.from_file is None:
        return run_once_live(options)
    case = read_case(options.from_file)
    first = int(case.frame.ts[0])
    frame = replace(case.frame, job=options.job or case.frame.job)
    if options.end is not None:
        frame = frame.slice(first, int(options.end))
    if not frame.num_seconds:
        raise ConfigError(f"`--end` must be after {first}, got {options.end}")
    *_, call = _calls(options, replace(case, frame=frame))
    sys.stdout.write(call.result.to_json() + "\n")
    return _concluded([call.result], is_fault=bool(call.result.findings))


def _concluded(results: list[Result], *, is_fault: bool) -> int:
    """Print notes on the results to standard error, and return the exit code."""
    for note in notes_of(results):
        sys.stderr.write(f"planish minder: {note}\n")
    if is_fault:
        return FAULT_FOUND
    return CLEAN if any(result.is_judged for result in results) else BAD_INPUT


def _replay(options: argparse.Namespace) -> int:
    """Print a line for each alarm, and a line with durations; the exit code is 2 after an alarm."""
    if options.every < 0:
        raise ConfigError(f"`--every` must be a number of seconds, got {options.every}")
    costs, results, is_fault = [], [], False
    for call in _calls(options, read_case(options.from_file), options.every):
        costs.append(call.seconds)
        results.append(call.result)
        for alarm in call.alarms:
            is_fault = True
            sys.stdout.write(json.dumps(asdict(alarm)) + "\n")
            sys.stdout.flush()
    last = {
        "calls": len(costs),
        "seconds_per_call": round(sum(costs) / max(1, len(costs)), 5),
        "seconds_max": round(max(costs, default=0.0), 5),
    }
    sys.stdout.write(json.dumps(last) + "\n")
    return _concluded(results, is_fault=is_fault)


def _train(options: argparse.Namespace) -> int:
    """Train the models and print a line for each."""
    from planish.minder.lab.train import train_models
    from planish.minder.lab.vae import Training

    config, training = minder_config(_tables(options)), Training(max_seconds=options.seconds)
    frames = []
    for done, path in enumerate(options.from_file):
        options.progress("traces", done, len(options.from_file))
        frames.append(read_frame(path))

    def show(name: str, epoch: int, _: object) -> None:
        options.progress(f"train {name}", epoch, training.max_epochs)

    facts = train_models(frames, options.out, config, training, progress=show)
    for metric in facts.values():
        plain = {**asdict(metric), "quality": metric.quality}
        sys.stdout.write(json.dumps(plain, sort_keys=True) + "\n")
    return CLEAN


def _traces(options: argparse.Namespace) -> list[Path]:
    if options.workers < 1:
        raise ConfigError(f"`--workers` must be at least 1, got {options.workers}")
    return trace_files(options.traces)


def _write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
        options.json.write_text(text + "\n", "utf-8")


def _evaluate(options: argparse.Namespace) -> int:
    """Print the tables of a report."""
    config = minder_config(_tables(options))
    models = _models(options, config)
    outcomes = list(
        in_processes(
            functools.partial(outcome_of, models=models, config=config),
            _traces(options),
            workers=options.workers,
            progress=lambda done, total: options.progress("traces", done, total),
        )
    )
    for outcome in outcomes:
        for note in outcome.notes:
            sys.stderr.write(f"planish minder: {outcome.case}: {note}\n")
    document = report(outcomes)
    sys.stdout.write(markdown(document))
    _write_json(options, document)
    return CLEAN


def _calibrate(options: argparse.Namespace) -> int:
    """Fit limits and roles; with enough labelled faults also thresholds and floors. Print them as
    TOML.
    """
    raw = _tables(options)
    config = minder_config(raw)
    models, paths = _models(options, config), _traces(options)
    cases = []
    for number, path in enumerate(paths, 1):
        cases.append(read_case(path))
        options.progress("traces", number, len(paths))
    limits = fitted_limits(cases, config.detect.metrics)
    faults = sum(case.truth.faulty for case in cases)
    fitted = {name: {**raw.get(name, {}), **t} for name, t in site_tables(limits, None).items()}
    config = minder_config({**raw, **fitted})
    roles = fitted_roles(cases, models, config)
    tables, document, tree = site_tables(limits, None, roles), {}, ""
    if faults < LEAST_FAULTS:
        text = (
            f"Thresholds and floors stay as they are: {LEAST_FAULTS} labelled faults are needed, "
            f"got {faults}.\n"
        )
    else:
        recorded = in_processes(
            functools.partial(record, models=models, config=config),
            paths,
            workers=options.workers,
            progress=lambda done, total: options.progress("cases", done, total),
        )
        best = calibrate(list(recorded), config, min_precision=options.min_precision)
        order = rank(config.detect.metrics, *labelled(cases, config, models.limits))
        document, text, tree = best.to_json(), best.markdown(), order.tree
        metrics = [one.metric for one in order.ranked]
        tables = site_tables(limits, best.best, roles, metrics)
    toml = f"# From {len(paths)} recorded traces, {faults} of them with a fault.\n"
    if tree:
        toml += "# `detect.metrics` are tried in the order of this tree, whose features are the\n"
        toml += "# largest normal scores of the machines.\n"
        toml += "".join(f"# {line}\n" for line in tree.splitlines())
    toml += toml_of(tables)
    # Beside the configuration, where `read_settings` finds it.
    out = options.out or (options.config and options.config.parent / SITE_FILE)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(toml, "utf-8")
    sys.stdout.write(text + toml)
    _write_json(options, {**document, "tables": tables})
    return CLEAN
