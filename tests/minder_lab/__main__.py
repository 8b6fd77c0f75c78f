"""python -m tests.minder_lab VERB: simulated jobs, and what is fitted to them or compared on them.

The models and the thresholds that come with the package were made with `train` and `calibrate`
here, and the figures of docs/results.md with `evaluate`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planish.base.config import read_toml
from planish.base.errors import PlanishError
from planish.minder.detect.config import MinderConfig, minder_config
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.model_files import default_models
from planish.minder.lab.calibrate import Recorded, calibrate, record, site_tables, toml_of
from planish.minder.lab.cases import facts_of, trace_files
from planish.minder.lab.evaluate import in_processes
from planish.minder.lab.files import write_frame, write_samples
from planish.minder.lab.train import train_models
from planish.minder.lab.vae import Training
from tests.minder_lab.evaluate import SEEDS, Plan, Wanted, case_of, cases, evaluate
from tests.minder_lab.report import markdown, report
from tests.minder_lab.simulator import SIMULATED, simulate
from tests.minder_lab.variants import RECIPES, build
from tests.minder_lab.variants_fit import fit_comparison

COMPARISON = Path(__file__).resolve().parent / "models"
"""The integrated model and the static limits; beside them models of further metrics."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    top = argparse.ArgumentParser(prog="python -m tests.minder_lab")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    one = verbs.add_parser("simulate", help="write the traces of a simulated job to a file")
    one.add_argument("out", type=Path, help="file that ends in .npz, .csv or .parquet")
    one.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    one.add_argument("--machines", type=int, metavar="N", help="default: drawn from 4 to 64")
    one.add_argument("--minutes", type=float, metavar="M", help="default: drawn from 20 to 60")
    one.add_argument("--fault", metavar="KIND", help="`any`, or one kind; default: healthy")
    one.add_argument("--metrics", metavar="A,B", help="default: nine; `all` for all 21")
    one.add_argument("--raw", action="store_true", help="samples as they came, out of order")
    one.set_defaults(do=_simulate)
    one = verbs.add_parser("train", help="train models on healthy jobs")
    one.add_argument("out", type=Path, help="folder that gets the models")
    one.add_argument("--simulated", type=int, default=40, metavar="N", help="jobs (default 40)")
    one.add_argument("--seed", type=int, default=SEEDS["train"], help="of the first job")
    one.add_argument("--seconds", type=float, default=150.0, help="of CPU time for each metric")
    one.add_argument("--metrics", metavar="A,B", help="default: those that detect; `all` for 21")
    one.set_defaults(do=_train)
    one = verbs.add_parser("calibrate", help="find thresholds and floors")
    _add_cases(one, "calibrate", faults=120, normal=60)
    one.add_argument("--out", type=Path, metavar="TOML", help="gets the tables")
    one.add_argument("--variant", default="minder", help="whose thresholds (default minder)")
    one.add_argument("--min-precision", type=float, default=0.9, metavar="P", help="default 0.9")
    one.set_defaults(do=_calibrate)
    one = verbs.add_parser("evaluate", help="compare detectors")
    _add_cases(one, "evaluate", faults=150, normal=60)
    one.add_argument("--traces", type=Path, nargs="+", metavar="PATH", help="not simulated jobs")
    one.add_argument("--variants", metavar="A,B", help="default: all")
    one.add_argument("--comparison", type=Path, default=COMPARISON, metavar="DIR",
                     help="folder of what only comparisons need")  # fmt: skip
    one.add_argument("--fit-comparison", action="store_true",
                     help="first fit what only comparisons need")  # fmt: skip
    one.set_defaults(do=_evaluate)
    return top


def _add_cases(one: argparse.ArgumentParser, use: str, *, faults: int, normal: int) -> None:
    one.add_argument("--faults", type=int, default=faults, metavar="N",
                     help=f"simulated jobs with a fault (default {faults})")  # fmt: skip
    one.add_argument("--normal", type=int, default=normal, metavar="N",
                     help=f"simulated jobs without one (default {normal})")  # fmt: skip
    one.add_argument("--seed", type=int, metavar="S", help="of the first job; default: its own")
    one.add_argument("--models", type=Path, default=default_models(), metavar="DIR",
                     help="default: those of the package")  # fmt: skip
    one.add_argument("--config", type=Path, metavar="TOML", help="settings; default: built in")
    one.add_argument("--scrape-seconds", type=int, default=1, metavar="S",
                     help="between two samples of a simulated machine (default 1)")  # fmt: skip
    one.add_argument("--missing", type=float, default=0.0, metavar="P",
                     help="share of the samples that are lost (default 0)")  # fmt: skip
    one.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default 1)")
    one.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    one.set_defaults(use=use)


