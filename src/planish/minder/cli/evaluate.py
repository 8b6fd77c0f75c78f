"""Verbs that judge the detector: prioritise, calibrate, evaluate."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.base.errors import ConfigError

if TYPE_CHECKING:
    from planish.minder.lab.evaluate import Plan, Wanted
    from planish.minder.lab.site import SiteLimits


def add_commands(verbs: Any) -> None:
    """Add the verbs' parsers."""
    one = verbs.add_parser("prioritise", help="order the metrics by how well they tell faults")
    _add_cases(one, "calibrate", faults=100, normal=40)
    one.add_argument("--metrics", metavar="A,B", help="default: those of the settings")
    one = verbs.add_parser(
        "calibrate", help="find thresholds and floors on simulated jobs, or a site's on its traces"
    )
    _add_cases(one, "calibrate", faults=120, normal=60)
    _add_traces(one)
    one.add_argument("--out", type=Path, metavar="TOML", help="tables for the settings of a site")
    one.add_argument("--variant", default="minder", help="whose thresholds (default minder)")
    one.add_argument("--min-precision", type=float, default=0.9, metavar="P", help="default 0.9")
    one = verbs.add_parser("evaluate", help="score detectors on simulated jobs or on traces")
    _add_cases(one, "evaluate", faults=150, normal=60)
    _add_traces(one)
    one.add_argument("--variants", metavar="A,B", help="default: all")
    one.add_argument(
        "--fit-comparison",
        action="store_true",
        help="first fit what only comparisons need into the folder of models",
    )


def _add_cases(one: argparse.ArgumentParser, use: str, *, faults: int, normal: int) -> None:
    one.add_argument("--faults", type=int, default=faults, metavar="N",
                     help=f"simulated jobs with a fault (default {faults})")  # fmt: skip
    one.add_argument("--normal", type=int, default=normal, metavar="N",
                     help=f"simulated jobs without one (default {normal})")  # fmt: skip
    one.add_argument("--seed", type=int, metavar="S", help="of the first job; default: its own")
    one.add_argument("--models", type=Path, metavar="DIR", help="default: those of this package")
    one.add_argument("--config", type=Path, metavar="TOML", help="settings; default: built in")
    one.add_argument("--work", type=Path, metavar="DIR", help="keeps finished jobs for a next run")
    one.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default 1)")
    one.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    one.set_defaults(use=use)


