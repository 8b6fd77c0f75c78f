"""Generate and judge groups with one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from planish.base.errors import ConfigError
from planish.engines.base import BaseEngine
from planish.models.headers import room_fault
from planish.models.tokens import Tokenizer
from planish.records.prompts import PromptSet
from planish.records.rollouts import ENDED
from planish.records.stream import position
from planish.stages.rollout.commits import Commits
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Group, Slot, judged
from planish.stages.rollout.in_flight import InFlight
from planish.stages.rollout.progress import SamplingProgress
from planish.stages.rollout.sampler import LookAhead, qualifies
from planish.verifiers.judging import Judging


class GroupSampler:
    """Turns ordinals of the prompt stream into judged groups."""

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        prompts: PromptSet,
        config: RolloutConfig,
        commits: Commits,
        *,
        seed: int,
        iteration: int,
        judging: Judging,
    ) -> None:
        """Bind the parts; `seed` is the run's."""
        self._judging = judging
        self._engine, self._tokenizer, self._prompts = engine, tokenizer, prompts
        self._config, self._seed, self._iteration = config, seed, iteration
        self.flight = InFlight(engine, config, commits, seed)
        self._judged: dict[int, Group] = {}
        self._progress = SamplingProgress(0)
        self._num_kept = self._num_dropped = 0

    def go_on(self, goal: int) -> None:
        """Let all groups go on that an earlier attempt has committed, towards `goal` groups."""
        self._progress = SamplingProgress(goal)
        self._judge(self.flight.enter_committed())

    def __call__(self, ordinals: Sequence[int], ahead: LookAhead) -> list[Group]:
        """Return one group per ordinal of a round; groups of the next round take free rows."""
        self._enter(ordinals)
        left = {ordinal for ordinal in ordinals if ordinal not in self._judged}
        ended = [self._judged[ordinal] for ordinal in ordinals if ordinal not in left]
        upcoming = self._upcoming(ahead, ended)
        while left:
            while upcoming and self.flight.num_free > 0:
                self._enter([upcoming.popleft()])
            done = self._judge(self.flight.advance())
            if done:
                ended += [group for group in done if group.ordinal in left]
                left -= {group.ordinal for group in done}
                upcoming = self._upcoming(ahead, ended)
            self._progress.look(
                kept=self._num_kept,
                dropped=self._num_dropped,
                num_rows=self.flight.num_rows,
                stats=self._engine.stats,
            )
        return [self._judged.pop(ordinal) for ordinal in ordinals]

    def _upcoming(self, ahead: LookAhead, ended: Sequence[Group]) -> deque[int]:
        """Return the ordinals of the next round whose groups may start now.

        `ended` are the finished groups of the current round.
        """
        wanted = ahead.ordinals[: ahead.num_wanted(ended)]
        return deque(ordinal for ordinal in wanted if not self.flight.has(ordinal))

    def _enter(self, ordinals: Sequence[int]) -> None:
        for ordinal in ordinals:
            if not self.flight.has(ordinal):
                ended = self.flight.enter(self.draft(ordinal))
                self._judge([ended] if ended else [])

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
            extra=prompts.extra[row] if prompts.extra else "",
            slots=tuple(Slot(sample) for sample in range(count)),
        )
        if group.slots:
            self.check_room(group)
        return group

    def check_room(self, group: Group) -> None:
        """Refuse a prompt that leaves no room for the longest response in the model."""
        fault = room_fault(
            self._engine.max_model_len,
            len(group.prompt_tokens),
            self._config.max_response_tokens,
            "rollout.max_response_tokens",
        )
        if fault:
            raise ConfigError(f"{fault} (prompt {group.prompt_id})")

    def text_of(self, group: Group, slot: Slot) -> str:
        """Return the text of a response, after the mark of a thought if its prompt opens one."""
        opened = self._tokenizer.opened_thought(group.prompt_tokens)
        return opened + self._tokenizer.decode(slot.tokens.tolist())

    def _judge(self, ended: Sequence[Group]) -> list[Group]:
        """Return groups; those whose responses have all ended get texts and verdicts."""
        result = []
        for group in ended:
            is_whole = all(slot.finish in ENDED for slot in group.slots)
            if is_whole and len(group.verdicts) < len(group.slots):
                slots = [replace(slot, text=self.text_of(group, slot)) for slot in group.slots]
                (group,) = judged([replace(group, slots=tuple(slots))], self._judging)
                self.flight.keep(group)
            result.append(group)
        num_kept = sum(qualifies(group, self._config) for group in result)
        self._num_kept += num_kept
        self._num_dropped += len(result) - num_kept
        self._judged.update((group.ordinal, group) for group in result)
        return result
