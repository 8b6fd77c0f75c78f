"""What windows save in the policy's step: a mask of the last tokens against a mask of all.

Both masks are trained on the same sequences in turn, by two trainers that begin alike, so that the
figure is a ratio within one run. The window holds the last quarter of each response: earlier tokens
are context that never meets the LM head. With a large vocabulary the head is most of the work, with
the small one of the demo it is not: the saving is measured for both.

    python -m tests.benchmarks.bench_window
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import numpy as np
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.base import Denominators, TrainBatch
from planish.base.parallel import Grid
from planish.models.config import ModelConfig
from planish.models.policy import Policy, build_policy, save_policy
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import Trainer
from tests.benchmarks.bench_train import make_batch
from tests.benchmarks.facts import write_result

CPU = torch.device("cpu")
ROWS = 64
VOCABULARIES = {"characters": 0, "8k": 8192, "32k": 32_768}
MASKS = ("full", "window")


def policy_with(vocab_size: int) -> Policy:
    """The demo's policy; with a size given, its embedding and head are widened to it."""
    policy = build_policy(ModelConfig(), seed=0)
    if vocab_size:
        policy.model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return policy


def window_mask(batch: TrainBatch, share: float) -> torch.Tensor:
    """Select the last `share` of each response, at least one token of it."""
    mask = batch.policy_mask
    counts = mask.sum(1, keepdim=True)
    position = mask.cumsum(1)
    kept = (share * counts).ceil().clamp(min=1)
    return mask & (position > counts - kept)


def step(trainer: Trainer, algorithm, batch: TrainBatch) -> float:
    """Make one optimizer step; returns its wall seconds."""
    counts = Denominators(algorithm.counts(batch), algorithm.counts(batch), 1)

    def loss_fn(logprobs, entropy, micro):
        return algorithm.loss(logprobs, entropy, micro, counts)

    started = time.perf_counter()
    trainer.step(batch, loss_fn, learning_rate=1e-4)
    return time.perf_counter() - started


def measure(vocab_size: int, shape: str, rounds: int, folder: str) -> dict:
    """Median seconds of a step under each mask, and the median of their ratio round by round."""
    policy = policy_with(vocab_size)
    ref = save_policy(f"file://{folder}", policy, version=0, parents={}, attributes={})
    config = TrainConfig(tokens_per_microbatch=4096)
    algorithm = build_algorithm({"name": "dapo"})
    whole = algorithm.advantages(make_batch(shape, 0))
    whole = whole.take(torch.from_numpy(np.random.default_rng(0).permutation(len(whole))[:ROWS]))
    batches = {
        "full": whole,
        "window": whole.updated(policy_mask=window_mask(whole, 0.25)),
    }
    trainers = {
        name: Trainer(config, ref.pin(), temperature=1.0, seed=0, grid=Grid(), device=CPU)
        for name in MASKS
    }
    seconds: dict[str, list[float]] = {name: [] for name in MASKS}
    # The first round warms caches and allocators up.
    for number in range(rounds + 1):
        for name in MASKS if number % 2 else MASKS[::-1]:
            taken = step(trainers[name], algorithm, batches[name])
            if number:
                seconds[name].append(taken)
    ratios = [full / window for full, window in zip(*seconds.values(), strict=True)]
    return {
        "vocab_size": policy.model.get_input_embeddings().weight.shape[0],
        "tokens": {name: int(batches[name].policy_mask.sum()) for name in MASKS},
        "step_seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "full_over_window": statistics.median(ratios),
        "full_over_window_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict = {"rows": ROWS, "window_share": 0.25, "rounds": options.rounds}
    for shape in ("column_traces", "heavy_tail"):
        for name, vocab_size in VOCABULARIES.items():
            with tempfile.TemporaryDirectory() as folder:
                key = f"{shape}/{name}"
                result[key] = measure(vocab_size, shape, options.rounds, folder)
            print(key, json.dumps(result[key]))
    print(write_result("window", "measured-cpu", result, "tests.benchmarks.bench_window"))


if __name__ == "__main__":
    main()
