"""A tiny run for tests: a policy, rollouts of two shards, their rewards and run.json."""

import json
from dataclasses import dataclass

import numpy as np
import torch

from planish import store
from planish.base.config import config_sha256
from planish.models.config import ModelConfig
from planish.models.logprobs import TokenScorer
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import write_set
from planish.records.ragged import Ragged
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.run.stage import PathArtifact
from planish.stages.train.batching import Movement, share_rows, split_minibatches, train_batch
from planish.stages.train.stage import run
from planish.stages.train.trainer import STILL_ROWS
from tests.unit.records.samples import build_rollouts

TINY = {
    "learning_rate": 5e-4,
    "warmup_iterations": 0,
    "weight_decay": 0.0,
    "rollouts_per_minibatch": 8,
    "tokens_per_microbatch": 128,
    "device": "cpu",
}

TINY_CRITIC = {
    "head_std": 0.3,
    "learning_rate": 2e-3,
    "warmup_iterations": 0,
    "pretrain_iterations": 0,
}
"""A head whose first values are far from 0, so that a lost one would be seen."""


@dataclass
class TinyRun:
    root: str
    config: dict
    digest: str
    policy: object
    policy_pin: str
    num_shards: int = 2


def tiny_config(algorithm="dapo", **train):
    return {
        "run": {"seed": 7},
        "rollout": {"temperature": 1.0},
        "algorithm": {"name": algorithm},
        "critic": TINY_CRITIC,
        "train": {**TINY, **train},
    }


def start_run(root, config=None, **model):
    config = config or tiny_config()
    digest = config_sha256(config)
    store.write(layout.run_file(root), json.dumps({"config": config}).encode())
    sizes = {"num_layers": 2, "hidden_size": 32, "head_dim": 16, **model}
    policy = build_policy(ModelConfig(**sizes), seed=3)
    ref = save_policy(
        layout.policy(root, 0), policy, version=0, parents={},
        attributes={"config_sha256": digest},
    )  # fmt: skip
    return TinyRun(root, config, digest, policy, ref.pin())


def random_rollouts(policy, seed, *, num_groups=4, group_size=4, vocab=None, experts=None):
    """Random token sequences whose log-probabilities are the policy's own.

    Each token is given a random pair of `experts`, of each of two layers; None is no column.
    """
    # Log-probabilities depend on the threads; a trainer has as many from its start on.
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    rows = num_groups * group_size
    vocab = vocab or policy.tokenizer.vocab_size
    prompts = [rng.integers(4, vocab, rng.integers(3, 9)) for _ in range(num_groups)]
    responses = [rng.integers(4, vocab, rng.integers(1, 20)) for _ in range(rows)]
    groups = np.repeat(np.arange(num_groups), group_size)
    scorer = TokenScorer(policy.model)
    logprobs = []
    for row in range(rows):
        ids = torch.tensor(np.concatenate([prompts[groups[row]], responses[row]]))[None]
        select = torch.zeros_like(ids, dtype=torch.bool)
        select[0, len(prompts[groups[row]]) :] = True
        with torch.no_grad():
            logprobs.append(scorer(ids, None, select, 1.0)[0].numpy())
    ids = [f"{int(rng.integers(1 << 60)):016x}" for _ in range(num_groups)]
    routing = None
    if experts:
        sizes = [len(prompts[g]) + len(r) for g, r in zip(groups, responses, strict=True)]
        pairs = [rng.permuted(np.tile(np.arange(experts), (2 * n, 1)), axis=1) for n in sizes]
        routing = Ragged.from_lists([pair[:, :2].flatten() for pair in pairs], np.int8)
    return build_rollouts(
        prompts,
        responses,
        rollout_logprobs=Ragged.from_lists(logprobs, np.float32),
        finish=rng.choice([FinishReason.STOP, FinishReason.LENGTH], rows),
        prompt_id=[ids[g] for g in groups],
        routing=routing,
        experts_per_token=np.full(rows, 2, np.int32) if experts else None,
    )


def rewards_for(rollouts, seed, *, keep=None):
    """Accuracies that are right and wrong in every group, and a small length penalty."""
    rng = np.random.default_rng(seed)
    rows = rollouts.num_rows
    accuracy = rng.integers(0, 2, rows).astype(np.float32)
    for group in range(rollouts.num_groups):
        members = np.flatnonzero(rollouts.group_index == group)[:2]
        accuracy[members] = [0, 1][: len(members)]
    outcome = (2 * accuracy - 1).astype(np.float32)
    penalty = (-0.25 * (rollouts.finish == FinishReason.LENGTH)).astype(np.float32)
    return RewardSet(
        accuracy=accuracy,
        outcome=outcome,
        length_penalty=penalty,
        reward=outcome + penalty,
        has_reward=np.ones(rows, bool),
        keep=np.ones(rows, bool) if keep is None else keep,
        extracted=["1"] * rows,
    )


def add_iteration(
    tiny, iteration, *, keep_none=False, num_groups=4, experts=None, change=lambda made: made
):
    """Write rollouts and rewards of one iteration; returns the Ref of the rewards."""
    sets, parents = [], {}
    facts = {"config_sha256": tiny.digest, "iteration": iteration}
    for shard in range(tiny.num_shards):
        made = random_rollouts(
            tiny.policy, 100 * iteration + shard, num_groups=num_groups, experts=experts
        )
        made = change(made)
        start = (iteration - 1) * 2 * num_groups
        consumed = [start + shard + tiny.num_shards * k for k in range(num_groups)]
        ref = write_set(
            layout.rollouts(tiny.root, iteration, shard), made, parents={},
            attributes={**facts, "consumed": consumed},
        )  # fmt: skip
        sets.append(made)
        parents[f"rollouts-{shard:02d}"] = ref.manifest_sha256
    joined = RolloutSet.concat(sets)
    keep = np.zeros(joined.num_rows, bool) if keep_none else None
    rewards = rewards_for(joined, iteration, keep=keep)
    return write_set(
        layout.rewards(tiny.root, iteration), rewards, parents=parents, attributes=facts
    )


def artifact(folder, name, ref=None):
    path = folder / name
    if ref is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ref.to_json())
    return PathArtifact(str(path))


def train_once(tiny, iteration, state_pin, rewards, folder):
    """Run the train stage; returns the pin of the new state."""
    result = run(
        tiny.root, tiny.digest, iteration, 0, tiny.num_shards, tiny.policy_pin, state_pin,
        artifact(folder, "rewards", rewards), artifact(folder, "state"),
        artifact(folder, "metrics"),
    )  # fmt: skip
    return result.state_pin


def own_batch(rollouts, rewards, config, grid, seed=(7, 1)):
    """Return the rows of a train batch that a rank of a grid has."""
    count = int(rewards.keep.sum())
    parts = split_minibatches(count, config.rollouts_per_minibatch, 1, seed=seed)
    share = share_rows(rollouts, rewards, parts, grid, "cpu")
    return train_batch(rollouts, rewards, share=share)


def split_rows(batch, **options):
    """Return the rows of a mini-batch that have a gradient, and those that have none."""
    return Movement(batch, **options).split(np.arange(len(batch)), STILL_ROWS)
