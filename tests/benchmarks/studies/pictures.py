"""What the pictures of several studies share: curves, and rows of dots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tests.benchmarks.studies.reading import Interval, Run, Runs

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#a65628")
"""Can be told apart by colour-blind readers."""


def curves(
    axes: Any,
    runs: Runs,
    x: Callable[[Run], Sequence[float]],
    y: Callable[[Run], Sequence[float]],
    *,
    labels: tuple[str, str],
    seeds: bool = True,
) -> None:
    """Draw the mean over seeds of each arm as a line with dots, and each seed as a thin line."""
    for colour, (name, members) in zip(COLOURS, runs.items(), strict=False):
        columns = zip(*(y(run) for run in members), strict=True)
        places = zip(*(x(run) for run in members), strict=True)
        axes.plot(
            [fmean(place) for place in places],
            [fmean(column) for column in columns],
            *("o-",),
            color=colour,
            label=name,
            markersize=3,
        )
        for run in members if seeds else ():
            axes.plot(x(run), y(run), "-", color=colour, linewidth=0.6, alpha=0.35)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(alpha=0.3)


def dots(axes: Any, rows: Mapping[str, Interval], *, label: str, zero: bool = False) -> None:
    """Draw one row an arm: dots are seeds, the bar is the mean with its 95 % interval."""
    for row, found in enumerate(rows.values()):
        axes.plot(found.values, [row] * len(found.values), "o", color=COLOURS[0], alpha=0.5)
        if len(found.values) > 1:
            axes.plot([found.low, found.high], [row, row], color="black", linewidth=1)
        axes.plot(found.mean, row, "k|", markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3, axis="x")
    if zero:
        axes.axvline(0, color="grey", linewidth=0.8)
