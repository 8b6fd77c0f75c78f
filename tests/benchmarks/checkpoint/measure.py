"""Run phases: systems take turns, the order rotates, every turn's raw figures are kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.checkpoint.group import Group, GroupFailed
from tests.benchmarks.checkpoint.places import Place
from tests.benchmarks.checkpoint.schedule import PEERS, Phase

RAW_BYTES = 64 << 20
STEPS_BEFORE = 2
LEAST_ROUNDS = 3
"""A phase that runs out of time has at least these."""


class Bench:
    """Places and groups that phases share."""

    def __init__(self, scale: float, warmups: int, rounds: int, logs: Path) -> None:
        self.scale, self.warmups, self.rounds, self.logs = scale, warmups, rounds, logs
        self._places: dict[str, Place] = {}
        self._groups: dict[tuple[str, str, int, str], Group] = {}
        self._sources: dict[tuple[str, str], str] = {}
        self.needed: set[tuple[str, str]] = set()

    def place(self, kind: str) -> Place:
        """Return the place of a kind, opened when first asked for."""
        if kind not in self._places:
            self._places[kind] = Place(kind)
        return self._places[kind]

    def group(self, phase: Phase, system: str) -> Group:
        """Return the ranks that run a system in a phase, started when first asked for."""
        python = python_of(system)
        key = (python, phase.workload, phase.world, phase.place)
        if key not in self._groups:
            name = f"{phase.name}-{Path(python).parents[1].name}".replace(" ", "-")
            environment = self.place(phase.place).environment
            if system == "bytecheckpoint":
                environment |= {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
            log = self.logs / f"{name}.log"
            self._groups[key] = Group(
                python, phase.workload, self.scale * phase.scale, phase.world, environment, log
            )
        return self._groups[key]

    def environments(self) -> dict[str, dict[str, str]]:
        """Return the versions in every environment whose ranks run, by the name of its folder."""
        found = {}
        for key, group in self._groups.items():
            found[Path(key[0]).parents[1].name] = group.about[0]["versions"]
        return found

    def drop_groups(self, keep: Phase | None = None, *, failed: Group | None = None) -> None:
        """End the groups that a phase has no use for, or one that failed."""
        for key, group in list(self._groups.items()):
            if failed is not None:
                if group is failed:
                    group.kill()
                    del self._groups[key]
            elif keep is None or key[1:] != (keep.workload, keep.world, keep.place):
                group.close()
                del self._groups[key]
            else:
                # Staging buffers of all systems together do not fit into memory twice.
                group.call("close_systems")

    def source(self, phase: Phase, system: str) -> str | None:
        """Return the checkpoint that a system left in a phase, or None."""
        return self._sources.get((phase.source, system))

    def keep(self, phase: Phase, system: str, path: str) -> None:
        """Keep a checkpoint in place of the one before, or delete it if nobody will load it."""
        key = phase.name, system
        before = self._sources.pop(key, None)
        if before is not None:
            self.place(phase.place).remove(before)
        if key in self.needed:
            self._sources[key] = path
        else:
            self.place(phase.place).remove(path)

    def need(self, phases: Sequence[Phase]) -> None:
        """Keep only what the phases to come load."""
        self.needed = {(phase.source, system) for phase in phases for system in phase.systems}
        for key in set(self._sources) - self.needed:
            for place in self._places.values():
                place.remove(self._sources[key])
            del self._sources[key]

    def close(self) -> None:
        """End all processes and delete all checkpoints."""
        self.drop_groups()
        for place in self._places.values():
            place.close()


def python_of(system: str) -> str:
    """Return the interpreter of a system's environment, empty when none is named.

    All systems but B5 run in one process, so that they save the very same tensors.
    """
    if system == "bytecheckpoint":
        return os.environ.get("BYTECHECKPOINT_PYTHON", "")
    peers = os.environ.get("CKPT_PEER_PYTHON", "")
    return peers if peers or system in PEERS else sys.executable


def best_rate(measure: Callable[[int], list[dict[str, Any]]]) -> float:
    """Return the highest bytes per second with 4, 2 and 1 ranks at work, each tried twice."""
    rates = []
    for busy in (4, 2, 1):
        for _ in range(2):
            answers = measure(busy)
            total = sum(answer["num_bytes"] for answer in answers)
            rates.append(total / max(a["seconds"] for a in answers if a["num_bytes"]))
    return max(rates)


def measure_limits(bench: Bench, phase: Phase) -> dict[str, float]:
    """Measure memory copies, raw PUTs and raw GETs by the ranks of a phase."""
    group, place = bench.group(phase, phase.systems[0]), bench.place(phase.place)
    copies = group.call("run_limit", name="copy")
    size = max(1 << 20, round(RAW_BYTES * min(1.0, bench.scale * phase.scale * 2)))
    rates = {}
    for name, method in (("put", "PUT"), ("get", "GET")):

        def measure(busy: int, name: str = name, method: str = method) -> list[dict[str, Any]]:
            urls = place.urls(method, min(busy, phase.world), 8 // busy)
            return group.call("run_limit", name=name, urls=urls, num_bytes=size)

        rates[f"raw_{name}_bytes_per_second"] = best_rate(measure)
    place.remove("s3://bench/raw")
    copied = sum(c["num_bytes"] for c in copies) / max(c["seconds"] for c in copies)
    return {"copy_bytes_per_second": copied, **rates}


def save_turn(bench: Bench, phase: Phase, system: str, number: int) -> dict[str, Any]:
    """Let a system save once; its checkpoint replaces the one before."""
    group, place = bench.group(phase, system), bench.place(phase.place)
    path = place.path(system, f"{phase.name}-{number}".replace(" ", "-").replace(",", ""))
    before, server = place.requests(), place.cpu_seconds()
    ranks = group.call("save", system=system, path=path, steps_before=STEPS_BEFORE, steps=True)
    after = place.requests()
    turn = {
        "steps_before": [max(s) for s in zip(*(r["steps_before"] for r in ranks), strict=True)],
        "steps_during": [max(s) for s in zip(*(r["steps_during"] for r in ranks), strict=True)],
        "requests": {key: after[key] - before[key] for key in after if after[key] != before[key]},
        "stages": _latest(ranks),
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "free_memory_bytes": psutil.virtual_memory().available,
        "server_cpu_seconds": place.cpu_seconds() - server,
    }
    for name in ("call_seconds", "saving_step_seconds", "save_seconds"):
        turn[name] = max(rank[name] for rank in ranks)
    if number == 0:
        for name in ("memory_growth_bytes", "shared_growth_bytes"):
            turn[name] = max(rank[name] for rank in ranks)
        turn["objects"] = _by_rank(place.objects(path))
    bench.keep(phase, system, path)
    return turn


def _latest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per stage of the rank that took longest in it."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, seconds in rank["details"].get("stages", {}).items():
            found[name] = max(found.get(name, 0.0), seconds)
    return found


def _by_rank(objects: dict[str, int]) -> dict[str, Any]:
    """Bytes in all, number of objects, and bytes per writing rank where names tell it."""
    ranks: dict[str, int] = {}
    for name, size in objects.items():
        folder, _, file = name.rpartition("/")
        if "/data/" in f"{folder}/" and file.endswith(".safetensors"):
            rank = file.partition("-")[0]
            ranks[rank] = ranks.get(rank, 0) + size
    return {"num_bytes": sum(objects.values()), "count": len(objects), "bytes_by_rank": ranks}


def load_turn(bench: Bench, phase: Phase, system: str, number: int) -> dict[str, Any]:
    """Let a system load once; the first time every tensor is compared."""
    group, place = bench.group(phase, system), bench.place(phase.place)
    before = place.requests()
    path = bench.source(phase, system)
    ranks = group.call("load", system=system, path=path, check=number == 0)
    after = place.requests()
    turn: dict[str, Any] = {
        "load_seconds": max(rank["load_seconds"] for rank in ranks),
        "requests": {key: after[key] - before[key] for key in after if after[key] != before[key]},
        "stages": _latest(ranks),
    }
    if number == 0:
        turn["memory_growth_bytes"] = max(rank["memory_growth_bytes"] for rank in ranks)
    return turn


def loss_turn(bench: Bench, phase: Phase, system: str) -> dict[str, Any]:
    """Kill the last rank while a save goes on; seconds until every other rank has heard."""
    group, place = bench.group(phase, system), bench.place(phase.place)
    path = place.path(system, "lost")
    try:
        ranks = group.call("lose_rank", lost=phase.world - 1, system=system, path=path)
    finally:
        bench.drop_groups(failed=group)
        place.remove(path)
    return {"seconds": [rank["seconds"] for rank in ranks], "heard": [r["heard"] for r in ranks]}


def rotated(systems: list[str], number: int) -> list[str]:
    """Return the order of turn `number`."""
    first = number % max(1, len(systems))
    return systems[first:] + systems[:first]


def usable(bench: Bench, phase: Phase) -> tuple[list[str], dict[str, str]]:
    """Return the systems that can take part, and why others cannot."""
    reasons: dict[str, str] = {}
    for system in phase.systems:
        if not python_of(system):
            reasons[system] = "no environment named"
        elif phase.kind == "load" and bench.source(phase, system) is None:
            reasons[system] = "nothing to load"
    return [system for system in phase.systems if system not in reasons], reasons


def run_phase(bench: Bench, phase: Phase, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a phase's raw figures after each round."""
    bench.drop_groups(phase)
    systems, reasons = usable(bench, phase)
    found: dict[str, Any] = {
        "kind": phase.kind, "workload": phase.workload, "world": phase.world,
        "place": phase.place, "systems": {}, "failed": reasons, "warmups": bench.warmups,
        "scale": bench.scale * phase.scale,
    }  # fmt: skip
    if phase.kind == "loss":
        for system in systems:
            found["systems"][system] = [loss_turn(bench, phase, system)]
            yield found
        return
    if systems:
        about = bench.group(phase, systems[0]).about
        found["unique_bytes"] = about[0]["unique_bytes"]
        found["held_bytes"] = sum(rank["held_bytes"] for rank in about)
        found["limits"] = measure_limits(bench, phase)
    for number in range(bench.warmups + bench.rounds):
        if not systems or (time.monotonic() > deadline and number >= bench.warmups + LEAST_ROUNDS):
            break
        for system in rotated(systems, number):
            one_turn(bench, phase, system, number, found)
        systems = [system for system in systems if system not in found["failed"]]
        found["environments"] = bench.environments()
        yield found


