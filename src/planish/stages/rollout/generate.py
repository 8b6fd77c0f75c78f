"""Generate and judge groups with one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.engines.base import BaseEngine
from planish.engines.requests import Output, Request, Sampling
from planish.engines.sampling import request_seed
from planish.models.tokens import Tokenizer
from planish.records.prompts import PromptSet
from planish.records.stream import position
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import ENDED, Group, Slot
from planish.verifiers import verify_many

logger = logging.getLogger(__name__)


class GroupSampler:
    """Turns ordinals of the prompt stream into judged groups."""

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        prompts: PromptSet,
        config: RolloutConfig,
        *,
        seed: int,
        iteration: int,
    ) -> None:
        """Bind the parts; `seed` is the run's."""
        self._engine, self._tokenizer, self._prompts = engine, tokenizer, prompts
        self._config, self._seed, self._iteration = config, seed, iteration

    def __call__(self, ordinals: Sequence[int]) -> list[Group]:
        """Return one group per ordinal, in order.

        Raises:
            ConfigError: prompt and response do not fit in the model.
            EngineError: the engine failed as a whole.
        """
        drafts = [self.draft(ordinal) for ordinal in ordinals]
        budget = self._config.max_response_tokens
        requests = [self.request(group, slot, budget) for group in drafts for slot in group.slots]
        outputs = iter(self.generate(requests))
        return [self._judge(draft, [next(outputs) for _ in draft.slots]) for draft in drafts]

    def draft(self, ordinal: int) -> Group:
        """Return the group of an ordinal before anything is generated.

        A prompt that is longer than the limit gets no slots, and its group is dropped.

        Raises:
            ConfigError: prompt and response do not fit in the model.
        """
        prompts, config = self._prompts, self._config
        row = position(ordinal, prompts.num_rows, self._seed)
        tokens = tuple(self._tokenizer.encode_prompt(prompts.messages[row]))
        count = config.group_size if len(tokens) <= config.max_prompt_tokens else 0
        group = Group(
            ordinal=ordinal,
            drawn=self._iteration,
            prompt_id=prompts.prompt_id[row],
            prompt_tokens=tokens,
            answer=prompts.answer[row],
            verifier=prompts.verifier[row],
            slots=tuple(Slot(sample) for sample in range(count)),
        )
        if group.slots:
            self.check_room(group)
        return group

    def check_room(self, group: Group) -> None:
        """Refuse a prompt that leaves no room for the longest response.

        Raises:
            ConfigError: prompt and response do not fit in the model.
        """
        limit = self._engine.capabilities.max_model_len
        if len(group.prompt_tokens) + self._config.max_response_tokens > limit:
            raise ConfigError(
                f"prompt and response must fit in the model's {limit} tokens, got "
                f"{len(group.prompt_tokens)} + `rollout.max_response_tokens` = "
                f"{self._config.max_response_tokens} for prompt {group.prompt_id}; "
                "lower it, lower `rollout.max_prompt_tokens`, or use a model with a longer context"
            )

    def request(self, group: Group, slot: Slot, max_new_tokens: int) -> Request:
        """Return the request for one response, or for its next window of at most so many tokens."""
        config = self._config
        # the ordinal tells two draws of one prompt in one iteration apart
        key = f"{group.prompt_id}/{group.ordinal}"
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request_seed(self._seed, group.drawn, key, slot.sample),
        )
        return Request(
            request_id=f"{group.ordinal}-{slot.sample:03d}",
            group_id=str(group.ordinal),
            prompt_ids=group.prompt_tokens,
            sampling=sampling,
            response_prefix=tuple(slot.tokens.tolist()),
        )

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the output of each request, in order; failed ones are tried again.

        Raises:
            EngineError: the engine failed as a whole.
        """
        done: dict[str, Output] = {}
        left = list(requests)
        for attempt in range(1 + self._config.sample_retries):
            if not left:
                break
            outputs = self._engine.generate(left)
            telemetry.count("planish_rollout_tokens_total", sum(len(o.token_ids) for o in outputs))
            done.update((o.request_id, o) for o in outputs)
            left = [request for request in left if done[request.request_id].error]
            for request in left:
                error = done[request.request_id].error
                logger.warning(
                    "failed request=%s attempt=%d error=%s", request.request_id, attempt, error
                )
        return [done[request.request_id] for request in requests]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens."""
        return self._tokenizer.decode(tokens)

    def _judge(self, draft: Group, outputs: Sequence[Output]) -> Group:
        """Fill in the responses, and the verdicts on them where all are there."""
        is_complete = bool(outputs) and all(o.finish_reason in ENDED for o in outputs)
        group = replace(
            draft,
            slots=tuple(
                slot.extended(
                    output.token_ids,
                    output.logprobs,
                    output.versions,
                    output.finish_reason,
                    self.decode(output.token_ids) if is_complete else "",
                )
                for slot, output in zip(draft.slots, outputs, strict=True)
            ),
        )
        if not is_complete:
            return group
        verdicts = verify_many([(group.verifier, slot.text, group.answer) for slot in group.slots])
        return replace(
            group,
            num_right=sum(verdict.accuracy > 0 for verdict in verdicts),
            num_verifier_errors=sum(verdict.error for verdict in verdicts),
        )
