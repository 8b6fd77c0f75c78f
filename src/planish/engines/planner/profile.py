"""Measurement of attention and one expert of a model, for `planish rollout plan`.

One layer with random weights is enough, since a stage's time depends on shapes alone. The command
measures the computation of one GPU and, with `--transport`, frames to another process of this
machine. Sums over several GPUs are computed from data sheets.

Source: MegaScale-Infer, arXiv 2504.02263: T_a = k1 b_a + k2 and T_e = k3 b_e + k4 from
profiling.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, linear_regression, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.base.errors import ConfigError
from planish.base.text import Table
from planish.engines.planner.cli import Progress, write_output
from planish.engines.planner.frames import frame_seconds
from planish.engines.planner.gpus import GPUS, Gpu
from planish.engines.planner.models import BYTES, MoeModel, find_model, numbers_in
from planish.engines.planner.performance import Constants, attention_stage, expert_stage

WARM_UP_RUNS = 3
MIN_RUNS = 3
GRAPH_CALLS = 16
"""Calls in one CUDA graph on an accelerator. Engines decode with graphs too, and a stage takes less
time than Python needs to launch it."""
POINT_SECONDS = 2.0
"""Seconds after which no further run of a measured point begins."""
COLD_BYTES = 256 << 20
MAX_COPIES = 64
"""Most copies of a stage's weights; copies are made until they exceed every cache."""
MIN_R2 = 0.98
FRAME_SIZES = (4096, 16_384, 65_536, 262_144, 1 << 20, 4 << 20)
"""Bytes of frames, multiples of `frames.ROW_BYTES`."""


@dataclass(frozen=True)
class FittedLine:
    """Seconds = max(floor, slope * rows + offset), which is k1, k2 or k3, k4 of the paper."""

    slope: float
    offset: float
    floor: float
    r2: float
    """Share of the variance that the line explains."""


def fit(rows: Sequence[float], seconds: Sequence[float]) -> FittedLine:
    """Return the best line with a floor, by least squares over every position of its bend."""
    found: list[FittedLine] = []
    for bend in rows[:-1]:
        slope, floor, r2 = straight([max(0.0, x - bend) for x in rows], seconds)
        found.append(FittedLine(slope, floor - slope * bend, floor, r2))
    # Among equally good lines, the first.
    return max(found, key=lambda line: round(line.r2, 9))


def straight(places: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return slope and offset of the least-squares line, and the share of variance that it
    explains.
    """
    slope, offset = linear_regression(places, seconds)
    mean = fmean(seconds)
    spread = sum((y - mean) ** 2 for y in seconds) or 1e-30
    wrong = sum((offset + slope * x - y) ** 2 for x, y in zip(places, seconds, strict=True))
    return slope, offset, 1 - wrong / spread


def profile(options: argparse.Namespace, progress: Progress) -> Iterator[Table | str]:
    """Measure, write the file, and yield tables."""
    model = find_model(options.model)
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise ConfigError("`--device cuda` needs an accelerator, got a machine without; use cpu")
    device = torch.device("cuda" if there and options.device != "cpu" else "cpu")
    if len(options.rows) < 2:
        raise ConfigError(f"`--rows` must name at least 2 numbers, got {len(options.rows)}")
    wrong = [tp for tp in options.tp if model.num_heads % tp or model.expert_size % tp]
    if wrong:
        raise ConfigError(f"`--tp` must divide heads and experts of {model.name}, got {wrong}")
    dtype = getattr(torch, options.dtype)
    gpu = describe_device(device, dtype)
    stages: list[dict[str, Any]] = []
    points = [(stage, tp) for tp in options.tp for stage in ("attention", "experts")]
    with torch.inference_mode():
        for done, (stage, tp) in enumerate(points):
            progress(f"{stage} tp={tp}", done, len(points))
            build = attention_layer if stage == "attention" else expert_layer
            seconds = []
            for rows in options.rows:
                call = build(model, tp, rows, round(options.length), device, dtype)
                seconds.append(seconds_of(call, device, options.repeats))
            line = fit([float(rows) for rows in options.rows], seconds)
            measured = {"rows": list(options.rows), "seconds": seconds}
            stages.append({"stage": stage, "tp": tp, **measured, **asdict(line)})
    network = None
    if options.transport:
        progress("network", len(points), len(points))
        network = frames(options.transport, device, options.repeats)
    document = {
        "label": "measured-1gpu" if device.type == "cuda" else "measured-cpu",
        "model": asdict(model),
        "gpu": asdict(gpu),
        "length": options.length,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "stages": stages,
        "network": network,
    }
    write_output("--out", options.out, json.dumps(document, indent=1, allow_nan=False) + "\n")
    for one in stages:
        yield comparison(model, gpu, one, options.length, dtype.itemsize)
    if network is not None:
        yield (
            f"{network['transport']}: {1e6 * network['offset']:.0f} us and "
            f"{1e-9 / network['slope']:.2f} GB/s, R2 {network['r2']:.4f}"
        )
    low = [f"{one['stage']} tp={one['tp']}" for one in stages if one["r2"] < MIN_R2]
    if low:
        yield (
            f"the fit explains less than {MIN_R2:.0%} of {', '.join(low)}: the machine may be "
            "busy; measure again, or with more `--repeats`"
        )


def frames(transport: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the seconds of frames of some sizes, and the fitted line."""
    seconds = frame_seconds(transport, device, FRAME_SIZES, repeats)
    slope, offset, r2 = straight(FRAME_SIZES, seconds)
    return {
        "transport": transport,
        "bytes": list(FRAME_SIZES),
        "seconds": seconds,
        "slope": max(slope, 1e-15),  # noise can make the slope negative
        "offset": max(offset, 0.0),
        "r2": r2,
    }


def describe_device(device: torch.device, dtype: torch.dtype) -> Gpu:
    """Return the data sheet of this device, or measured rates if the table lacks it.

    For such a device, link and network default to 1 GB/s unless frames are measured, and the power
    is unknown. Change them with `--gpu-data`.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        for known in sorted(GPUS, key=len, reverse=True):
            if known in name.replace("-", " ").split():
                return GPUS[known]
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    numbers = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    square = torch.ones(1024, 1024, dtype=dtype, device=device)
    copying = seconds_of(lambda: numbers.clone(), device, 10)
    multiplying = seconds_of(lambda: square @ square, device, 10)
    rates = (2 * numbers.numel() / copying, 2 * 1024**3 / multiplying)
    return Gpu(device.type, float(memory), *rates, watts=0.0, link_rate=1e9, network_rate=1e9)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call; slow calls run at least `MIN_RUNS` times."""
    for _ in range(WARM_UP_RUNS if device.type == "cuda" else 1):
        call()
    times: list[float] = []
    graph: Any = None
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
    began = time.perf_counter()
    while len(times) < MIN_RUNS or (
        len(times) < repeats and time.perf_counter() - began < POINT_SECONDS
    ):
        if graph is not None:
            event: Any = torch.cuda.Event
            start, end = (event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / GRAPH_CALLS)
        else:
            start_seconds = time.perf_counter()
            call()
            times.append(time.perf_counter() - start_seconds)
    return median(times)


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)