def main(arguments: list[str] | None = None) -> int:
    """Do one verb; 3 for what can not be."""
    options = parser().parse_args(arguments)
    try:
        document = options.do(options)
    except PlanishError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 3
    if getattr(options, "json", None) is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
        options.json.write_text(text + "\n", "utf-8")
    return 0


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what} {done}/{total}" + "\n" * (done == total))


def _simulate(options: argparse.Namespace) -> None:
    names = {None: SIMULATED, "all": tuple(METRICS)}.get(options.metrics)
    case = simulate(
        options.seed,
        machines=options.machines,
        minutes=options.minutes,
        fault=options.fault,
        metrics=names or options.metrics.split(","),
        keep_samples=options.raw,
    )
    if options.raw:
        write_samples(options.out, case.samples)
    else:
        write_frame(options.out, case.frame)
    print(json.dumps(facts_of(case), sort_keys=True))


def _train(options: argparse.Namespace) -> None:
    metrics = list(METRICS) if options.metrics == "all" else (options.metrics or "").split(",")
    config = minder_config({"detect": {"metrics": metrics}} if options.metrics else {})
    frames = []
    for number in range(options.simulated):
        frames.append(simulate(options.seed + number, metrics=config.detect.metrics).frame)
        _progress("jobs", number + 1, options.simulated)
    training = Training(max_seconds=options.seconds)
    facts = train_models(frames, options.out, config, training)
    for metric in facts.values():
        print(json.dumps({**asdict(metric), "quality": metric.quality}, sort_keys=True))


def _plan(options: argparse.Namespace, variants: tuple[str, ...]) -> Plan:
    tables = read_toml(options.config) if options.config else {}
    return Plan(
        variants=variants,
        models=options.models,
        comparison=getattr(options, "comparison", COMPARISON),
        config={name: one for name, one in tables.items() if name in MinderConfig.model_fields},
        every=options.scrape_seconds,
        missing=options.missing,
    )


def _cases(options: argparse.Namespace) -> list[Wanted]:
    if getattr(options, "traces", None):
        return list(trace_files(options.traces))
    first = SEEDS[options.use] if options.seed is None else options.seed
    return cases(first, options.faults, options.normal)


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    names = tuple(options.variants.split(",")) if options.variants else tuple(RECIPES)
    plan = _plan(options, names)
    if options.fit_comparison:
        _fit(plan)
    # Wrong names and missing models are told before minutes have gone by.
    about = {name: variant.about for name, variant in plan.build().items()}
    wanted = _cases(options)
    outcomes = evaluate(
        plan,
        wanted,
        workers=options.workers,
        progress=lambda done, total: _progress("cases", done, total),
    )
    document = report(outcomes, about)
    ends = [one for one in (*wanted[:1], *wanted[-1:]) if isinstance(one, tuple)]
    document["seeds"] = [seed for seed, _ in ends]
    sys.stdout.write(markdown(document))
    return document


def _fit(plan: Plan) -> None:
    """Fit what only comparisons need to healthy simulated jobs of the training seeds."""
    variant = build("raw", plan.models, base=plan.config, comparison=plan.comparison)
    frames = []
    for number in range(40):
        frames.append(simulate(SEEDS["train"] + number).frame)
        _progress("training jobs", number + 1, 40)
    training = Training(seed=SEEDS["train"], max_seconds=150.0)
    limits = variant.models.limits
    fit_comparison(frames, plan.comparison, variant.config, limits, training)


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    plan = _plan(options, (options.variant,))
    (variant,) = plan.build().values()
    recorded = in_processes(
        functools.partial(_record, plan=plan),
        _cases(options),
        workers=options.workers,
        progress=lambda done, total: _progress("cases", done, total),
    )
    best = calibrate(list(recorded), variant.config, min_precision=options.min_precision)
    tables = site_tables({}, best.best)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(toml_of(tables), "utf-8")
    sys.stdout.write(best.markdown())
    return {**best.to_json(), "tables": tables}


def _record(wanted: Wanted, plan: Plan) -> Recorded:
    (variant,) = plan.build().values()
    return record(case_of(wanted, plan), variant.models, variant.config, detector=variant.make())


if __name__ == "__main__":
    raise SystemExit(main())
