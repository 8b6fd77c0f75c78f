"""Data sets of the studies that no generated task of the curate stage gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.studies.arms import RUNS

NUM_ROWS = 5000
LOG_MEAN, LOG_STD = 0.8, 0.9
"""Of the natural log of the number of additions."""
MOST_STEPS = 22


def counted_sums() -> Iterator[dict[str, str]]:
    """Yield sums modulo 100 of a number and n equal digits, worked one addition at a time.

    `37+8*03=` has the trace `03=45,02=53,01=61`: a counter that falls and the sum so far. The
    number of additions is log-normal, so that few responses are very long; each step needs only
    the one before, so that the chance to be right falls with the length alone.
    """
    rng = random.Random("planish/studies/counted-sums")
    while True:
        steps = min(max(round(rng.lognormvariate(LOG_MEAN, LOG_STD)), 1), MOST_STEPS)
        value, digit = rng.randrange(100), rng.randrange(1, 10)
        question = f"{value:02d}+{digit}*{steps:02d}="
        parts = []
        for left in range(steps, 0, -1):
            value = (value + digit) % 100
            parts.append(f"{left:02d}={value:02d}")
        yield {
            "question": question,
            "answer": str(value),
            "trace": ",".join(parts),
            "verifier": "trace",
            "source": "counted-sums",
        }


DATASETS: dict[str, Callable[[], Iterator[dict[str, str]]]] = {"counted_sums": counted_sums}
"""Name in `[study] dataset` to an endless stream of rows."""


def dataset_file(name: str) -> Path:
    """Write a data set of different questions unless it is there; returns its path."""
    path = RUNS / "data" / f"{name}.jsonl"
    rows: dict[str, dict[str, str]] = {}
    for row in DATASETS[name]():
        rows.setdefault(row["question"], row)
        if len(rows) == NUM_ROWS:
            break
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows.values())
    if not path.exists() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return path
