"""Settings of the reward stage; defaults are those of DAPO.

Source: DAPO, arXiv 2503.14476, sections 2.4, 3.4 and 4.1.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from planish.base.config import Fraction, Needs, Section, Wanted, setting
from planish.verifiers.shaping import check_overlong


class RewardFunction(Section):
    """A function whose score counts besides that of the row's verifier; a text is a name alone."""

    name: str
    """Any verifier: a built-in one, `package.module:function`, or an entry point."""
    weight: float = 1.0
    """Addition to the reward for a score of 1; it may be negative."""

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else raw


class RewardConfig(Section):
    """How a verdict and a length become the scalar that trains."""

    reward_correct: float = 1.0
    """Outcome of a right response. DAPO, section 2.4: 1."""
    reward_wrong: float = -1.0
    """Outcome of any other response. DAPO, section 2.4: -1."""
    max_response_tokens: PositiveInt = setting(
        20480,
        Needs(
            "rollout.max_response_tokens",
            Wanted.SAME,
            "the penalty for overlong responses begins before that limit",
            when=Wanted.ANY,
        ),
    )
    """Longest response that rollout generates, in tokens; that of `rollout` where it is not given.
    DAPO, section 4.1: 16384 + 4096."""
    overlong_buffer_tokens: NonNegativeInt = 4096
    """Width of the soft overlong punishment before that limit, in tokens; 0: only beyond it.
    DAPO, section 4.1: 4096."""
    overlong_penalty_factor: NonNegativeFloat = 1.0
    """Weight of the overlong punishment; 0 turns it off."""
    functions: list[RewardFunction] = setting([], quiet="functions")
    """Further functions, `[{name = "my.module:format", weight = 0.2}]`: each score times its weight
    is added to the outcome of the row's verifier, which alone makes accuracy."""
    keep_uniform_groups: bool = False
    """Train on groups too whose scores are all equal, such as all right or all wrong: true for
    GRPO, for algorithms with a critic, for the starvation policy `relax`, and for windows, whose
    groups finish bit by bit. Where advantages compare a group, such groups add nothing to the
    gradient but count in its denominators."""
    max_verifier_error_rate: Fraction = 0.01
    """Largest share of verified rows on which the verifier itself may fail; above it the stage
    fails. A time-out on a response does not count: it makes the response wrong."""
    accept_integral_decimals: bool = True
    """Accept `5.0` as 5."""
    verifier_timeout_seconds: float = Field(10.0, gt=0.0, le=600.0)
    """Longest duration of one mathematical comparison, or of one call of your own verifier; after
    it the child process is killed."""
    answer_after: str = setting("auto", quiet="answer_after", min_length=1)
    """Text behind whose last place a response is judged, such as `</think>`; without it there is
    no answer. `auto`: behind the end of a thought where the prompt or the response opens one."""

    @model_validator(mode="after")
    def _check_overlong(self) -> RewardConfig:
        check_overlong(self.max_response_tokens, self.overlong_buffer_tokens)
        if self.reward_correct <= self.reward_wrong:
            raise ValueError(
                "`reward_correct` must be greater than `reward_wrong`, got "
                f"{self.reward_correct!r} and {self.reward_wrong!r}"
            )
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise ValueError(f"`functions` must have different names, got {names}")
        return self
