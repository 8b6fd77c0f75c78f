"""Two vLLM replicas that share one expert rank against one replica, with paced stages.

Attention and experts take equally long, so that one replica leaves the expert rank idle half of the
time. Everything is real but the length of a stage: vLLM's processes, frames over loopback sockets,
an expert rank that serves what comes first. A round is what the driver waits for: a step of every
replica.

    .venv-engines/bin/python -m tests.benchmarks.bench_disagg --part replicas
"""

import statistics
from typing import Any

from planish.engines.config import EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.planner.pipeline import iteration_seconds
from planish.engines.requests import ModelRef
from tests.benchmarks.disagg.law import (
    ITERATIONS,
    LAYERS,
    MODULE,
    REPETITIONS,
    seconds_of_iteration,
    tiny_policy,
)
from tests.benchmarks.facts import require_idle_machine, write_result

NAME = "disagg_replicas"
STAGE_S = 0.020
ROWS = 4
"""Requests of a replica."""
TARGET = 1.6
"""Tokens per second of two replicas over one, at least."""


def measure(replicas: int, iterations: int, repetitions: int) -> dict[str, Any]:
    """Return the time of a round and the rate of some replicas over one expert rank."""
    config = EngineConfig(
        name="vllm_disagg", attention_ranks=replicas, expert_ranks=1, cache_bytes=16 << 20
    )
    count = ROWS * replicas
    engine = DisaggEngine(
        max_rows=count, max_model_len=64, config=config, stage_s=(STAGE_S, STAGE_S), timeout_s=240
    )
    with engine:
        engine.start(ModelRef(policy=tiny_policy()))
        seconds_of_iteration(engine, count, 2)
        times = [seconds_of_iteration(engine, count, iterations) for _ in range(repetitions)]
        ranks = engine.stats()["ranks"]
    seconds = statistics.median(times)
    return {
        "seconds": seconds,
        "repetitions": times,
        "tokens_per_second": count / seconds,
        # The law of micro-batches; with equal stages it holds for replicas as well.
        "law": iteration_seconds(STAGE_S, STAGE_S, 0.0, replicas, LAYERS),
        "seconds_of_ranks": {rank["rank"]: rank["busy_s"] for rank in ranks},
    }


def run(*, dry: bool) -> bool:
    """Measure one and two replicas, and write the result unless the run is dry.

    Returns:
        Whether the target is met; a dry run is too short to tell.
    """
    if not dry:
        require_idle_machine()
    sizes = (4, 1) if dry else (ITERATIONS, REPETITIONS)
    one, two = (measure(replicas, *sizes) for replicas in (1, 2))
    gain = two["tokens_per_second"] / one["tokens_per_second"]
    law = 2 * one["law"] / two["law"]
    for words, row in (("one replica", one), ("two replicas", two)):
        print(
            f"{words}: {row['seconds'] * 1e3:.1f} ms a round (law {row['law'] * 1e3:.1f}), "
            f"{row['tokens_per_second']:.1f} tokens/s"
        )
    word = "met" if gain >= TARGET else "MISSED"
    print(f"{word:<7}two replicas over one: {gain:.2f}x, law {law:.2f}x (at least {TARGET:g}x)")
    if not dry:
        result = {
            "stage_s": STAGE_S,
            "layers": LAYERS,
            "rows_of_a_replica": ROWS,
            "one": one,
            "two": two,
            "two_over_one": gain,
            "law_two_over_one": law,
            "target": {"value": gain, "target": TARGET, "is": "at least", "met": gain >= TARGET},
        }
        print(write_result(NAME, "measured-cpu", result, MODULE))
    return dry or gain >= TARGET
