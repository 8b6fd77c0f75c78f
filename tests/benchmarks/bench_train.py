"""Train-step speed and memory of the trainers against a bare PyTorch loop of the same work.

`python -m tests.benchmarks.bench_train --trainers fsdp2,megatron` measures rounds in which all
systems take turns at every step of the same model, batch and loss, and writes `results/train.json`.
Ratios are medians over rounds of the quotient within one round, of processor seconds of one thread:
other work on the machine disturbs them less than wall seconds, which stand beside them.

Systems: each trainer in one process, `fsdp2` and `megatron` (packed rows, all metrics), and as
`..._padded` without packing (micro-batches of similar lengths); `bare` (micro-batches as they come,
each padded to its longest row, logits of all positions, no metrics) and `bare_selected` (the same,
LM head on response tokens only).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.base import Denominators, TrainBatch
from planish.base.parallel import Grid
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import TRAINERS, Trainer, set_up_torch
from tests.benchmarks.facts import write_result
from tests.unit.algorithms.batches import random_batch

ROLLOUTS = 64
MINIBATCHES = 8
BUDGETS = (1024, 4096, TrainConfig().tokens_per_microbatch)
COMMAND = "tests.benchmarks.bench_train"
CPU = torch.device("cpu")
SHAPES = {
    # Median, sigma and cap of log-normal response lengths, in tokens.
    "column_traces": (22.0, 0.35, 48),
    "heavy_tail": (24.5, 1.0, 384),
}


def make_batch(shape: str, seed: int) -> TrainBatch:
    """One rollout batch of the demo's size with prompts of 8 to 12 tokens."""
    median, sigma, cap = SHAPES[shape]
    rng = np.random.default_rng(seed)
    rows = ROLLOUTS * MINIBATCHES
    prompts = rng.integers(8, 13, rows)
    responses = np.clip(rng.lognormal(np.log(median), sigma, rows).astype(int), 1, cap)
    return random_batch(rng, prompts, responses, vocabulary=50, logprob=-1.5)


class Ours:
    """A trainer of the program with the real algorithm."""

    def __init__(self, pin: str, config: TrainConfig, algorithm) -> None:
        self.trainer = Trainer(config, pin, temperature=1.0, seed=0, grid=Grid(), device=CPU)
        self.algorithm = algorithm

    def step(self, batch: TrainBatch, counts: Denominators) -> None:
        def loss_fn(logprobs, entropy, micro):
            return self.algorithm.loss(logprobs, entropy, micro, counts)

        self.trainer.step(batch, loss_fn, learning_rate=5e-4)

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        return self.trainer.logprobs(batch)[0]


