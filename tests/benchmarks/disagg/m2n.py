"""Frames from M to N ranks and back on one machine: point to point against a collective.

Point to point they go over loopback TCP, or by NIXL from memory to memory; the collective is that
of gloo.

Processes do nothing but exchange. In each round every attention rank sends a frame to every expert
rank, and gets one back from each when all of its frames are there. Two times are taken: of a frame,
from its send to where the receiver has it; and of a layer, from the first send of an attention rank
to its last reply. In the delayed runs one frame in a hundred is sent late, and its own time counts
from then: what counts is what the others suffer.
"""

import itertools
import json
import multiprocessing
import queue
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from planish.engines.disagg.m2n.frames import (
    Frame,
    FrameHeader,
    FrameKind,
    FrameLimits,
    Transport,
)
from planish.engines.disagg.m2n.nixl import NixlTransport
from planish.engines.disagg.m2n.sockets import SocketTransport
from tests.benchmarks.disagg.collective import CollectiveBaseline
from tests.benchmarks.facts import RESULTS, require_idle_machine, write_result

ROW_BYTES = 2048
SIZES = (2048, 8192, 32_768, 131_072, 262_144, 1_048_576)
RANKS = (1, 2, 4)
DELAYED = (0.0, 0.01)
DELAY_S = 0.005
DIRECT = ("sockets", "nixl")
MODES = (*DIRECT, "collective")
NAME = "disagg_m2n"
P99 = 0.5
"""99th percentile of a frame over that of the collective, at most."""


class PointToPoint:
    """The exchange over a transport."""

    def __init__(
        self,
        transport: Transport,
        arrived: queue.SimpleQueue[Frame],
        rank: int,
        num_ranks: int,
    ) -> None:
        self.transport, self.arrived = transport, arrived
        self.rank, self.num_ranks = rank, num_ranks
        self.number = 0

    def attend(self, num_bytes: int, delays: list[float]) -> list[int]:
        """Send a round and wait for its replies; returns nothing of frames, whom experts time."""
        self.number += 1
        size = num_bytes // ROW_BYTES
        counts = torch.tensor([size], dtype=torch.int32)
        first = FrameHeader(
            FrameKind.DISPATCH, self.rank, self.num_ranks, 0, 0, self.number, 0, size, ROW_BYTES,
            torch.float32, 1,
        )  # fmt: skip
        room = self.transport.room(first, size * self.num_ranks).fill_(self.number)
        for target, (delay, rows) in enumerate(
            zip(delays, room.split(size), strict=True), self.num_ranks
        ):
            if delay:
                time.sleep(delay)
            self.transport.send(first._replace(target=target), counts, rows)
        for _ in range(self.num_ranks):
            self.arrived.get(timeout=60)
        return []

    def serve(self, num_bytes: int) -> list[int]:
        """Answer a round; returns the nanoseconds of its frames."""
        frames, times = [], []
        while len(frames) < self.num_ranks:
            frames.append(self.arrived.get(timeout=60))
            times.append(time.monotonic_ns() - frames[-1].header.sent_ns)
        frames.sort(key=lambda frame: frame.header.source)
        size = num_bytes // ROW_BYTES
        room = self.transport.room(frames[0].header.reply(), size * self.num_ranks).zero_()
        for frame, rows in zip(frames, room.split(size), strict=True):
            self.transport.send(frame.header.reply(), None, rows)
        return times


class Collective:
    """The exchange by collective calls; the first eight bytes of a piece say when it was sent."""

    def __init__(self, baseline: CollectiveBaseline, num_ranks: int) -> None:
        self.baseline, self.num_ranks = baseline, num_ranks

    def attend(self, num_bytes: int, delays: list[float]) -> list[int]:
        """Send a round and wait for its replies."""
        pieces = torch.zeros(self.num_ranks, num_bytes, dtype=torch.uint8)
        if any(delays):
            time.sleep(sum(delays))
        pieces[:, :8].view(torch.int64)[:] = time.monotonic_ns()
        self.baseline.exchange(pieces, to_experts=True)
        self.baseline.exchange(pieces, to_experts=False)
        return []

    def serve(self, num_bytes: int) -> list[int]:
        """Answer a round; returns the nanoseconds of its frames."""
        pieces = torch.zeros(self.num_ranks, num_bytes, dtype=torch.uint8)
        got = self.baseline.exchange(pieces, to_experts=True)
        now = time.monotonic_ns()
        times = [now - stamp for stamp in got[:, :8].contiguous().view(torch.int64)[:, 0].tolist()]
        self.baseline.exchange(pieces, to_experts=False)
        return times


