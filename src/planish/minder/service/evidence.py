"""What others say of the machines of a job: Kubernetes that a node is down, a board that it failed.

A machine that is silent and whose node is not ready is dead, however many are; a machine that has
begun to differ while one of its boards reports an error need not differ for minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from planish.minder.detect.frame import Frame
from planish.minder.detect.preprocess import silent_seconds
from planish.minder.detect.result import Finding, Result

DEAD_SECONDS = 60
"""A machine that has given nothing for so long, and whose node is not ready, is dead."""
SUSPECT_SECONDS = 20
"""A candidate for so long is faulty where one of its boards reports an error."""


def silent_machines(frame: Frame) -> dict[str, int]:
    """Return the machines that have been silent for `DEAD_SECONDS`, with the second since which."""
    if not frame.num_seconds:
        return {}
    silent, end = silent_seconds(frame), int(frame.ts[-1]) + 1
    places = np.flatnonzero(silent >= DEAD_SECONDS).tolist()
    return {frame.machines[place]: end - int(silent[place]) for place in places}


def without(frame: Frame, machines: Collection[str]) -> Frame:
    """Return a frame without some machines, so that the others are compared with each other."""
    return frame.select([name for name in frame.machines if name not in machines])


def suspects(result: Result) -> set[str]:
    """Return the machines that differ and are not named yet, about whose boards to ask."""
    named = {finding.machine for finding in result.findings}
    found = {one.machine for one in result.candidates if one.seconds >= SUSPECT_SECONDS}
    return found - named if result.is_judged else set()


def confirmed(result: Result, dead: Mapping[str, int], failed: Collection[str]) -> Result:
    """Return the result with the dead machines and the suspects whose boards failed."""
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
