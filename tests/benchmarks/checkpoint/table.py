"""From raw figures to one table: medians, ratios, limits, targets and whether they are held."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

LONG = 9.99
Raw = dict[str, Any]


@dataclass
class Spread:
    """Median, lowest and highest of the measured turns."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        digits = 1 if self.median > LONG else 3
        ends = f"{self.low:.{digits}f}-{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({ends}, n {self.count})"


@dataclass
class Row:
    """A line of the table."""

    workload: str
    quantity: str
    ours: str
    other: str
    value: float | None
    target: str
    paper: str
    limit: str
    verdict: str


def turns(phase: Raw, system: str) -> list[Raw]:
    """Return a system's measured turns; one that broke off early has but its warm-ups."""
    taken: list[Raw] = phase["systems"].get(system, [])
    return taken[phase["warmups"] :] or taken


def median_step(phase: Raw, system: str) -> float:
    """Median of the steps before a system's saves, seconds."""
    return statistics.median(s for t in turns(phase, system) for s in t["steps_before"])


def summary(phase: Raw) -> dict[str, Any]:
    """Return spreads per system of a phase."""
    found: dict[str, Any] = {}
    for system in phase["systems"]:
        measured = turns(phase, system)
        if phase["kind"] == "save":
            step = median_step(phase, system)
            values = {
                "stall_seconds": [
                    max(t["call_seconds"], t["saving_step_seconds"] - step) for t in measured
                ],
                "call_seconds": [t["call_seconds"] for t in measured],
                "save_seconds": [t["save_seconds"] for t in measured],
                "cpu_seconds": [t["cpu_seconds"] for t in measured],
                "server_cpu_seconds": [t["server_cpu_seconds"] for t in measured],
                "slowdown": [
                    statistics.mean(t["steps_during"]) / step for t in measured if t["steps_during"]
                ],
            }
        elif phase["kind"] == "load":
            values = {"load_seconds": [t["load_seconds"] for t in measured]}
        else:
            values = {"seconds": [max(t["seconds"]) for t in measured]}
        for stage in measured[0].get("stages", {}):
            values[f"stage {stage}"] = [t["stages"].get(stage, 0.0) for t in measured]
        found[system] = {name: asdict(Spread.of(v)) for name, v in values.items() if v}
        found[system] |= requests_of(phase, system)
    return found


def requests_of(phase: Raw, system: str) -> dict[str, Any]:
    """Return what the server counted in the median turn, and what the first turn noted."""
    found: dict[str, Any] = {}
    counted = [t["requests"] for t in turns(phase, system) if t.get("requests")]
    if counted:
        total = [sum(v for k, v in c.items() if not k.startswith("bytes")) for c in counted]
        found["requests"] = statistics.median(total)
        for name in ("bytes_in", "bytes_out"):
            found[name] = statistics.median(c.get(name, 0) for c in counted)
    first = phase["systems"][system][0]
    for name in ("memory_growth_bytes", "shared_growth_bytes", "objects"):
        if name in first:
            found[name] = first[name]
    return found


