"""Rows of the engine in use under dynamic sampling with a heavy tail, with and without look-ahead.

`python -m tests.benchmarks.bench_tail` draws the same batches twice: once each round ends before
the next one begins, once the next round's prompts take the rows that the last responses leave free.
The rounds, the queue and the rows are those of the stage; lengths are log-normal and no model runs,
so that the figures are counts of decode steps, not times. Both keep and consume the same groups.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import track

from tests.benchmarks.facts import write_result
from tests.unit.stages.rollout.tails import LONGEST, MEDIAN, SIGMA, draw

ROWS = {"a round fills the rows once": 192, "four times": 48}
"""What a case is called to the rows of its engine; a round has 24 groups of 8 responses."""


def measure(rows: int, seeds: int, *, shrink_rounds: bool) -> dict[str, Any]:
    """Return medians over seeds of figures with look-ahead and without."""
    steps, used, unused, rounds = [], {True: [], False: []}, [], []
    with tempfile.TemporaryDirectory(prefix="planish-bench-") as folder:
        for seed in track(range(seeds), f"{rows} rows"):
            drawn = {
                on: draw(
                    Path(folder),
                    look_ahead=on,
                    seed=seed,
                    max_rows=rows,
                    shrink_rounds=shrink_rounds,
                )
                for on in (False, True)
            }
            steps.append(drawn[False].steps / drawn[True].steps)
            rounds.append(drawn[True].batch.num_rounds)
            unused.append(1 - drawn[True].num_used_tokens / drawn[True].row_steps)
            for on, one in drawn.items():
                used[on].append(one.num_used_tokens / (one.steps * rows))
    share = {on: round(statistics.median(found), 3) for on, found in used.items()}
    return {
        "rows": rows,
        "rounds": statistics.median(rounds),
        "used_share_before": share[False],
        "used_share": share[True],
        "used_share_ratio": round(
            statistics.median(a / b for a, b in zip(used[True], used[False], strict=True)), 3
        ),
        "steps_ratio": round(statistics.median(steps), 3),
        "unused_tokens_share": round(statistics.median(unused), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="batches of each case")
    parser.add_argument("--dry", action="store_true", help="print, but write no result")
    arguments = parser.parse_args()
    cases = {}
    for name, rows in ROWS.items():
        for shrink in (False, True):
            key = f"{name}, rounds {'shrink' if shrink else 'of one size'}"
            cases[key] = measure(rows, arguments.seeds, shrink_rounds=shrink)
            print(key, cases[key], flush=True)
    result = {
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST},
        "seeds": arguments.seeds,
        "cases": cases,
    }
    if not arguments.dry:
        print(write_result("tail", "simulated", result, "tests.benchmarks.bench_tail"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
