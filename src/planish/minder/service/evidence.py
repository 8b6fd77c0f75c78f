"""Evidence from other sources: Kubernetes reports nodes that are down, a rule reports GPU errors.

A silent machine whose node is not ready is dead, however many machines are. A machine that differs
while one of its GPUs reports an error is named without waiting for minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from planish.minder.detect.frame import Frame
from planish.minder.detect.preprocess import silent_seconds
from planish.minder.detect.result import Finding, Result

DEAD_SECONDS = 60
"""Seconds without a sample after which a machine is dead if its node is not ready."""
SUSPECT_SECONDS = 20
"""Seconds after which a candidate is faulty if one of its GPUs reports an error."""


def silent_machines(frame: Frame) -> dict[str, int]:
    """Return the machines that have been silent for `DEAD_SECONDS`, with the second of their last
    sample.
    """
    if not frame.num_seconds:
        return {}
    silent, end = silent_seconds(frame), int(frame.ts[-1]) + 1
    places = np.flatnonzero(silent >= DEAD_SECONDS).tolist()
    return {frame.machines[place]: end - int(silent[place]) for place in places}


def suspects(result: Result) -> set[str]:
    """Return the candidates that are not named yet; the caller queries GPU errors for them."""
    named = {finding.machine for finding in result.findings}
    found = {one.machine for one in result.candidates if one.seconds >= SUSPECT_SECONDS}
    return found - named if result.is_judged else set()


def confirmed(result: Result, dead: Mapping[str, int], failed: Collection[str]) -> Result:
    """Return the result with findings for the dead machines and for the suspects with GPU
    errors.
    """
    findings = list(result.findings)
    for name, since in dead.items():
        seconds = float(result.end - since)
        findings.append(Finding(name, "", "silent", since, result.end, seconds, 0.0))
    longest = {one.machine: one for one in sorted(result.candidates, key=lambda one: one.seconds)}
    for name in sorted(failed):
        one = longest[name]
        facts = (one.since, result.end, float(one.seconds), one.score)
        findings.append(Finding(name, one.metric, "dissimilar", *facts))
    status = "fault" if findings and result.status == "ok" else result.status
    silent = tuple(sorted({*result.silent, *dead}))
    return replace(result, findings=tuple(findings), status=status, silent=silent)
