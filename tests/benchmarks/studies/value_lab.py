"""What the studies of the critic share: a policy, states, and their exact values by sampling.

A state is a prompt with the first tokens of a response. Its value is the chance that the policy
goes on from there to a right answer, and is measured by going on many times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planish.algorithms.base import TrainBatch
from planish.base.config import parse_section, resolve_config
from planish.engines import open_engine
from planish.engines.config import EngineConfig
from planish.engines.measure import generate_rollouts
from planish.engines.requests import FinishReason as EngineFinish
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.sampling import request_seed
from planish.engines.weights import DictWeights
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_set
from planish.records.prompts import PromptSet
from planish.records.ragged import Ragged
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.rollout.config import RolloutConfig
from planish.stages.train.batching import train_batch
from planish.stages.train.config import TrainConfig
from tests.benchmarks.studies.arms import RUNS, Arm, base_root
from tests.benchmarks.studies.reading import Run
from tests.benchmarks.studies.runner import BASE, write_json

TASK = "value_chain"
START = Arm(TASK, BASE)
"""Makes prompts and the policy of a seed; runs no iteration."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """A prompt with the beginning of a response."""

    prompt: int
    """Row of the held-out prompts."""
    prompt_tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    """Response tokens so far."""
    place: float
    """Share of its response that lies before it, 0 to 1."""


@dataclass(frozen=True)
class Futures:
    """What became of states: `n` continuations of each, state by state."""

    rollouts: RolloutSet
    """Whole responses, prefix included; one group a state."""
    rewards: RewardSet

    def returns(self) -> Floats:
        """Return the rewards, [states, n]."""
        return self.rewards.reward.reshape(self.rollouts.num_groups, -1).astype(np.float64)

    def values(self) -> Floats:
        """Return the mean reward of each state."""
        means: Floats = self.returns().mean(1)
        return means

    def noise(self) -> Floats:
        """Return the variance of each mean: what sampling adds to every squared error."""
        found = self.returns()
        noise: Floats = found.var(1, ddof=1) / found.shape[1]
        return noise

    def batch(self) -> TrainBatch:
        """Return the responses as trainers take them."""
        return train_batch(self.rollouts, self.rewards)


class Lab:
    """The policy of one seed in an engine, with its prompts and settings."""

    def __init__(self, run: Run) -> None:
        self.seed = int(run.raw["seed"])
        self.pin = str(run.raw["policy_pin"])
        self.tables = resolve_config(START.definition(self.seed)["tables"])
        self.rollout = parse_section(RolloutConfig, self.tables["rollout"], section="rollout")
        self.train = parse_section(TrainConfig, self.tables["train"], section="train")
        self.reward = parse_section(RewardConfig, self.tables["reward"], section="reward")
        root = base_root(TASK, self.seed).as_uri()
        self.prompts = read_set(PromptSet, layout.prompts(root))
        self.held_out = read_set(PromptSet, layout.evaluation_prompts(root))
        self.tokenizer = load_policy(self.pin).tokenizer
        self.engine = open_engine(EngineConfig(), ModelRef(pin=self.pin), max_rows=512)
        torch.set_num_threads(1)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def follow(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Sample with other weights from now on."""
        self.engine.update_weights(
            DictWeights({name: tensor.detach() for name, tensor in weights.items()}), version
        )

    def respond(self, prompts: PromptSet, num_samples: int, stream: int) -> RolloutSet:
        """Sample responses; another `stream` gives others."""
        return generate_rollouts(
            self.engine,
            self.tokenizer,
            prompts,
            num_samples=num_samples,
            sampling=Sampling(max_new_tokens=self.rollout.max_response_tokens),
            run_seed=1000 * self.seed + stream,
        )

    def rollout_batch(self, number: int) -> TrainBatch:
        """Sample one rollout batch from the training prompts."""
        rng = np.random.default_rng([self.seed, number])
        count = self.rollout.prompts_per_iteration
        rows = rng.choice(self.prompts.num_rows, count, replace=False).tolist()
        found = self.respond(self.prompts.take(rows), self.rollout.group_size, 1 + number)
        return train_batch(found, score(found, self.reward).rewards)

    def continue_all(self, states: Sequence[State], count: int, stream: int) -> Futures:
        """Go on `count` times from each state, and judge the whole responses."""
        requests = []
        for index, state in enumerate(states):
            left = self.rollout.max_response_tokens - len(state.prefix)
            for sample in range(count):
                seed = request_seed(self.seed, stream, f"state {index}", sample)
                requests.append(
                    Request(
                        request_id=f"{index}-{sample}",
                        group_id=str(index),
                        prompt_ids=state.prompt_tokens,
                        sampling=Sampling(max_new_tokens=left, seed=seed),
                        response_prefix=state.prefix,
                    )
                )
        outputs = self.engine.generate(requests)
        prefixes = [state.prefix for state in states for _ in range(count)]
        responses = [
            [*prefix, *output.token_ids] for prefix, output in zip(prefixes, outputs, strict=True)
        ]
        ended = [output.finish_reason is EngineFinish.STOP for output in outputs]
        rollouts = self._as_rollouts(states, count, responses, ended)
        return Futures(rollouts, score(rollouts, self.reward).rewards)

    def _as_rollouts(
        self, states: Sequence[State], count: int, responses: list[list[int]], ended: list[bool]
    ) -> RolloutSet:
        rows = [state.prompt for state in states for _ in range(count)]
        tokens = Ragged.from_lists(responses, np.int32)
        samples = np.tile(np.arange(count, dtype=np.int32), len(states))
        return RolloutSet(
            group_index=np.repeat(np.arange(len(states), dtype=np.int32), count),
            sample_index=samples,
            prompt_tokens=Ragged.from_lists([s.prompt_tokens for s in states], np.int32),
            response_tokens=tokens,
            rollout_logprobs=Ragged(np.zeros(len(tokens.values), np.float32), tokens.offsets),
            policy_version=Ragged(np.zeros(len(tokens.values), np.int32), tokens.offsets),
            window_start=np.zeros(len(responses), np.int32),
            finish=np.where(ended, FinishReason.STOP, FinishReason.LENGTH).astype(np.int8),
            rollout_id=[f"{i:06d}" for i in range(len(responses))],
            prompt_id=[self.held_out.prompt_id[row] for row in rows],
            response=[self.tokenizer.decode(response) for response in responses],
            answer=[self.held_out.answer[row] for row in rows],
            verifier=[self.held_out.verifier[row] for row in rows],
        )

    def states_of(
        self, rollouts: RolloutSet, prompts: Sequence[int], places: Callable[[int, int], list[int]]
    ) -> list[State]:
        """Cut responses into states.

        Args:
            rollouts: one response to each of `prompts`.
            prompts: rows of the held-out prompts.
            places: gives the numbers of prefix tokens for (row, response length).
        """
        found = []
        for row, prompt in enumerate(prompts):
            tokens = tuple(int(t) for t in rollouts.response_tokens.row(row))
            given = tuple(int(t) for t in rollouts.prompt_tokens.row(row))
            for cut in places(row, len(tokens)):
                place = cut / max(1, len(tokens) - 1)
                found.append(State(prompt, given, tokens[:cut], place))
        return found


def values_folder() -> Path:
    """Return where measurements and critics are kept."""
    return Path(RUNS) / TASK / "values"


def remembered(name: str, run: Run, definition: Any, measure: Callable[[Run], Any]) -> Any:
    """Return a measurement, from its file where it was made with the same definition and policy."""
    path = values_folder() / f"{name}-seed{run.raw['seed']}.json"
    asked = json.loads(json.dumps([definition, run.raw["policy_pin"]]))
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        if found["definition"] == asked:
            return found["measured"]
    measured = measure(run)
    write_json(path, {"definition": asked, "measured": measured})
    return measured
