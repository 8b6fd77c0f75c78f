"""Experiments of several whole runs; each writes one JSON and one picture.

    python -m tests.benchmarks.studies --study dynamic-sampling --seeds 0 1 2

A run that stands finished under `runs/` is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pipelines.demo import default_root, demo_parser
from tests.benchmarks.facts import RESULTS, write_result

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Study:
    """One question, asked by runs that differ in one thing."""

    question: str
    arms: Mapping[str, str]
    """Name of the arm to its overrides."""


STUDIES = {
    "dynamic-sampling": Study(
        "accuracy gained in equal iterations with dynamic sampling on and off",
        {"on": "", "off": "rollout.dynamic_sampling=false"},
    ),
}


def finished(options: Sequence[str]) -> dict[str, Any] | None:
    """Return the summary of a demo that has succeeded with these options, or None."""
    path = Path(url2pathname(urlsplit(default_root(demo_parser().parse_args(options))).path))
    try:
        summary: dict[str, Any] = json.loads((path / "report" / "summary.json").read_text())
    except FileNotFoundError:
        return None
    return summary if summary["state"] == "SUCCEEDED" else None


def run_demo(seed: int, overrides: str) -> dict[str, Any]:
    """Run one demo and return its result line."""
    options = ["--seed", str(seed), "--no-control"]
    if overrides:
        options += ["--overrides", overrides]
    found = finished(options)
    if found is not None:
        return found
    command = [sys.executable, "-m", "pipelines.demo", *options]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=False)
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise SystemExit(f"a run of the study failed:\n{output}")
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean gain and its standard error over seeds."""
    gains = [row["accuracy_after"] - row["accuracy_before"] for row in rows]
    after = [row["accuracy_after"] for row in rows]
    spread = statistics.stdev(gains) if len(gains) > 1 else float("nan")
    return {
        "gains": gains,
        "gain_mean": statistics.mean(gains),
        "gain_standard_error": spread / len(gains) ** 0.5,
        "accuracy_after": after,
        "accuracy_after_mean": statistics.mean(after),
    }


def draw(name: str, study: Study, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the gain of each arm, one dot a seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for row, found in enumerate(arms.values()):
        axes.plot(found["gains"], [row] * len(found["gains"]), "o", alpha=0.6)
        axes.plot(found["gain_mean"], row, "k|", markersize=22)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_xlabel("gain in held-out avg@n (dots: seeds, bar: mean)")
    axes.set_title(study.question, fontsize=10)
    axes.axvline(0, color="grey", linewidth=0.8)
    figure.savefig(RESULTS / f"study_{name.replace('-', '_')}.svg", metadata={"Date": None})


def main() -> int:
    """Run the chosen studies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--study", nargs="+", default=sorted(STUDIES), choices=sorted(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    for name in arguments.study:
        study = STUDIES[name]
        arms = {}
        for arm, overrides in study.arms.items():
            rows = []
            for seed in arguments.seeds:
                rows.append(run_demo(seed, overrides))
                print(name, arm, seed, json.dumps(rows[-1], sort_keys=True), flush=True)
            arms[arm] = summarise(rows)
        draw(name, study, arms)
        first, *others = arms
        result = {
            "question": study.question,
            "seeds": arguments.seeds,
            "arms": arms,
            "difference": {
                f"{first} - {other}": arms[first]["accuracy_after_mean"]
                - arms[other]["accuracy_after_mean"]
                for other in others
            },
        }
        label = "measured-cpu"
        path = write_result(
            f"study_{name.replace('-', '_')}", label, result, "tests.benchmarks.studies"
        )
        print(path.relative_to(REPOSITORY), json.dumps(result["difference"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
