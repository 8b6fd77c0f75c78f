"""How busy one expert rank is with 1, 2 and 4 attention ranks, and what each adds in tokens.

Four attention ranks are as many as one expert rank can serve here. Everything is real but the
length of a stage. The ranks of `disagg` decode together: their rows are computed at once, so the
experts are held to a time for each rank. Each vLLM of `vllm_disagg` steps by itself, and its rows
are computed when they come.

    .venv-engines/bin/python -m tests.benchmarks.bench_disagg --part busy
"""

import statistics
from importlib.util import find_spec
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

NAME = "disagg_busy"
RANKS = (1, 2, 4)
STAGE_S = {"disagg": (0.032, 0.008), "vllm_disagg": (0.048, 0.016)}
"""Seconds of attention, and of the experts for one attention rank."""
SETTINGS: dict[str, dict[str, int]] = {
    "disagg": {"micro_batches": 2},
    "vllm_disagg": {"cache_bytes": 16 << 20},
}
ROWS = {"disagg": 2, "vllm_disagg": 4}
"""Requests of an attention rank; one for each micro-batch of `disagg`."""
OF_LAW = 0.85
"""Busy share of the experts over that of the law, at least."""


def measure(
    engine: str,
    num_ranks: int,
    stage_s: tuple[float, float],
    iterations: int,
    repetitions: int,
) -> dict[str, Any]:
    """Return seconds and tokens of an iteration, and the part of it that each rank computes."""
    config = EngineConfig(
        name=engine, attention_ranks=num_ranks, expert_ranks=1, **SETTINGS[engine]
    )
    count = ROWS[engine] * num_ranks
    service = DisaggEngine(
        max_rows=count, max_model_len=64, config=config, stage_s=stage_s, timeout_s=240
    )
    with service:
        service.start(ModelRef(policy=tiny_policy()))
        seconds_of_iteration(service, count, 2)
        before = service.stats()
        times = [seconds_of_iteration(service, count, iterations) for _ in range(repetitions)]
        after = service.stats()
    seconds = statistics.median(times)
    spent = after["step_seconds"] - before["step_seconds"]
    busy = {
        f"{rank['role']} {rank['rank']}": (rank["busy_s"] - earlier["busy_s"]) / spent
        for earlier, rank in zip(before["ranks"], after["ranks"], strict=True)
    }
    rate = {"seconds": seconds, "repetitions": times, "tokens_per_second": count / seconds}
    return {**rate, "busy": busy}


def law(engine: str, num_ranks: int) -> tuple[float, float]:
    """Return the seconds of an iteration, and the part of it that the experts compute."""
    attention, experts = STAGE_S[engine]
    together = num_ranks * experts
    if engine == "disagg":
        frames = SETTINGS[engine]["micro_batches"]
        seconds = iteration_seconds(attention, together, 0.0, frames, LAYERS)
        return seconds, frames * together * LAYERS / seconds
    # Replicas begin at once, queue at the experts, and come apart by that.
    turn = max(attention + experts, together)
    seconds = attention + together + (LAYERS - 1) * turn
    return seconds, together * LAYERS / seconds


def run(*, dry: bool) -> bool:
    """Measure the engines that are here, and write the result unless the run is dry.

    Returns:
        Whether the experts are as busy as they should be; a dry run is too short to tell.
    """
    idle = {} if dry else {"busy_cores_before": require_idle_machine()}
    sizes = (4, 1) if dry else (ITERATIONS, REPETITIONS)
    engines: dict[str, Any] = {}
    for engine in ["disagg", *["vllm_disagg"] * bool(find_spec("vllm"))]:
        rows: dict[str, Any] = {}
        engines[engine] = rows
        attention, experts = STAGE_S[engine]
        for number in RANKS:
            held = experts * number if engine == "disagg" else experts
            row = rows[str(number)] = measure(engine, number, (attention, held), *sizes)
            row["law"], row["law_busy"] = law(engine, number)
            row["busy_experts"] = row["busy"][f"expert {number}"]
            row["over_one"] = row["tokens_per_second"] / rows["1"]["tokens_per_second"]
            print(
                f"{engine}, attention ranks {number}: experts busy {row['busy_experts']:.1%} (law "
                f"{row['law_busy']:.1%}), {row['seconds'] * 1e3:.0f} ms an iteration (law "
                f"{row['law'] * 1e3:.0f}), {row['over_one']:.2f}x the tokens of one rank",
                flush=True,
            )
    shares = [row["busy_experts"] / row["law_busy"] for t in engines.values() for row in t.values()]
    is_met = min(shares) >= OF_LAW
    word = "met" if is_met else "MISSED"
    print(f"{word:<7}busy share of the experts over the law's: {min(shares):.2f} ({OF_LAW:g})")
    if not dry:
        target = {"value": min(shares), "target": OF_LAW, "is": "at least", "met": is_met}
        result = {"layers": LAYERS, "stage_s": STAGE_S, **idle, "engines": engines}
        print(write_result(NAME, "measured-cpu", {**result, "target": target}, MODULE))
    return dry or is_met
