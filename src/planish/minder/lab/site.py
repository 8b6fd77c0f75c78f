"""What a site finds out from its recorded traces: limits, and thresholds if faults suffice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.preprocess import fit_limits
from planish.minder.lab.calibrate import Settings
from planish.minder.lab.simulator.case import Case

LEAST_FAULTS = 10
"""Thresholds that are fitted to fewer labelled faults say more of these than of the site."""

SiteLimits = Mapping[str, tuple[float, float]]
"""Metric to its limits, in its unit."""


@dataclass(frozen=True)
class Site:
    """Tables of a configuration.

    Example:
        >>> print(Site({"": {"gpu_power_draw": (0.0, 698.0)}}).toml(), end="")
        [limits]
        gpu_power_draw = [0.0, 698.0]
    """

    limits: Mapping[str, SiteLimits]
    """Board model to its limits; those of jobs whose boards are not known are under ""."""
    settings: Settings | None = None
    """Thresholds and floors; None: those that come with the package."""
    notes: tuple[str, ...] = field(default=())
    """Lines that stand above the tables."""

    def tables(self) -> dict[str, Any]:
        """Return them as TOML gives them."""
        found: dict[str, Any] = {}
        boards = {board: _lists(one) for board, one in self.limits.items() if board}
        if "" in self.limits:
            found["limits"] = _lists(self.limits[""])
        if boards:
            found["boards"] = boards
        if self.settings is not None:
            one = self.settings
            kappa = {} if one.kappa is None else {"kappa": one.kappa}
            found["detect"] = {"theta": one.theta, **kappa, "floors": dict(one.floors)}
        return found

    def merged(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tables with those keys of other tables that they do not have."""
        mine = self.tables()
        return {name: {**tables.get(name, {}), **one} for name, one in mine.items()}

    def toml(self) -> str:
        """Return them as TOML."""
        tables = self.tables()
        parts = [*(f"# {note}\n" for note in self.notes)]
        if "limits" in tables:
            parts.append(_table("limits", tables["limits"]))
        for board, limits in tables.get("boards", {}).items():
            parts.append(_table(f"boards.{json.dumps(board)}", limits))
        if "detect" in tables:
            detect = dict(tables["detect"])
            floors = detect.pop("floors")
            parts += [_table("detect", detect), _table("detect.floors", floors)]
        return "".join(parts)


def fitted_limits(cases: Sequence[Case], metrics: Sequence[str]) -> dict[str, SiteLimits]:
    """Return the limits that healthy traces show, for metrics that have none by nature.

    Args:
        cases: recorded; those with a fault do not count.
        metrics: that are used.

    Raises:
        ConfigError: no trace is of a healthy job.
    """
    healthy = [case for case in cases if not case.truth.faulty]
    if not healthy:
        raise ConfigError(
            "`--traces` must hold a trace of a healthy job, to which limits are fitted, got "
            f"{len(cases)} with a fault; record some healthy hours"
        )
    found: dict[str, SiteLimits] = {}
    for board in sorted({case.board for case in healthy}):
        frames = [case.frame for case in healthy if case.board == board]
        found[board] = {
            name: _in_unit(fit_limits(frames, METRICS[name]), name)
            for name in metrics
            if METRICS[name].limits is None and any(name in frame.values for frame in frames)
        }
    return {board: {k: v for k, v in one.items() if v[0] < v[1]} for board, one in found.items()}


def _in_unit(limits: tuple[float, float], name: str) -> tuple[float, float]:
    if METRICS[name].transform == "log1p":
        limits = (float(np.expm1(limits[0])), float(np.expm1(limits[1])))
    return (float(f"{limits[0]:.6g}"), float(f"{limits[1]:.6g}"))


def _lists(limits: SiteLimits) -> dict[str, list[float]]:
    return {name: list(pair) for name, pair in limits.items()}


def _table(name: str, rows: Mapping[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {json.dumps(one)}\n" for key, one in rows.items())])