def attention_layer(
    model: MoeModel, tp: int, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that computes attention of one layer, with shared experts, for decoding.

    It computes the part of one of `tp` GPUs, for rows with `length` cached tokens each.
    """
    made = functools.partial(_random, device=device, dtype=dtype)
    shapes = model.attention_matrices(tp)
    pair = model.feed_forward_matrices(model.shared_size, tp)
    weights = cold(lambda: [made(*shape) for shape in (*shapes, *pair)])
    states = made(rows, model.hidden_size)
    heads = model.num_heads // tp
    if model.kv_rank:
        width = model.kv_rank + model.rope_dim
        queries, cache = made(rows, 1, heads, width), made(rows, 1, length, width)
        values = cache[..., : model.kv_rank]
    else:
        kv_heads = max(1, model.num_kv_heads // tp)
        queries = made(rows, kv_heads, heads // kv_heads, model.head_dim)
        cache, values = (made(rows, kv_heads, length, model.head_dim) for _ in range(2))
    inputs = [made(rows, height) for height, _ in shapes]

    def call() -> Tensor:
        matrices = next(weights)
        # Values do not affect the time, so each product may have its own input.
        for given, matrix in zip(inputs, matrices, strict=False):
            result = given @ matrix
        F.scaled_dot_product_attention(queries, cache, values)
        return feed_forward(states, matrices[len(shapes) :]) if pair else result

    return call


def expert_layer(
    model: MoeModel, tp: int, rows: int, _: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that computes one expert for its rows; arguments as in
    `attention_layer`.
    """
    made = functools.partial(_random, device=device, dtype=dtype)
    shapes = model.feed_forward_matrices(model.expert_size, tp)
    pairs = cold(lambda: [made(*shape) for shape in shapes])
    states = made(rows, model.hidden_size)
    return lambda: feed_forward(states, next(pairs))


def cold(made: Callable[[], list[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield copies of new weights in turn, so that no weight is in a cache, as during decoding."""
    copies = [made()]
    size = sum(one.nbytes for one in copies[0])
    copies += [made() for _ in range(min(MAX_COPIES, math.ceil(COLD_BYTES / size)) - 1)]
    return itertools.cycle(copies)


def feed_forward(states: Tensor, pair: Sequence[Tensor]) -> Tensor:
    """Return the output of a gated feed-forward network: [rows, h] -> [rows, h]."""
    gate, up = (states @ pair[0]).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ pair[1]


def comparison(
    model: MoeModel, gpu: Gpu, one: dict[str, Any], length: float, itemsize: int
) -> Table:
    """Return measured and computed seconds of a stage side by side.

    The computed seconds leave out what was not measured: sums over GPUs, norms and the router.
    """
    free = Constants(layer_seconds=0.0, link_seconds=0.0)
    # The planner's bytes are for `BYTES` per number.
    rate = gpu.memory_rate * BYTES / itemsize
    alone = replace(gpu, link_rate=1e30, memory_rate=rate)
    if one["stage"] == "attention":
        stage = attention_stage(model, alone, one["tp"], length, free)
    else:
        stage = expert_stage(model, alone, one["tp"], 1, free)
    rows = []
    for count, seconds in zip(one["rows"], one["seconds"], strict=True):
        computed = stage.seconds(count)
        cells = [count, f"{1e6 * seconds:.0f}", f"{1e6 * computed:.0f}"]
        rows.append([*cells, f"{computed / seconds - 1:+.0%}"])
    title = (
        f"{one['stage']} tp={one['tp']} on {gpu.name}: {1e6 * one['slope']:.2f} us a row + "
        f"{1e6 * one['offset']:.0f} us, at least {1e6 * one['floor']:.0f} us, R2 {one['r2']:.4f}"
    )
    if one["stage"] == "experts" and one["slope"] > 0:
        size = numbers_in(model.feed_forward_matrices(model.expert_size, one["tp"]))
        compute = 2 * size / (gpu.flops * one["slope"])
        memory = BYTES * size / (rate * one["floor"]) if one["floor"] > 0 else 0.0
        title += f"; compute_efficiency {compute:.2f}, memory_efficiency {memory:.2f}"
    return Table(title, ("rows", "measured us", "computed us", "error"), rows)
