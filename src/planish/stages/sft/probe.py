"""Accuracy of a policy that is being trained, measured by the run's own rollout engine."""

from __future__ import annotations

import copy

import numpy as np
import torch

from planish.engines import open_engine
from planish.engines.config import EngineConfig
from planish.engines.measure import generate_rollouts, judge
from planish.engines.requests import ModelRef, Sampling
from planish.engines.weights import DictWeights
from planish.models.experts import on_disk
from planish.models.lora import merged_weights
from planish.models.policy import Policy
from planish.records.prompts import PromptSet
from planish.stages.sft.config import SftConfig
from planish.verifiers import VerifierOptions


class Probe:
    """Measures avg@n of the present weights, by an engine with its own copy of the model.

    On an accelerator the engine lives beside the model in training: `vllm` takes
    `sft.probe_memory_share` of the device at its start and keeps it, or refuses to start if less
    is free.
    """

    def __init__(
        self,
        policy: Policy,
        config: SftConfig,
        engine: EngineConfig,
        *,
        run_seed: int,
        dtype: torch.dtype,
        judging: VerifierOptions | None = None,
    ) -> None:
        """Start the engine of rollouts and evaluation.

        Each measurement reads the weights of `policy` anew, in `dtype`, the dtype of its files.

        Raises:
            ConfigError: the engine is not installed, or does not support this device.
            EngineError: the engine can not serve this model, or has too little memory.
        """
        twin = Policy(copy.deepcopy(policy.model).to(dtype), policy.tokenizer, policy.version)
        self._policy, self._config, self._run_seed = policy, config, run_seed
        if engine.name == "vllm":
            engine = engine.model_copy(update={"memory_share": config.probe_memory_share})
        # Ranks elsewhere read exported policies only, but these weights are in memory.
        engine = engine.model_copy(update={"peers": ()})
        options = {"max_rows": config.max_rows, "device": str(policy.model.device)}
        self._engine = open_engine(engine, ModelRef(policy=twin), **options)
        self._count = policy.version
        self._judging = judging or VerifierOptions()

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
        model_config = model.config.to_dict()
        # A policy folder has a tied head only once, as the embedding.
        left_out = {"lm_head.weight"} if model_config.get("tie_word_embeddings") else set()
        tensors = {n: t for n, t in merged_weights(model).items() if n not in left_out}
        self._engine.update_weights(DictWeights(on_disk(tensors, model_config)), self._count)
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
        return float(np.mean([v.accuracy for v in judge(rollouts, self._judging)]))

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