def _add_traces(one: argparse.ArgumentParser) -> None:
    one.add_argument("--traces", type=Path, nargs="+", metavar="PATH",
                     help="recorded traces or folders of them, in place of simulated jobs; what is "
                     "known of `a.npz` stands in `a.json`")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Do one verb and return the exit code."""
    verb = {"prioritise": _prioritise, "calibrate": _calibrate, "evaluate": _evaluate}
    document, text = verb[options.verb](options)
    sys.stdout.write(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        written = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
        options.json.write_text(written + "\n", "utf-8")
    return 0


def _plan(options: argparse.Namespace, variants: tuple[str, ...]) -> Plan:
    from planish.minder.detect.artefacts import default_models
    from planish.minder.lab.evaluate import Plan

    if options.workers < 1 or options.faults < 0 or options.normal < 0:
        raise ConfigError(
            "`--workers` must be at least 1, `--faults` and `--normal` at least 0, got "
            f"{options.workers}, {options.faults} and {options.normal}"
        )
    return Plan(
        variants=variants,
        models=options.models or default_models(),
        config=_tables(options.config) if options.config else None,
        work=options.work,
    )


def _tables(path: Path) -> dict[str, Any]:
    """Return the tables of a file that a detector knows."""
    from planish.base.config import read_toml
    from planish.minder.detect.config import MinderConfig

    tables = read_toml(path)
    return {name: table for name, table in tables.items() if name in MinderConfig.model_fields}


def _cases(options: argparse.Namespace) -> list[Wanted]:
    from planish.minder.lab.cases import trace_files
    from planish.minder.lab.evaluate import SEEDS, cases

    if getattr(options, "traces", None):
        return list(trace_files(options.traces))
    first = SEEDS[options.use] if options.seed is None else options.seed
    return cases(first, options.faults, options.normal)


def _evaluate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from planish.minder.lab.evaluate import evaluate
    from planish.minder.lab.evaluate_report import markdown, report
    from planish.minder.lab.variants import RECIPES

    names = tuple(options.variants.split(",")) if options.variants else tuple(RECIPES)
    plan = _plan(options, names)
    if options.fit_comparison:
        _fit(plan, options)
    # Wrong names and missing models are told before minutes have gone by.
    about = {name: variant.about for name, variant in plan.build().items()}
    wanted = _cases(options)
    outcomes = evaluate(
        plan,
        wanted,
        workers=options.workers,
        progress=lambda done, total: options.progress("cases", done, total),
    )
    document = report(outcomes, about)
    ends = [one for one in (*wanted[:1], *wanted[-1:]) if isinstance(one, tuple)]
    document["seeds"] = [seed for seed, _ in ends]
    return document, markdown(document)


def _fit(plan: Plan, options: argparse.Namespace) -> None:
    """Fit what only comparisons need to healthy simulated jobs of the training seeds."""
    from planish.minder.lab.evaluate import SEEDS
    from planish.minder.lab.simulator import simulate
    from planish.minder.lab.vae import Training
    from planish.minder.lab.variants import build
    from planish.minder.lab.variants_fit import fit_comparison

    variant = build("raw", plan.models, base=plan.config)
    count = 40
    frames = []
    for number in range(count):
        frames.append(simulate(SEEDS["train"] + number).frame)
        options.progress("training jobs", number + 1, count)
    training = Training(seed=SEEDS["train"], max_seconds=150.0)
    fit_comparison(
        *(frames, plan.comparison or plan.models, variant.config, variant.models.limits, training),
        progress=lambda epoch, _: options.progress("epochs", epoch, training.max_epochs),
    )


def _prioritise(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from dataclasses import asdict

    from planish.minder.lab.evaluate_report import table
    from planish.minder.lab.prioritise import labelled, rank
    from planish.minder.lab.simulator import simulate
    from planish.minder.lab.variants import build

    plan = _plan(options, ("raw",))
    base = dict(plan.config or {})
    if options.metrics:
        base["detect"] = {**base.get("detect", {}), "metrics": options.metrics.split(",")}
    variant = build("raw", plan.models, base=base)
    metrics = variant.config.detect.metrics
    wanted = [one for one in _cases(options) if isinstance(one, tuple)]
    frames = []
    for number, (seed, kind) in enumerate(wanted, 1):
        case = simulate(seed, fault=kind, metrics=metrics)
        truth = case.truth
        frames.append((case.frame, (truth.onset, truth.halt) if truth.faulty else None))
        options.progress("cases", number, len(wanted))
    order = rank(metrics, *labelled(frames, variant.config, variant.models.limits))
    rows = [
        (one.metric, "-" if one.depth is None else one.depth, f"{one.importance:.3f}")
        for one in order
    ]
    text = table("| metric | depth | importance |", rows)
    return {"order": [asdict(one) for one in order]}, text + "\n"


def _calibrate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from planish.minder.lab.calibrate import Settings, calibrate
    from planish.minder.lab.site import LEAST_FAULTS, Site

    plan, wanted = _plan(options, (options.variant,)), _cases(options)
    limits: dict[str, SiteLimits] = {}
    faults, notes = options.faults, []
    if options.traces:
        limits, faults = _limits(plan, wanted, options)
        config = dict(plan.config or {})
        plan = replace(plan, config={**config, **Site(limits).merged(config)})
        notes = [f"From {len(wanted)} recorded traces, {faults} of them with a fault."]
    found: Settings | None = None
    document: dict[str, Any] = {}
    if options.traces and faults < LEAST_FAULTS:
        text = (
            f"Thresholds and floors stay as they are: {LEAST_FAULTS} labelled faults are needed, "
            f"got {faults}.\n"
        )
    else:
        best = calibrate(
            *(plan, wanted),
            workers=options.workers,
            min_precision=options.min_precision,
            progress=lambda done, total: options.progress("cases", done, total),
        )
        document, text, found = best.to_json(), best.markdown(), best.best
    site = Site(limits, found, tuple(notes))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(site.toml(), "utf-8")
    return {**document, "tables": site.tables()}, text + (site.toml() if options.traces else "")


def _limits(
    plan: Plan, wanted: Sequence[Wanted], options: argparse.Namespace
) -> tuple[dict[str, SiteLimits], int]:
    """Return the limits that recorded traces show, and how many of these have a fault."""
    from planish.minder.lab.evaluate import case_of
    from planish.minder.lab.site import fitted_limits

    (variant,) = plan.build().values()
    cases = []
    for number, one in enumerate(wanted, 1):
        cases.append(case_of(one))
        options.progress("traces", number, len(wanted))
    limits = fitted_limits(cases, variant.config.detect.metrics)
    return limits, sum(case.truth.faulty for case in cases)