class Bare:
    """What one writes by hand: forward, surrogate, backward, clip, AdamW."""

    def __init__(self, pin: str, config: TrainConfig, algorithm) -> None:
        self.config = config
        self.model = load_policy(pin, dtype=torch.float32).model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)

    def logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids, use_cache=False).logits[:, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        return torch.nn.functional.pad(chosen.squeeze(-1), (1, 0))

    def step(self, batch: TrainBatch, counts: Denominators) -> None:
        longest = int(batch.attention_mask.sum(1).max())
        size = max(1, self.config.tokens_per_microbatch // longest)
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            width = int(batch.attention_mask[rows].sum(1).max())
            at = (rows, slice(0, width))
            mask, advantages = batch.policy_mask[at], batch.advantages[at]
            logprobs = self.logprobs(batch.input_ids[at], mask)
            ratio = (logprobs - batch.old_logprobs[at]).exp()
            clipped = ratio.clamp(0.8, 1.28)
            losses = torch.max(-advantages * ratio, -advantages * clipped)
            (losses.masked_fill(~mask, 0).sum() / counts.minibatch["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        with torch.no_grad():
            return self.logprobs(batch.input_ids, batch.policy_mask) * batch.policy_mask


class BareSelected(Bare):
    """The bare loop with the LM head on response tokens only."""

    def logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1][mask[:, 1:]]
        logits = self.model.lm_head(hidden)
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[mask][:, None]).squeeze(-1)
        return torch.zeros(mask.shape).masked_scatter(mask, chosen)


BARE = {"bare": Bare, "bare_selected": BareSelected}


def systems_of(trainers: list[str]) -> list[str]:
    """Return the names of all systems: each trainer, packed and padded, and the bare loops."""
    return [name for trainer in trainers for name in (trainer, f"{trainer}_padded")] + list(BARE)


def quotients(trainers: list[str]) -> list[tuple[str, str]]:
    """Return which systems' speeds are divided by which."""
    pairs = [(trainer, f"{trainer}_padded") for trainer in trainers]
    pairs += [(trainers[0], name) for name in BARE]
    for other in trainers[1:]:
        pairs += [(other, trainers[0]), (f"{other}_padded", f"{trainers[0]}_padded")]
    return pairs


def build(name: str, folder: str, budget: int):
    """Return a system and the algorithm it trains with."""
    trainer, _, padded = name.partition("_")
    config = TrainConfig(
        trainer="fsdp2" if name in BARE else trainer,
        packing=not padded,
        device="cpu",
        learning_rate=5e-4,
        weight_decay=0.01,
        tokens_per_microbatch=budget,
    )
    set_up_torch(config, CPU)
    policy = build_policy(ModelConfig(), seed=0)
    ref = save_policy(f"file://{folder}/{name}", policy, version=0, parents={}, attributes={})
    algorithm = build_algorithm({"name": "dapo"})
    return BARE.get(name, Ours)(ref.pin(), config, algorithm), algorithm


def steps_of(algorithm, batch: TrainBatch):
    """The mini-batches of one rollout batch with their denominators."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(batch)))
    whole = algorithm.counts(batch)
    for part in order.chunk(MINIBATCHES):
        minibatch = batch.take(part)
        yield minibatch, Denominators(algorithm.counts(minibatch), whole, MINIBATCHES)


def one_iteration(system, algorithm, batch: TrainBatch) -> None:
    """Train on all mini-batches of one rollout batch."""
    for minibatch, counts in steps_of(algorithm, batch):
        system.step(minibatch, counts)


def one_round(systems: dict, batch: TrainBatch, number: int) -> dict[str, tuple[float, float]]:
    """Processor and wall seconds of each system for one rollout batch; they take turns."""
    seconds = dict.fromkeys(systems, (0.0, 0.0))
    names = list(systems)
    algorithm = build_algorithm({"name": "dapo"})
    for step, (minibatch, counts) in enumerate(steps_of(algorithm, batch)):
        first = (number + step) % len(names)
        for name in names[first:] + names[:first]:
            started = time.process_time(), time.perf_counter()
            systems[name].step(minibatch, counts)
            cpu, wall = seconds[name]
            cpu += time.process_time() - started[0]
            seconds[name] = cpu, wall + time.perf_counter() - started[1]
    return seconds


def check_equal(names: list[str], folder: str, batch: TrainBatch, algorithm) -> float:
    """Largest difference of log-probabilities to the first system after one iteration of each."""
    found = []
    for name in names:
        system, _ = build(name, folder, 4096)
        one_iteration(system, algorithm, batch)
        found.append(system.scores(batch))
    return max((scores - found[0]).abs().max().item() for scores in found)


def measure_speed(trainers: list[str], shape: str, budget: int, rounds: int, folder: str) -> dict:
    """Tokens per second of each system and the median quotients."""
    batch = build_algorithm({"name": "dapo"}).advantages(make_batch(shape, 0))
    tokens = int(batch.attention_mask.sum())
    systems = {name: build(name, folder, budget)[0] for name in systems_of(trainers)}
    # The first round warms caches and allocators up.
    measured = [one_round(systems, batch, number) for number in range(rounds + 1)][1:]
    result: dict = {"real_share_when_padded": float(batch.attention_mask.float().mean())}
    for place, clock in enumerate(("", "wall_")):
        seconds = {name: [taken[name][place] for taken in measured] for name in systems}
        result[f"{clock}tokens_per_second"] = {
            name: tokens / statistics.median(taken) for name, taken in seconds.items()
        }
        for one, other in quotients(trainers):
            result[f"{clock}{one}_over_{other}"] = statistics.median(
                theirs / ours for ours, theirs in zip(seconds[one], seconds[other], strict=True)
            )
    return result


def measure_memory(trainers: list[str], shape: str, budget: int) -> dict:
    """Peak resident bytes of a process that trains three iterations, per system."""
    peaks = {}
    for name in systems_of(trainers):
        line = [sys.executable, "-m", "tests.benchmarks.bench_train", "--memory-of", name,
                "--shape", shape, "--budget", str(budget)]  # fmt: skip
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        peaks[name] = json.loads(done.stdout.strip().splitlines()[-1])
    ratios = {
        f"{one}_over_{other}": peaks[one]["peak_bytes"] / peaks[other]["peak_bytes"]
        for one, other in quotients(trainers)
    }
    return {"systems": peaks, **ratios}


def peak_bytes() -> int:
    """Peak resident bytes of this process; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024


def print_memory(name: str, shape: str, budget: int) -> None:
    """Body of a memory measurement: prints the peak as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        system, algorithm = build(name, folder, budget)
        batch = algorithm.advantages(make_batch(shape, 0))
        before = peak_bytes()
        for _ in range(3):
            one_iteration(system, algorithm, batch)
    print(json.dumps({"peak_bytes": peak_bytes(), "before_training_bytes": before}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainers", default="fsdp2,megatron")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--shape", default="", choices=["", *SHAPES])
    parser.add_argument("--memory-of", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print_memory(options.memory_of, options.shape, options.budget)
        return
    trainers = options.trainers.split(",")
    unknown = sorted(set(trainers) - set(TRAINERS))
    if unknown:
        parser.error(f"--trainers must be of {', '.join(TRAINERS)}, got {', '.join(unknown)}")
    result: dict = {"rollouts_per_minibatch": ROLLOUTS, "minibatches": MINIBATCHES}
    with tempfile.TemporaryDirectory() as folder:
        algorithm = build_algorithm({"name": "dapo"})
        batch = algorithm.advantages(make_batch("column_traces", 0))
        result["largest_logprob_difference"] = check_equal(
            systems_of(trainers), folder, batch, algorithm
        )
        for shape in [options.shape] if options.shape else SHAPES:
            for budget in [options.budget] if options.budget else BUDGETS:
                key = f"{shape}/tokens_per_microbatch={budget}"
                result[key] = measure_speed(trainers, shape, budget, options.rounds, folder)
                print(key, json.dumps(result[key]), flush=True)
        result[f"{shape}/memory"] = measure_memory(trainers, shape, options.budget or 4096)
        print(shape, json.dumps(result[f"{shape}/memory"]), flush=True)
    print(write_result("train", "measured-cpu", result, COMMAND))


if __name__ == "__main__":
    main()