def rank_main(rank: int, num_ranks: int, folder: str, plan: list[tuple], results: Any) -> None:
    """Run one rank of `num_ranks` attention and as many expert ranks through a plan.

    Args:
        rank: of this process.
        num_ranks: of each role.
        folder: where the ranks find each other.
        plan: (mode, bytes, share of delayed frames, rounds), the same on all ranks.
        results: gets (place in the plan, times of frames, times of layers) in nanoseconds.
    """
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", 2 * num_ranks)
    limits = FrameLimits(1, max(SIZES) // ROW_BYTES, ROW_BYTES, 1)
    roles = range(num_ranks), range(num_ranks, 2 * num_ranks)
    is_attention = rank < num_ranks
    own, peers = roles if is_attention else roles[::-1]
    device = torch.device("cpu")
    direct: dict[str, Transport] = {
        "sockets": SocketTransport(rank, limits, folder),
        "nixl": NixlTransport(rank, limits, folder, own=own, peers=peers, device=device),
    }
    baseline = CollectiveBaseline(store, rank, num_ranks, num_ranks)
    ways: dict[str, Any] = {"collective": Collective(baseline, num_ranks)}
    for name, transport in direct.items():
        store.set(f"{name}/{rank}", json.dumps(transport.address))
        addresses = {peer: json.loads(store.get(f"{name}/{peer}")) for peer in peers}
        arrived: Any = queue.SimpleQueue()
        transport.connect(addresses, arrived.put)
        ways[name] = PointToPoint(transport, arrived, rank, num_ranks)
    delayed = random.Random(rank)
    for place, (mode, num_bytes, share, rounds) in enumerate(plan):
        frames: list[int] = []
        layers: list[int] = []
        baseline.barrier()
        for number in range(rounds + 2):
            if is_attention:
                delays = [DELAY_S * (delayed.random() < share) for _ in peers]
                begin = time.monotonic_ns()
                ways[mode].attend(num_bytes, delays)
                layers.append(time.monotonic_ns() - begin)
            else:
                frames += ways[mode].serve(num_bytes)
            if number == 1:
                # The first two rounds warm up.
                frames, layers = [], []
        results.put((place, frames, layers))
    baseline.barrier()
    for transport in direct.values():
        transport.close()


def quantiles(times: list[int]) -> dict[str, float]:
    """Return median and 99th percentile in microseconds."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"median_us": round(cuts[49] / 1e3, 1), "p99_us": round(cuts[98] / 1e3, 1)}


def measure(num_ranks: int, rounds: int, blocks: int) -> dict[str, Any]:
    """Measure all sizes and modes, in blocks of rounds that take turns."""
    plan = [
        (mode, num_bytes, share, max(rounds // (1 + num_bytes // 262_144), 2))
        for num_bytes in SIZES
        for share in DELAYED
        for block in range(blocks)
        for mode in (MODES if block % 2 else MODES[::-1])
    ]
    context = multiprocessing.get_context("spawn")
    times: dict[tuple, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(target=rank_main, args=(rank, num_ranks, folder, plan, results))
            for rank in range(2 * num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            for number in range(len(plan) * len(processes)):
                place, frames, layers = results.get(timeout=300)
                found = times.setdefault(plan[place][:3], {"frame": [], "layer": []})
                found["frame"] += frames
                found["layer"] += layers
                if (number + 1) % (len(processes) * len(MODES) * blocks) == 0:
                    _, num_bytes, share, _ = plan[place]
                    print(
                        f"{num_ranks} x {num_ranks}: {num_bytes} bytes, {share:.0%} delayed: done"
                    )
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                process.kill()
    table: dict[str, Any] = {}
    for num_bytes in SIZES:
        for share in DELAYED:
            row: dict[str, Any] = {
                mode: {
                    what: quantiles(taken) for what, taken in times[mode, num_bytes, share].items()
                }
                for mode in MODES
            }
            for mode, name in itertools.product(DIRECT, ("median", "p99")):
                row[f"{mode}_over_collective_{name}"] = round(
                    row[mode]["frame"][f"{name}_us"] / row["collective"]["frame"][f"{name}_us"], 3
                )
            table[f"{num_bytes}/{share:g}"] = row
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the times of a frame by size: median and 99th percentile of both ways."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = NAME
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(DELAYED), len(RANKS), figsize=(11, 6), sharex=True, sharey=True, squeeze=False
    )
    for axes, (share, num_ranks) in zip(
        grid.flat, [(share, n) for share in DELAYED for n in RANKS], strict=True
    ):
        table = result["ranks"][str(num_ranks)]
        for mode, color in zip(MODES, ("tab:blue", "tab:green", "tab:red"), strict=True):
            rows = [table[f"{size}/{share:g}"][mode]["frame"] for size in SIZES]
            axes.plot(SIZES, [row["median_us"] for row in rows], color=color, label=mode)
            axes.plot(SIZES, [row["p99_us"] for row in rows], color=color, linestyle=":")
        axes.set(xscale="log", yscale="log", title=f"{num_ranks} to {num_ranks}, {share:.0%} late")
    for axes in grid[-1]:
        axes.set_xlabel("bytes of a frame")
    for axes in grid[:, 0]:
        axes.set_ylabel("microseconds (dotted: p99)")
    grid[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def targets(ranks: dict[str, Any]) -> dict[str, Any]:
    """Return for each way and share of late frames its ratios to the collective, over all settings.

    Its name is `way/share`.
    """
    found = {}
    for mode, share in itertools.product(DIRECT, DELAYED):
        rows = [
            row
            for table in ranks.values()
            for key, row in table.items()
            if float(key.partition("/")[2]) == share
        ]
        medians, tails = (
            [row[f"{mode}_over_collective_{name}"] for row in rows] for name in ("median", "p99")
        )
        found[f"{mode}/{share:g}"] = {
            "points": len(rows),
            "median": statistics.median(medians),
            "median_range": [min(medians), max(medians)],
            "p99": statistics.median(tails),
            "p99_range": [min(tails), max(tails)],
            "points_within": sum(tail <= P99 for tail in tails),
            "met": statistics.median(tails) <= P99,
        }
    return found


def run(*, dry: bool) -> bool:
    """Measure and write the result; a dry run is short, on any machine, and writes nothing.

    Returns:
        Whether every target is met; that of a dry run says nothing.
    """
    idle = {} if dry else {"busy_cores_before": require_idle_machine()}
    rounds, blocks = (4, 2) if dry else (100, 4)
    result: dict[str, Any] = {
        "link": "one machine: loopback TCP, and what UCX takes for NIXL",
        "rounds": rounds * blocks,
        "delay_s": DELAY_S,
        **idle,
        "ranks": {str(number): measure(number, rounds, blocks) for number in RANKS},
    }
    result["targets"] = targets(result["ranks"])
    for number, table in result["ranks"].items():
        for key, row in table.items():
            times = ", ".join(
                f"{mode} {row[mode]['frame']['median_us']:.0f} / {row[mode]['frame']['p99_us']:.0f}"
                for mode in MODES
            )
            print(f"{number} to {number}, bytes/late {key}: us of a frame, median / p99: {times}")
    for name, row in result["targets"].items():
        word, (mode, share) = "met" if row["met"] else "MISSED", name.split("/")
        print(
            f"{word:<7}{float(share):.0%} late: {mode} over collective, median over "
            f"{row['points']} settings: median {row['median']:.2f}x, p99 {row['p99']:.2f}x "
            f"({row['p99_range'][0]:.2f} to {row['p99_range'][1]:.2f}; at most {P99:g}x, which "
            f"{row['points_within']} settings reach)"
        )
    if dry:
        return True
    draw(result, RESULTS / f"{NAME}.svg")
    print(write_result(NAME, "measured-cpu", result, "tests.benchmarks.bench_disagg"))
    return all(row["met"] for row in result["targets"].values())
