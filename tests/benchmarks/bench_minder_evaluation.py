"""Score every detector on simulated jobs; writes results/minder_evaluation.json and a picture.

python -m tests.benchmarks.bench_minder_evaluation [options of `minder_lab evaluate`] [--print]
python -m tests.benchmarks.bench_minder_evaluation --draw

`--print` shows the figures and writes nothing. The row `other_board` is the default profile on the
same jobs as machines with other boards would report them: every metric whose limits are fitted is
`FACTOR` times as large. As a new site does it, limits are first fitted to recorded healthy jobs of
other seeds, by `planish minder calibrate`; the built-in models and thresholds stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER
from planish.minder.lab.cases import facts_of, facts_path
from planish.minder.lab.files import write_frame
from tests.benchmarks.facts import COLOURS, RESULTS, write_result
from tests.minder_lab.evaluate import SEEDS, Wanted, case_of, cases

NAME = "minder_evaluation"
FACTOR = 2.1
BOARD = "another board"
SITE_JOBS = 20
"""Healthy jobs that the new site records before it fits its limits."""


def python(*words: object) -> None:
    """Run a module as a program."""
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True)


def evaluate(arguments: list[str], *, is_kept: bool) -> None:
    """Run the command line and keep its figures with the facts of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evaluation.json"
        python("tests.minder_lab", "evaluate", "--json", path, *arguments)
        document = json.loads(path.read_text("utf-8"))
        document["other_board"] = other_board(Path(folder), arguments)
    old, new = (one["first"]["f1"]["value"] for one in (
        document["variants"]["minder"], document["other_board"]["minder"]))  # fmt: skip
    document["other_board"]["f1_minus_minder"] = new - old
    print(f"telemetry of another board: F1 {new:.3f}, {new - old:+.3f}")
    if is_kept:
        write_result(NAME, "simulated", document, "tests.benchmarks.bench_minder_evaluation")


def other_board(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Score the default profile on the same jobs with other boards, after a calibration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--normal", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1)
    known, _ = parser.parse_known_args(arguments)
    site, judged, settings = folder / "site", folder / "judged", folder / "site.toml"
    wanted = [(site, one) for one in cases(SEEDS["calibrate"], 0, SITE_JOBS)]
    wanted += [(judged, one) for one in cases(SEEDS["evaluate"], known.faults, known.normal)]
    with multiprocessing.get_context("spawn").Pool(known.workers) as pool:
        pool.starmap(record, wanted, chunksize=4)
    python("planish", "minder", "calibrate", "--traces", site, "--out", settings)
    path = folder / "other_board.json"
    options = ("--workers", known.workers, "--variants", "minder", "--json", path)
    python("tests.minder_lab", "evaluate", "--traces", judged, "--config", settings, *options)
    figures = json.loads(path.read_text("utf-8"))["variants"]
    return {
        "factor": FACTOR,
        "site_jobs": SITE_JOBS,
        "tables": tomllib.loads(settings.read_text("utf-8")),
        **figures,
    }


def record(folder: Path, wanted: Wanted) -> None:
    """Write a job as its recording with other boards would be, with its label."""
    case = case_of(wanted)
    values = {
        name: array * np.float32(FACTOR if METRICS[name].limits is None else 1.0)
        for name, array in case.frame.values.items()
        if name in PUBLISHED_ORDER
    }
    frame = replace(case.frame, values=values, mask={})
    path = folder / f"{case.name}.npz"
    write_frame(path, frame)
    facts = facts_of(replace(case, frame=frame, board=BOARD))
    facts_path(path).write_text(json.dumps(facts), "utf-8")


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw F1 of every variant with its interval, and recall by kind of the default."""
    import matplotlib
    from matplotlib.figure import Figure

    # Equal figures give equal bytes.
    matplotlib.rcParams["svg.hashsalt"] = NAME
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    variants = document["variants"]
    for row, one in enumerate(variants.values()):
        for colour, key, shift in (
            (COLOURS[0], "first", -0.13),
            (COLOURS[1], "detectable_first", 0.13),
        ):
            f1 = one[key]["f1"]
            left.plot([f1["low"], f1["high"]], [row + shift] * 2, "-", color=colour)
            left.plot(f1["value"], row + shift, "o", color=colour)
    left.plot([], [], "o-", color=COLOURS[0], label="all faults")
    left.plot([], [], "o-", color=COLOURS[1], label="detectable faults")
    left.axvline(0.893, color="grey", linewidth=0.8, linestyle="--", label="published, their data")
    left.set_yticks(range(len(variants)), list(variants))
    left.invert_yaxis()
    left.set_xlim(-0.02, 1.02)
    left.set_xlabel("F1 (first alert), 95 % interval over cases")
    left.legend(fontsize=7)
    kinds = variants["minder"]["by_kind"]
    order = sorted(kinds, key=lambda kind: -kinds[kind]["faults"])
    for row, kind in enumerate(order):
        recall = kinds[kind]["first"]["recall"]
        right.plot([recall["low"], recall["high"]], [row] * 2, "-", color=COLOURS[0])
        right.plot(recall["value"], row, "o", color=COLOURS[0])
        if kinds[kind]["detectable_faults"]:
            right.plot(kinds[kind]["detectable_recall"], row, "x", color=COLOURS[1])
    right.set_yticks(range(len(order)), [f"{kind} ({kinds[kind]['faults']})" for kind in order])
    right.invert_yaxis()
    right.set_xlim(-0.02, 1.02)
    right.set_xlabel("recall of the default profile; x: of detectable faults")
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Evaluate, or only draw what the last evaluation has written."""
    arguments = [one for one in sys.argv[1:] if one != "--print"]
    is_kept = "--print" not in sys.argv
    if arguments != ["--draw"]:
        evaluate(arguments, is_kept=is_kept)
    if not is_kept:
        return
    document = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["result"]
    draw(document, RESULTS / f"{NAME}.svg")


if __name__ == "__main__":
    main()