def need_memory(group: Group) -> None:
    """Free what systems keep where another copy of everything would not fit into memory.

    Raises:
        GroupFailed: it does not fit either way.
    """
    # Each rank's state once more, and the whole twice in a store that may be memory, too.
    wanted = sum(rank["held_bytes"] for rank in group.about) + 2 * group.about[0]["unique_bytes"]
    if psutil.virtual_memory().available < wanted:
        group.call("close_systems")
    available = psutil.virtual_memory().available
    if available < wanted:
        raise GroupFailed(
            f"a turn must have {wanted / 2**30:.1f} GiB of free memory, got "
            f"{available / 2**30:.1f}; choose a smaller `--scale`"
        )


def one_turn(bench: Bench, phase: Phase, system: str, number: int, found: dict[str, Any]) -> None:
    """Let a system take its turn; one that fails takes no more."""
    group = None
    try:
        group = bench.group(phase, system)
        need_memory(group)
        turn = (save_turn if phase.kind == "save" else load_turn)(bench, phase, system, number)
    except GroupFailed as error:
        print(f"{phase.name}: {system} failed: {error}", file=sys.stderr)
        found["failed"][system] = str(error)
        if group is not None:
            bench.drop_groups(failed=group)
    else:
        found["systems"].setdefault(system, []).append(turn)
