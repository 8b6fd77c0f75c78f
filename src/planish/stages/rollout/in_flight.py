"""Responses in the engine, step by step, with commits on the way.

A commit takes every response out of the engine, writes the changed groups, and puts unfinished
responses back in an order that depends on their state only. A killed shard therefore continues
exactly like one that was not killed: both give an empty engine the same responses. The price is one
prefill of the unfinished responses every `rollout.commit_steps` steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planish.base import telemetry
from planish.base.errors import EngineError
from planish.engines.base import BaseEngine
from planish.engines.requests import EngineState, Output, Request, Sampling
from planish.engines.sampling import request_seed
from planish.records.rollouts import ENDED, FinishReason
from planish.stages.rollout.commits import Commits
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Group, Slot

logger = logging.getLogger(__name__)


@dataclass
class _Member:
    """A response that generates now."""

    order: tuple[int, int]
    """Iteration in which its group entered, and the group's ordinal."""
    place: int
    """Index among the slots of its group."""
    num_failures: int = 0

    @property
    def ordinal(self) -> int:
        """Place of its prompt in the stream."""
        return self.order[1]


class InFlight:
    """Groups whose responses generate, and those that have ended."""

    def __init__(
        self,
        engine: BaseEngine,
        config: RolloutConfig,
        commits: Commits,
        seed: int,
    ) -> None:
        """Read the commits of the shard; nothing generates yet; `seed` is the run's."""
        self._engine, self._config, self._commits = engine, config, commits
        self._seed = seed
        self._groups: dict[int, Group] = {}
        self._members: dict[str, _Member] = {}
        self._waiting: list[_Member] = []
        self._num_open: Counter[int] = Counter()
        self._changed: set[int] = set()
        self._before = commits.read()
        self._num_steps = 0

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters, those of earlier attempts included."""
        stats = self._engine.stats()
        stats["steps"] += self._before.steps
        stats["most_rows"] = max(stats["most_rows"], self._before.most_rows)
        return stats

    @property
    def num_running(self) -> int:
        """Number of responses that the engine generates, or that wait for a free row of its
        batch.
        """
        return len(self._members) + len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Responses that generate."""
        return min(self.num_running, self._config.max_rows)

    @property
    def num_free(self) -> int:
        """Rows of the engine that no response uses or waits for; below 0 if more wait."""
        return self._config.max_rows - self.num_running

    def has(self, ordinal: int) -> bool:
        """Return True if the group has entered."""
        return ordinal in self._groups

    def group(self, ordinal: int) -> Group:
        """Return a group that has entered, as it is now."""
        return self._groups[ordinal]

    def keep(self, group: Group) -> None:
        """Replace a group by its judged version, for the next commit."""
        self._groups[group.ordinal] = group
        self._changed.add(group.ordinal)

    def enter(self, group: Group, places: Sequence[int] | None = None) -> Group | None:
        """Let responses of a group generate; a committed group goes on from its commit.

        Args:
            group: group before this iteration has generated any token.
            places: indices of the slots that generate; None is all.

        Returns:
            The group if none of these has a token left to generate, else None.
        """
        ordinal = group.ordinal
        if ordinal in self._before.groups:
            group = self._before.groups[ordinal]
        else:
            self._changed.add(ordinal)
        self._groups[ordinal] = group
        chosen = range(len(group.slots)) if places is None else places
        going = [p for p in chosen if group.slots[p].is_open and self._room(group.slots[p])]
        self._waiting += [_Member((group.drawn, ordinal), place) for place in going]
        self._num_open[ordinal] = len(going)
        return None if going else group

    def enter_committed(self) -> list[Group]:
        """Let all committed groups go on; return those with nothing left to generate."""
        groups = self._before.groups.values()
        return [group for group in groups if self.enter(group) is not None]

    def _room(self, slot: Slot) -> int:
        """Return the number of tokens that this iteration may still add to a response."""
        longest = self._config.max_response_tokens
        window = self._config.window_tokens or longest
        return min(slot.start + window, longest) - slot.num_tokens

    def advance(self) -> list[Group]:
        """Make one step of the engine; return the groups that end in it.

        Raises:
            EngineError: the engine failed as a whole.
        """
        # Responses with tokens come first, so that they keep their rows.
        self._waiting.sort(
            key=lambda member: (not self._at(member)[1].num_tokens, *member.order, member.place)
        )
        requests = []
        for member in self._waiting:
            group, slot = self._at(member)
            request = self._request(group, slot)
            self._members[request.request_id] = member
            requests.append(request)
        self._waiting = []
        if requests:
            self._engine.submit(requests)
        outputs = self._engine.poll(0.0)
        if self._engine.state is EngineState.FAILED:
            # Its outputs end early with an error; committed responses go on in the next attempt.
            faults = [output.error for output in outputs if output.error]
            raise EngineError("; ".join(faults[:1]) or "the engine failed")
        ended = self._take(outputs)
        self._num_steps += 1
        if 0 < self._config.commit_steps <= self._num_steps and self.num_running:
            self._commit()
        return ended

    def _request(self, group: Group, slot: Slot) -> Request:
        """Return the request for a response, or for its next window."""
        config = self._config
        # The ordinal tells two draws of one prompt in one iteration apart.
        key = f"{group.prompt_id}/{group.ordinal}"
        sampling = Sampling(
            max_new_tokens=self._room(slot),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request_seed(self._seed, group.drawn, key, slot.sample),
            want_routing=config.keep_routing,
        )
        return Request(
            request_id=f"{group.ordinal}-{slot.sample:03d}",
            prompt_ids=group.prompt_tokens,
            sampling=sampling,
            response_prefix=tuple(slot.tokens.tolist()),
        )

    def _at(self, member: _Member) -> tuple[Group, Slot]:
        group = self._groups[member.ordinal]
        return group, group.slots[member.place]

    def _take(self, outputs: Sequence[Output]) -> list[Group]:
        """Add outputs to their responses; return the groups with nothing left to generate."""
        ended = []
        for output in outputs:
            member = self._members.pop(output.request_id)
            if output.finish_reason in ENDED and not (
                output.num_tokens or self._at(member)[1].num_tokens
            ):
                output.error = "a response must have at least one token, got none from the engine"
                output.finish_reason = FinishReason.ABORT
            if output.error:
                member.num_failures += 1
                logger.warning(
                    "failed request=%s attempt=%d error=%s",
                    output.request_id,
                    member.num_failures - 1,
                    output.error,
                )
                if member.num_failures <= self._config.sample_retries:
                    self._waiting.append(member)
                    continue
            slot = self._extend(member, output)
            if slot.is_open and self._room(slot):
                self._waiting.append(member)
                continue
            self._num_open[member.ordinal] -= 1
            if not self._num_open[member.ordinal]:
                ended.append(self._groups[member.ordinal])
        return ended

    def _extend(self, member: _Member, output: Output) -> Slot:
        group, slot = self._at(member)
        finish = output.finish_reason
        is_cut = finish is FinishReason.LENGTH or (
            finish is FinishReason.ABORT and not output.error
        )
        if is_cut and slot.num_tokens + output.num_tokens < self._config.max_response_tokens:
            finish = FinishReason.WINDOW
        slot = slot.extended(
            output.token_ids, output.logprobs, output.versions, finish, output.routing
        )
        slots = list(group.slots)
        slots[member.place] = slot
        self._groups[member.ordinal] = replace(group, slots=tuple(slots))
        self._changed.add(member.ordinal)
        telemetry.count("planish_rollout_tokens_total", output.num_tokens)
        return slot

    def _commit(self) -> None:
        self._take(self._engine.abort(None))
        stats = self.stats()
        changed = [self._groups[ordinal] for ordinal in sorted(self._changed)]
        kept = [group for group in changed if group.slots]
        self._commits.write(kept, steps=stats["steps"], most_rows=stats["most_rows"])
        self._changed = set()
        self._num_steps = 0
