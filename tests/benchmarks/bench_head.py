"""Memory and seconds of a training step under an LM head of 152k tokens: whole logits, and chunks.

    python -m tests.benchmarks.bench_head --rounds 1

A dense model of Qwen2.5-0.5B's widths with random weights, the smallest published one with that
vocabulary, and two of its layers, so that the head is most of the work; float32, activation
checkpointing, one thread. `whole` keeps the logits of all tokens of the micro-batch for the
backward pass, as a plain loss does; `chunks` is the trainer's own scorer. Each measurement is a
process of its own, which makes one step: its processor seconds, and the kernel's peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

from planish.algorithms import build_algorithm
from planish.base.parallel import Grid
from planish.models.logprobs import TOKENS_PER_CHUNK, hidden_before
from planish.stages.train.config import TrainConfig
from planish.stages.train.fsdp2 import Fsdp2Sharding
from planish.stages.train.sharded_model import ShardedModel
from planish.stages.train.trainer import set_up_torch
from tests.benchmarks.facts import require_idle_machine, write_result
from tests.unit.algorithms.batches import random_batch, whole_step

COMMAND = "tests.benchmarks.bench_head"
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
ROW = 256
"""Response tokens of each row."""
TEMPERATURE = 1.0


def build() -> ShardedModel:
    """Return the model in training."""
    config = TrainConfig(
        device="cpu",
        activation_checkpointing=True,
        tokens_per_microbatch=1 << 20,
        warmup_iterations=0,
    )
    set_up_torch(config, torch.device("cpu"))
    with no_init_weights():
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return ShardedModel(
        model, shard=Fsdp2Sharding, config=config, grid=Grid(), device=torch.device("cpu")
    )


def whole(model, micro):
    """Score by the logits of all selected tokens at once."""
    ids = micro.batch.input_ids
    hidden = hidden_before(model.model, ids, micro.packing, micro.select)
    logprobs = torch.log_softmax(model.lm_head(hidden).float() / TEMPERATURE, -1)
    chosen = logprobs.gather(-1, ids[micro.select][:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen, entropy


def measure(way: str, tokens: int) -> dict[str, float]:
    """Make a step of so many response tokens; return its seconds and the peak of the process."""
    held = build()
    rng = np.random.default_rng(0)
    rows = tokens // ROW
    batch = random_batch(
        rng, np.full(rows, 8), np.full(rows, ROW), vocabulary=SIZES["vocab_size"], logprob=-11.9
    )
    algorithm = build_algorithm({"name": "dapo"})
    batch = algorithm.advantages(batch.updated(group_index=torch.zeros(rows, dtype=torch.int32)))
    counts = whole_step(algorithm, batch)

    def score(micro):
        if way == "whole":
            return whole(held.scorer.model, micro)
        return held.scorer(micro.batch.input_ids, micro.packing, micro.select, TEMPERATURE)

    def loss_fn(logprobs, entropy, micro):
        return algorithm.loss(logprobs, entropy, micro, counts)

    began = time.process_time()
    metrics = held.step(batch, batch.policy_mask, score, loss_fn, learning_rate=1e-6)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, **metrics}


def main() -> int:
    """Measure as the command line says, and write `results/head.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs=2, default=[2048, 4096])
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "TOKENS"))
    options = parser.parse_args()
    if options.worker:
        way, tokens = options.worker
        print(json.dumps(measure(way, int(tokens))))
        return 0
    busy_cores = require_idle_machine(max_busy_cores=2.0)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for tokens in options.tokens:
            for way in ("whole", "chunks"):
                line = [sys.executable, "-m", COMMAND, "--worker", way, str(tokens)]
                done = subprocess.run(line, capture_output=True, text=True, check=True)
                each = json.loads(done.stdout.splitlines()[-1])
                found.setdefault(f"{way}_{tokens}", []).append(each)
                print(number, way, tokens, each, flush=True)
    few, many = options.tokens
    peaks = {name: max(each["peak_bytes"] for each in runs) for name, runs in found.items()}
    slopes = {
        way: (peaks[f"{way}_{many}"] - peaks[f"{way}_{few}"]) / (many - few)
        for way in ("whole", "chunks")
    }
    ratios = [
        ours["seconds"] / theirs["seconds"]
        for ours, theirs in zip(found[f"chunks_{few}"], found[f"whole_{few}"], strict=True)
    ]
    result = {
        "sizes": SIZES,
        "tokens_per_chunk": TOKENS_PER_CHUNK["cpu"],
        "other_busy_cores_at_start": busy_cores,
        "rounds": found,
        "peak_bytes": peaks,
        "bytes_per_token": slopes,
        "chunks_over_whole_seconds": statistics.median(ratios),
    }
    print(json.dumps({name: result[name] for name in list(result)[3:]}, indent=1))
    write_result("head", "measured-cpu", result, COMMAND)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
