"""An iteration on paper: where each second goes, in tasks apart and in one task.

`python -m tests.benchmarks.iteration_estimate` prints the tables of docs/results.md. Nothing here
is measured: what the figures rest on stands in `Machine` and `Run`.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Eight H100 of 80 GB, and a store."""

    flops: float = 989e12
    """Dense bfloat16 peak of a GPU."""
    memory_rate: float = 3.35e12
    """Bytes a second of its memory."""
    step_share: float = 0.26
    """Of the peak in a step, nothing computed again counted: ours at 1.5B on an H200."""
    decode_share: float = 0.6
    """Of the memory's rate while vLLM decodes."""
    read_rate: float = 5e9
    """Bytes a second that one machine reads from the store."""
    write_rate: float = 2.5e9
    pod_seconds: float = 20.0
    """To schedule a task, as on a real Kubeflow (pipelines/README.md)."""
    program_seconds: float = 10.0
    """For a process to import torch and join its ranks."""
    vllm_seconds: float = 60.0
    """To start vLLM, graphs compiled before."""
    refresh_rate: float = 50e9
    """Bytes a second that a rank gathers and loads."""
    copy_rate: float = 10e9
    """Bytes a second that a rank copies into memory of the host, for a save."""


@dataclass(frozen=True)
class Run:
    """One iteration without groups that dynamic sampling drops."""

    name: str
    parameters: float
    layers: int
    kv_bytes: float
    """Of a token, in bfloat16."""
    rows: int
    mean_tokens: int
    """Of a response."""
    longest_tokens: int
    nodes: int
    engine_gpus: int
    """GPUs of one engine."""


RUNS = (
    Run("Qwen2.5-7B, gpu-1x8", 7.6e9, 28, 57_344, 4096, 2_500, 8_192, 1, 1),
    Run("Qwen2.5-32B, gpu-16x8", 32.8e9, 64, 262_144, 8192, 5_000, 20_480, 16, 4),
)


def seconds(run: Run, machine: Machine, *, resident: bool) -> dict[str, float]:
    """Return the seconds of each part of an iteration, one after the other."""
    gpus = 8 * run.nodes
    engines = gpus // run.engine_gpus
    weights = 2 * run.parameters
    rows = run.rows / engines
    # A decoding step reads the weights and the cache of every row; rows leave as they end, and the
    # longest go on alone.
    rate = machine.decode_share * machine.memory_rate * run.engine_gpus
    step = (weights + rows * run.mean_tokens / 2 * run.kv_bytes) / rate
    tail = (run.longest_tokens - 2 * run.mean_tokens) * weights / rate
    sampling = 2 * run.mean_tokens * step * 0.75 + max(0.0, tail)
    tokens = run.rows * (run.mean_tokens + 200)
    flops = machine.flops * gpus
    scoring = 2 * run.parameters * tokens / (flops * machine.step_share * 4 / 3)
    training = 6 * run.parameters * tokens / (flops * machine.step_share)
    state, read, write = 12 * run.parameters, machine.read_rate, machine.write_rate
    export = 4 * run.parameters / read + weights / write
    parts = {
        "sampling": sampling,
        "old log-probabilities": scoring,
        "steps": training,
    }
    stored = state / (write * run.nodes)
    if resident:
        beside = stored + export / run.nodes
        return parts | {
            "copy of the train state": state / (machine.copy_rate * gpus),
            "state and policy into the store, after sampling": max(0.0, beside - sampling),
            "weights to engines": weights / machine.refresh_rate,
        }
    pods = 4 * (machine.pod_seconds + machine.program_seconds)
    fetched = math.ceil(8 / run.engine_gpus) * weights / read
    return parts | {
        "train state into the store": stored,
        "export": export,
        "pods of four stages": pods,
        "weights from the store and start of vLLM": fetched + machine.vllm_seconds,
        "train state from the store": state / (read * run.nodes) + machine.program_seconds,
    }


def main() -> int:
    """Print a table for each run."""
    for run in RUNS:
        apart, held = (seconds(run, Machine(), resident=each) for each in (False, True))
        print(f"{run.name}: {run.rows} responses of {run.mean_tokens:,} tokens in the mean")
        for name in dict.fromkeys([*held, *apart]):
            told = [f"{own[name]:8.0f}" if name in own else f"{'-':>8}" for own in (apart, held)]
            print(f"  {name:<44}{''.join(told)}")
        print(f"  {'all':<44}{sum(apart.values()):8.0f}{sum(held.values()):8.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
