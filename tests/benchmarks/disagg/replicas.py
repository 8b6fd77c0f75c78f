"""Two vLLM replicas that share one expert rank against one replica, with paced stages.

Attention and experts take equally long, so that one replica leaves the expert rank idle half of the
time. Everything is real but the length of a stage: vLLM's processes, frames over loopback sockets,
an expert rank that serves what comes first. A round is what the driver waits for: a step of every
replica.

    .venv-engines/bin/python -m tests.benchmarks.bench_disagg --part replicas
"""

from typing import Any

from planish.engines.planner.pipeline import iteration_seconds
from tests.benchmarks.disagg import busy
from tests.benchmarks.disagg.law import ITERATIONS, LAYERS, MODULE, REPETITIONS
from tests.benchmarks.facts import require_idle_machine, write_result

NAME = "disagg_replicas"
STAGE_S = 0.020
TARGET = 1.6
"""Tokens per second of two replicas over one, at least."""


def measure(replicas: int, iterations: int, repetitions: int) -> dict[str, Any]:
    """Return the time of a round and the rate of some replicas over one expert rank."""
    row = busy.measure("vllm_disagg", replicas, (STAGE_S, STAGE_S), iterations, repetitions)
    # The law of micro-batches; with equal stages it holds for replicas as well.
    return {**row, "law": iteration_seconds(STAGE_S, STAGE_S, 0.0, replicas, LAYERS)}


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
            "rows_of_a_replica": busy.ROWS["vllm_disagg"],
            "one": one,
            "two": two,
            "two_over_one": gain,
            "law_two_over_one": law,
            "target": {"value": gain, "target": TARGET, "is": "at least", "met": gain >= TARGET},
        }
        print(write_result(NAME, "measured-cpu", result, MODULE))
    return dry or gain >= TARGET