class Table:
    """Rows from the phases that were run."""

    def __init__(self, phases: dict[str, Raw]) -> None:
        self.phases = phases
        self.summaries = {name: summary(phase) for name, phase in phases.items()}

    def spread(self, phase: str, system: str, name: str) -> Spread | None:
        """Return a spread, None if it was not measured."""
        found = self.summaries.get(phase, {}).get(system, {}).get(name)
        return None if found is None else Spread(**found)

    def ratio(
        self, phase: str, quantity: str, name: str, other: str, target: float, paper: str = "",
        *, ours: str = "ours", limit: str = "",
    ) -> Iterator[Row]:  # fmt: skip
        """How many times less of something ours takes than another system."""
        mine, theirs = self.spread(phase, ours, name), self.spread(phase, other, name)
        if mine is None or theirs is None:
            return
        value = theirs.median / max(mine.median, 1e-4)
        verdict = "" if not target else "held" if value >= target else "missed"
        wanted = f">= {target:g}x" if target else ""
        yield Row(
            phase, f"{quantity}: {ours} / {other}", str(mine), str(theirs), value, wanted, paper,
            limit, verdict,
        )  # fmt: skip

    def at_most(
        self, phase: str, quantity: str, value: float, target: float, ours: str, limit: str = "",
        *, unit: str = "x", paper: str = "",
    ) -> Row:  # fmt: skip
        """A figure that must not be above its target."""
        verdict = "held" if value <= target else "missed"
        return Row(phase, quantity, ours, "", value, f"<= {target:g}{unit}", paper, limit, verdict)

    def rows(self) -> list[Row]:
        """Return all rows that can be told."""
        found: list[Row] = []
        for phase, raw in self.phases.items():
            if any(system.startswith("ours") for system in raw["systems"]):
                for part in (self.saves, self.loads, self.losses):
                    found += part(phase, raw)
        return found

    def saves(self, phase: str, raw: Raw) -> Iterator[Row]:
        """Rows of a phase of saves."""
        if raw["kind"] != "save":
            return
        paced = self.spread(phase, "ours_paced", "slowdown")
        if paced is not None:
            yield self.at_most(phase, "steps beside a paced upload / steps", paced.median, 1.05,
                               str(paced))  # fmt: skip
        if "ours" not in self.summaries[phase]:
            return
        limits, unique = raw["limits"], raw["unique_bytes"]
        copy = unique / limits["copy_bytes_per_second"]
        put = unique / limits["raw_put_bytes_per_second"]
        call, stall, saved = "time inside save()", "stall", "save until durable"
        floor = f"floor {copy:.3f} s"
        # A folder on tmpfs is memory: no copy of the state is much faster than writing it there.
        for other, target in (("dcp_s3torch", 25), ("dcp_file", 25 * (raw["place"] == "disk"))):
            yield from self.ratio(phase, stall, "stall_seconds", other, target,
                                  "54.20x (12.13-161.50x)", limit=floor)  # fmt: skip
            yield from self.ratio(phase, call, "call_seconds", other, target, limit=floor)
        yield from self.ratio(phase, stall, "stall_seconds", "dcp_async", 4, limit=floor)
        for other, target in (("dcp_async_reused", 1 / 1.1), ("dcp_async_process", 0),
                              ("bytecheckpoint", 0), ("torch_save", 0)):  # fmt: skip
            yield from self.ratio(phase, stall, "stall_seconds", other, target, limit=floor)
        for other in ("dcp_gather", "dcp_gather_async"):
            yield from self.ratio(phase, "blocking of flat slices", "stall_seconds", other, 5,
                                  "19.8-30.5x", limit=floor)  # fmt: skip
        mine = self.spread(phase, "ours", "stall_seconds")
        called = self.spread(phase, "ours", "call_seconds")
        assert mine is not None
        assert called is not None
        # 20 MB take no time to copy or send: what W4 costs is planning and requests.
        if raw["workload"] != "W4":
            yield self.at_most(
                phase, "stall / its floor", mine.median / copy, 1.5, str(mine), floor
            )
            yield Row(phase, "time inside save() / the floor", str(called), "",
                      called.median / copy, "", "", floor, "")  # fmt: skip
        floor = f"floor {put:.2f} s"
        for other, target, paper in (
            ("dcp_s3torch", 1.3, "6.05x, up to 9.96x"), ("dcp_s3fs", 2, ""), ("dcp_file", 0, ""),
            ("dcp_async", 0, ""), ("bytecheckpoint", 0, ""), ("torch_save", 0, ""),
        ):  # fmt: skip
            yield from self.ratio(phase, saved, "save_seconds", other, target, paper, limit=floor)
        # Beside a training loop that goes on, and with none: like with like.
        for mine, other in (("ours", "dcp_s3torch_async"), ("ours_sync", "dcp_s3torch")):
            yield from self.ratio(phase, saved, "save_seconds", other, 1.3, ours=mine, limit=floor)
        for name, who in (("cpu_seconds", "all ranks"), ("server_cpu_seconds", "the server")):
            yield from self.ratio(phase, f"CPU of {who}", name, "dcp_s3torch", 0)
        yield from self._own_saves(phase, raw, put)

    def _own_saves(self, phase: str, raw: Raw, put: float) -> Iterator[Row]:
        end = self.spread(phase, "ours", "save_seconds")
        assert end is not None
        share = put / end.median
        verdict = "held" if share >= 0.7 else "missed"
        if raw["workload"] != "W4":
            yield Row(phase, "share of the raw PUT rate", str(end), "", share, ">= 0.7", "",
                      f"floor {put:.2f} s", verdict)  # fmt: skip
        slow = self.spread(phase, "ours", "slowdown")
        if slow is not None:
            yield self.at_most(phase, "steps while uploading / steps", slow.median, 1.3, str(slow))
        plan = self.spread(phase, "ours", "stage save.plan")
        if plan is not None:
            first = raw["systems"]["ours"][0]["stages"].get("save.plan", 0.0)
            yield self.at_most(
                phase, "planning, cached", plan.median * 1e3, 8 if raw["workload"] == "W4" else 4,
                f"first {first * 1e3:.1f} ms",
                unit=" ms", paper="0.00 s",
            )  # fmt: skip
        yield from self._balance(phase, raw)

    def _balance(self, phase: str, raw: Raw) -> Iterator[Row]:
        """Bytes of the busiest rank with 4 data-parallel ranks over those with 2."""
        if raw["world"] != 2 or "W1 save" not in self.phases:
            return

        def busiest(of: Raw) -> int:
            return max(of["systems"]["ours"][0]["objects"]["bytes_by_rank"].values(), default=0)

        two, four = busiest(raw), busiest(self.phases["W1 save"])
        if two and four:
            yield self.at_most(
                phase, "bytes of the busiest rank, DP 4 / DP 2", four / two, 0.55,
                f"{four / 2**20:.1f} MiB", f"{two / 2**20:.1f} MiB", paper="3.03x faster",
            )  # fmt: skip

    def loads(self, phase: str, raw: Raw) -> Iterator[Row]:
        """Rows of a phase of loads."""
        if raw["kind"] != "load" or "ours" not in self.summaries[phase]:
            return
        unique = raw["unique_bytes"]
        get = unique / raw["limits"]["raw_get_bytes_per_second"]
        floor = f"floor {get:.2f} s"
        same = " to " not in phase
        target, paper = (1.5, "3.88x, up to 8.80x") if same else (1.3, "3.64x")
        for other in ("dcp_s3torch", "dcp_s3fs", "bytecheckpoint", "torch_save"):
            wanted = target if other.startswith("dcp") else 0
            yield from self.ratio(phase, "load", "load_seconds", other, wanted, paper, limit=floor)
        mine = self.summaries[phase]["ours"]
        if "bytes_out" in mine:
            ratio = mine["bytes_out"] / unique
            yield self.at_most(
                phase, "bytes read / unique bytes", ratio, 1.05,
                f"{mine['bytes_out'] / 2**20:.0f} MiB", f"{unique / 2**20:.0f} MiB",
            )  # fmt: skip

    def losses(self, phase: str, raw: Raw) -> Iterator[Row]:
        """Rows of a phase in which a rank is killed."""
        if raw["kind"] != "loss":
            return
        for system in raw["systems"]:
            seconds = self.spread(phase, system, "seconds")
            assert seconds is not None
            told = [heard != "None" for heard in raw["systems"][system][0]["heard"]]
            found = str(seconds) if all(told) else f"not within {seconds.high:.0f} s"
            yield Row(phase, f"rank killed: heard by all, {system}", found, "", None, "", "", "",
                      "")  # fmt: skip


def figures(phase: Raw, measured: dict[str, Any]) -> list[list[str]]:
    """Return one line per system of a phase: what it took, without any ratio."""
    columns: list[tuple[str, Callable[[Any], str]]] = [
        (name, lambda v: str(Spread(**v)))
        for name in ("stall_seconds", "call_seconds", "save_seconds", "load_seconds", "slowdown")
    ]
    columns += [
        ("cpu_seconds", lambda v: f"{v['median']:.2f}"),
        ("server_cpu_seconds", lambda v: f"{v['median']:.2f}"),
        ("requests", lambda v: f"{v:.0f}"),
        ("memory_growth_bytes", lambda v: f"{v / 2**20:.0f}"),
        ("shared_growth_bytes", lambda v: f"{v / 2**20:.0f}"),
    ]
    return [
        [system, *(shown(values[name]) if name in values else "" for name, shown in columns)]
        for system, values in measured.items()
    ]


HEADINGS = (
    "system", "stall s", "call s", "save s", "load s", "slowdown", "cpu s", "server cpu s",
    "requests", "peak MiB",
    "shared MiB",
)  # fmt: skip
