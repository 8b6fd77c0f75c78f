"""Accuracy of a policy that is being trained, measured by a rollout engine on a copy of it."""

from __future__ import annotations

import copy

import numpy as np

from planish.engines.measure import generate_rollouts, judge
from planish.engines.requests import ModelRef, Sampling
from planish.engines.transformers.engine import TransformersEngine
from planish.engines.weights import DictWeights
from planish.models.experts import on_disk
from planish.models.policy import Policy
from planish.records.prompts import PromptSet
from planish.stages.sft.config import SftConfig
from planish.verifiers import VerifierOptions


class Probe:
    """Measures avg@n of the present weights; holds an engine with its own copy of the model."""

    def __init__(self, policy: Policy, config: SftConfig, run_seed: int) -> None:
        twin = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.version)
        self._policy, self._config, self._run_seed = policy, config, run_seed
        # The policy is in memory only, so the engine that takes one over is the one to use.
        self._engine = TransformersEngine(max_rows=config.max_rows, device=str(policy.model.device))
        self._engine.start(ModelRef(policy=twin))
        self._count = policy.version

    def accuracy(
        self,
        prompts: PromptSet,
        *,
        num_samples: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> float:
        """Return avg@`num_samples` on `prompts`; temperature 0 is greedy."""
        self._count += 1
        model = self._policy.model
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        weights = DictWeights(on_disk(tensors, model.config.to_dict()))
        self._engine.update_weights(weights, self._count)
        sampling = Sampling(
            max_new_tokens=self._config.max_response_tokens,
            temperature=temperature,
            top_p=top_p,
        )
        rollouts = generate_rollouts(
            self._engine,
            self._policy.tokenizer,
            prompts,
            num_samples=num_samples,
            sampling=sampling,
            run_seed=self._run_seed,
        )
        return float(np.mean([v.accuracy for v in judge(rollouts, VerifierOptions())]))

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
