"""What `python -m tests.minder_lab` does with simulated jobs: it fits and measures detectors.

The models and the thresholds that come with the package were made with `train` and `calibrate`
here, and the figures of its detector in docs/results.md with `evaluate`. Those of other detectors
are in `tests/benchmarks/results/minder_evaluation.json`, which names the commit that made them.
"""

import argparse
import functools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from planish.base.config import read_toml
from planish.minder.detect.config import MinderConfig, minder_config
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab.calibrate import calibrate, record, site_tables
from planish.minder.lab.evaluate import in_processes, markdown, outcome_of, report
from planish.minder.lab.train import train_models
from planish.minder.lab.vae import Training
from tests.minder_lab.recorder import record_run
from tests.minder_lab.simulator import simulate, simulate_rl
from tests.minder_lab.simulator.sampling import thinned

SEEDS = {"train": 1_000_000, "calibrate": 2_000_000, "evaluate": 3_000_000}
"""First seed of each use; a million apart, so that they never meet."""
JOBS = {"pretraining": simulate, "rl": simulate_rl}
"""Kind of job to its generator."""


def parser():
    """Return the parser of all verbs."""
    top = argparse.ArgumentParser(prog="python -m tests.minder_lab")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    one = verbs.add_parser("train", help="train models on healthy jobs")
    one.add_argument("out", type=Path, help="folder that gets the models")
    one.add_argument("--simulated", type=int, default=40, metavar="N", help="jobs (default 40)")
    one.add_argument("--seconds", type=float, default=150.0, help="of CPU time for each metric")
    one.add_argument("--metrics", metavar="A,B", help="default: those that detect; `all` for 21")
    one.set_defaults(do=train)
    for verb, faults, do in (("calibrate", 120, find_thresholds), ("evaluate", 150, evaluate)):
        one = verbs.add_parser(verb)
        one.add_argument("--faults", type=int, default=faults, help="jobs with a fault")
        one.add_argument("--normal", type=int, default=60, help="jobs without one")
        one.add_argument("--seed", type=int, default=SEEDS[verb], help="of the first job")
        one.add_argument("--models", type=Path, default=default_models())
        one.add_argument("--config", type=Path, metavar="TOML", help="settings; default: built in")
        one.add_argument("--jobs", choices=JOBS, default="pretraining", help="what they do")
        one.add_argument("--scrape-seconds", type=int, default=1, help="between two samples")
        one.add_argument("--missing", type=float, default=0.0, help="share of samples lost")
        one.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
        one.add_argument("--json", type=Path, help="gets every figure")
        one.set_defaults(do=do)
    one = verbs.add_parser("record", help="record a gang that trains here, as a healthy job")
    one.add_argument("out", type=Path, help="trace that is written, .npz, .csv or .parquet")
    one.add_argument("--ranks", type=int, default=4, help="machines of the trace (default 4)")
    one.add_argument("--seconds", type=int, default=900, help="length (default 900)")
    one.set_defaults(do=record_here)
    return top


def record_here(options):
    """Record a real run on this machine; `planish minder evaluate --traces` scores the detector."""
    frame = record_run(options.out, num_ranks=options.ranks, seconds=options.seconds)
    means = {name: float(np.nanmean(array)) for name, array in frame.values.items()}
    print(json.dumps({"machines": frame.machines, "seconds": frame.num_seconds, "means": means}))


def train(options):
    """Train models, and print what is known of each."""
    metrics = list(METRICS) if options.metrics == "all" else (options.metrics or "").split(",")
    config = minder_config({"detect": {"metrics": metrics}} if options.metrics else {})
    seeds = range(SEEDS["train"], SEEDS["train"] + options.simulated)
    frames = [simulate(seed, metrics=config.detect.metrics).frame for seed in seeds]
    training = Training(max_seconds=options.seconds)
    for metric in train_models(frames, options.out, config, training).values():
        print(json.dumps({**asdict(metric), "quality": metric.quality}, sort_keys=True))


def settings_of(options):
    """Return the configuration and the models."""
    tables = read_toml(options.config) if options.config else {}
    config = minder_config({k: v for k, v in tables.items() if k in MinderConfig.model_fields})
    return config, load_models(options.models, config.denoise, config.detect.metrics)


def on_case(wanted, work, options):
    """Return what `work(case, models, config)` gives for the job of a seed and a fault."""
    seed, fault = wanted
    case, every = JOBS[options.jobs](seed, fault=fault), options.scrape_seconds
    if every != 1 or options.missing:
        rng = np.random.default_rng([seed, every])
        case = replace(case, frame=thinned(case.frame, rng, every=every, missing=options.missing))
    config, models = settings_of(options)
    return work(case, models, config)


def on_cases(work, options):
    """Return what `work` gives for all jobs, those with a fault first."""
    kinds = ["any"] * options.faults + [None] * options.normal
    wanted = [(options.seed + number, kind) for number, kind in enumerate(kinds)]
    judge = functools.partial(on_case, work=work, options=options)
    return list(in_processes(judge, wanted, workers=options.workers, progress=progress))


def progress(done, total):
    """Tell a terminal how far it is."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcases {done}/{total}" + "\n" * (done == total))


def find_thresholds(options):
    """Find thresholds and floors."""
    best = calibrate(on_cases(record, options), settings_of(options)[0], min_precision=0.9)
    show(options, {**best.to_json(), "tables": site_tables({}, best.best)}, best.markdown())


def evaluate(options):
    """Score the detector."""
    figures = report(on_cases(outcome_of, options))
    show(options, figures, markdown(figures))


def show(options, figures, text):
    """Print tables, and write every figure where that is asked for."""
    if options.json is not None:
        text_of_file = json.dumps(figures, indent=1, sort_keys=True, allow_nan=False)
        options.json.write_text(text_of_file + "\n", "utf-8")
    print(text)


def main():
    """Run a verb of the command line."""
    options = parser().parse_args()
    options.do(options)
