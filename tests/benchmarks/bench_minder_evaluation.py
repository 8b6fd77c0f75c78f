"""Score every detector on simulated jobs; writes results/minder_evaluation.json and a picture.

python -m tests.benchmarks.bench_minder_evaluation [options of `planish minder evaluate`]
python -m tests.benchmarks.bench_minder_evaluation --draw
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.facts import RESULTS, write_result
from tests.benchmarks.studies.pictures import COLOURS

NAME = "minder_evaluation"


def evaluate(arguments: list[str]) -> None:
    """Run the command line and keep its figures with the facts of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evaluation.json"
        subprocess.run(
            [sys.executable, "-m", "planish", "minder", "evaluate", "--json", path, *arguments],
            check=True,
        )
        document = json.loads(path.read_text("utf-8"))
    write_result(NAME, "simulated", document, "tests.benchmarks.bench_minder_evaluation")


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
    arguments = sys.argv[1:]
    if arguments != ["--draw"]:
        evaluate(arguments)
    document = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["result"]
    draw(document, RESULTS / f"{NAME}.svg")


if __name__ == "__main__":
    main()
