"""Iterations in one task against tasks apart, and new weights in memory against those of files.

    python -m tests.benchmarks.bench_resident --iterations 12 --rounds 2
    python -m tests.benchmarks.bench_resident --engine vllm --iterations 4 --rounds 1

Both ways do the same work: preset, seed and settings are equal, and so are all records. They run in
turn. The first iteration, which opens trainer and engine, is left out of both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from planish.base.parallel import SINGLE
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.weights import fetch_weights
from planish.records.stream import StreamState, fresh_cursor
from planish.run.stage import Context
from planish.stages.export.stage import export
from planish.stages.iterate.commit import Made
from planish.stages.iterate.residents import Residents
from planish.stages.rollout.job import engine_options, rollout_config
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import begin_iteration
from tests.benchmarks.facts import require_idle_machine, write_result
from tests.unit.stages.train.runs import add_iteration, start_run

SIZES = {"max_rows": 4, "max_prompt_tokens": 32, "max_response_tokens": 32, "device": "cpu"}
LARGE = {"hidden_size": 1024, "num_layers": 20, "intermediate_size": 4096, "head_dim": 64}
"""A dense policy whose float32 weights are 1 GB."""


def run_seconds(folder: Path, engine: str, iterations: int, resident: int) -> dict[str, float]:
    """Run the preset `dapo-tiny` once; return seconds of an iteration, and what else it does."""
    line = [sys.executable, "-m", "pipelines.local", "--root", str(folder)]
    line += ["--preset", "dapo-tiny", "--iterations", str(iterations)]
    # One process samples in both ways.
    line += ["--shards", "1", "--resident", str(resident), "-o", f"engine.name={engine}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode or "failed stage=" in done.stdout:
        raise SystemExit(done.stdout[-3000:] + done.stderr)
    entries = [json.loads(path.read_text()) for path in (folder / "logs").glob("*.json")]
    # What follows an update goes on beside the next rollouts.
    ends = {
        e["iteration"]: e["start_seconds"] + e["seconds"] for e in entries if e["stage"] == "train"
    }
    whole = (ends[iterations] - ends[1]) / (iterations - 1)
    spans = sorted(
        (e["start_seconds"], e["start_seconds"] + e["seconds"])
        for e in entries
        if e["stage"] in ("rollout", "train") and e["iteration"] > 1
    )
    busy, until = 0.0, 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return {"iteration": whole, "outside": whole - busy / (iterations - 1)}


def compare_runs(engine: str, iterations: int, rounds: int) -> dict[str, Any]:
    """Run both ways in turn; return medians and their quotient."""
    found: dict[str, list[dict[str, float]]] = {"apart": [], "resident": []}
    for number in range(rounds):
        for way, size in (("apart", 0), ("resident", iterations)):
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(run_seconds(Path(folder) / "run", engine, iterations, size))
            print(f"round {number} {way:<9}{found[way][-1]}", flush=True)
    medians = {
        f"{way}_{what}_seconds": statistics.median(each[what] for each in runs)
        for way, runs in found.items()
        for what in ("iteration", "outside")
    }
    quotient = medians["apart_iteration_seconds"] / medians["resident_iteration_seconds"]
    return {"engine": engine, "iterations": iterations, **medians, "apart_over_resident": quotient}


def seconds_of(work: Callable[[], object]) -> float:
    """Return what a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare_refreshes(rounds: int) -> dict[str, float]:
    """Time new weights of 1 GB in memory, by export, fetch and load, and a plain copy of them."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = start_run(f"file://{folder}/run", **LARGE)
        rewards = add_iteration(tiny, 1)
        residents = Residents(SINGLE, torch.device("cpu"), {"rollout": SIZES})
        residents.open(tiny.policy_pin)
        options = engine_options(rollout_config({"rollout": SIZES}))
        with residents.serve(EngineConfig(), ModelRef(pin=tiny.policy_pin), **options) as engine:
            pass
        job = TrainJob(
            tiny.root, tiny.config, tiny.digest, 1, tiny.num_shards, tiny.policy_pin, "",
            rewards.pin(),
        )  # fmt: skip
        state_pin = begin_iteration(job, held=residents.trainer).commit().pin()
        assert residents.trainer.trainer is not None
        weights = list(residents.trainer.trainer.policy.weights().values())
        copies = [weight.clone() for weight in weights]
        times: dict[str, list[float]] = {"copy": [], "memory": [], "files": []}
        for number in range(1, rounds + 1):
            context = Context(tiny.root, "checkpoint", number, 0, tiny.config, tiny.digest, {})
            pins: list[str] = []

            def by_files(context: Context = context, pins: list[str] = pins) -> None:
                outcome = export(context, tiny.policy_pin, state_pin)
                pins.append(str(outcome.values["policy_pin"]))
                source = fetch_weights(pins[0])
                engine.update_weights(source, context.iteration)

            times["files"].append(seconds_of(by_files))
            made = Made(StreamState(fresh_cursor()), pins[0], version=number)
            times["memory"].append(seconds_of(lambda made=made: residents.refresh(made)))
            residents.trainer.state_pin = state_pin
            times["copy"].append(
                seconds_of(lambda: [c.copy_(w) for c, w in zip(copies, weights, strict=True)])
            )
        residents.close()
    medians = {f"{way}_seconds": statistics.median(own) for way, own in times.items()}
    return {
        "bytes": float(sum(weight.nbytes for weight in weights)),
        **medians,
        "memory_over_files": medians["memory_seconds"] / medians["files_seconds"],
        "memory_over_copy": medians["memory_seconds"] / medians["copy_seconds"],
    }


def main() -> int:
    """Measure as the command line says, and write `results/resident.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    require_idle_machine()
    result: dict[str, Any] = compare_runs(options.engine, options.iterations, options.rounds)
    name = "resident"
    if options.engine == "vllm":
        name += "_vllm"
    else:
        result["refresh"] = compare_refreshes(3)
    print(json.dumps(result, indent=1))
    write_result(name, "measured-cpu", result, "tests.benchmarks.bench_resident")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
