"""Generate and judge groups with one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.engines.base import BaseEngine
from planish.engines.requests import FinishReason, Output, Request, Sampling
from planish.engines.sampling import request_seed
from planish.models.tokens import Tokenizer
from planish.records.prompts import PromptSet
from planish.records.stream import position
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Group
from planish.verifiers import verify_many

logger = logging.getLogger(__name__)


def request_id(ordinal: int, sample: int) -> str:
    """Return the id of the request for one response; unique within a shard."""
    return f"{ordinal}-{sample:03d}"


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
        requests = [r for draft in drafts for r in self._requests(draft)]
        outputs = self.generate(requests)
        return [self._judge(draft, outputs) for draft in drafts]

    def draft(self, ordinal: int) -> Group:
        """Return the group of an ordinal before anything is generated.

        Raises:
            ConfigError: prompt and response do not fit in the model.
        """
        row = position(ordinal, self._prompts.num_rows, self._seed)
        tokens = tuple(self._tokenizer.encode_prompt(self._prompts.messages[row]))
        draft = Group(ordinal, row, tokens, ())
        if not self.is_too_long(draft):
            self.check_room(tokens, self._prompts.prompt_id[row])
        return draft

    def is_too_long(self, draft: Group) -> bool:
        """Tell whether the prompt is beyond the limit, so that its group is dropped."""
        return len(draft.prompt_tokens) > self._config.max_prompt_tokens

    def check_room(self, prompt_tokens: Sequence[int], prompt_id: str) -> None:
        """Refuse a prompt that leaves no room for the longest response.

        Raises:
            ConfigError: prompt and response do not fit in the model.
        """
        limit = self._engine.capabilities.max_model_len
        if len(prompt_tokens) + self._config.max_response_tokens > limit:
            raise ConfigError(
                f"prompt and response must fit in the model's {limit} tokens, got "
                f"{len(prompt_tokens)} + `rollout.max_response_tokens` = "
                f"{self._config.max_response_tokens} for prompt {prompt_id}; "
                "lower it, lower `rollout.max_prompt_tokens`, or use a model with a longer context"
            )

    def _requests(self, draft: Group) -> list[Request]:
        if self.is_too_long(draft):
            return []
        prompt_id = self._prompts.prompt_id[draft.prompt]
        return [
            self.request(draft.ordinal, sample, prompt_id, draft.prompt_tokens)
            for sample in range(self._config.group_size)
        ]

    def request(
        self,
        ordinal: int,
        sample: int,
        prompt_id: str,
        prompt_tokens: tuple[int, ...],
        *,
        prefix: tuple[int, ...] = (),
        max_new_tokens: int = 0,
        drawn: int = 0,
    ) -> Request:
        """Return the request for one response, or for its next window.

        Args:
            ordinal: place of the prompt in the stream.
            sample: position in the group.
            prompt_id: of the prompt.
            prompt_tokens: of the prompt.
            prefix: response tokens of earlier windows.
            max_new_tokens: budget; 0 is that of a whole response.
            drawn: iteration in which the group entered; 0 is this one.
        """
        config = self._config
        # the ordinal tells two draws of one prompt in one iteration apart
        key = f"{prompt_id}/{ordinal}"
        sampling = Sampling(
            max_new_tokens=max_new_tokens or config.max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request_seed(self._seed, drawn or self._iteration, key, sample),
        )
        return Request(request_id(ordinal, sample), str(ordinal), prompt_tokens, sampling, prefix)

    def generate(self, requests: Sequence[Request]) -> dict[str, Output]:
        """Return outputs by request id; failed ones are tried again.

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
            left = [r for r in left if done[r.request_id].finish_reason is FinishReason.ERROR]
            for request in left:
                logger.warning(
                    "failed request=%s attempt=%d error=%s",
                    *(request.request_id, attempt, done[request.request_id].stats.get("error")),
                )
        return done

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens."""
        return self._tokenizer.decode(tokens)

    def _judge(self, draft: Group, outputs: dict[str, Output]) -> Group:
        ids = [request_id(draft.ordinal, s) for s in range(self._config.group_size)]
        mine = tuple(outputs[i] for i in ids if i in outputs)
        good = (FinishReason.STOP, FinishReason.LENGTH)
        if len(mine) < len(ids) or any(o.finish_reason not in good for o in mine):
            return replace(draft, outputs=mine)
        texts = tuple(self._tokenizer.decode(output.token_ids) for output in mine)
        answer = self._prompts.answer[draft.prompt]
        verifier = self._prompts.verifier[draft.prompt]
        verdicts = verify_many([(verifier, text, answer) for text in texts])
        return replace(
            draft,
            outputs=mine,
            responses=texts,
            accuracy=tuple(verdict.accuracy for verdict in verdicts),
            num_verifier_errors=sum(verdict.error for verdict in verdicts),
        )
