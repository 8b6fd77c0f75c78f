"""Settings of the reward stage; defaults are those of DAPO.

Source: DAPO, arXiv 2503.14476, sections 2.4, 3.4 and 4.1.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from planish.base.config import Section
from planish.verifiers.shaping import check_overlong


class RewardConfig(Section):
    """How a verdict and a length become the scalar that trains."""

    reward_correct: float = Field(default=1.0)
    """Outcome of a right response. DAPO, section 2.4: 1."""
    reward_wrong: float = Field(default=-1.0)
    """Outcome of any other response. DAPO, section 2.4: -1."""
    max_response_tokens: int = Field(default=20480, ge=1)
    """Longest response that rollout generates, in tokens. DAPO, section 4.1: 16384 + 4096."""
    overlong_buffer_tokens: int = Field(default=4096, ge=0)
    """Width of the soft overlong punishment before that limit, in tokens; 0: only beyond it.
    DAPO, section 4.1: 4096."""
    overlong_penalty_factor: float = Field(default=1.0, ge=0.0)
    """Weight of the overlong punishment; 0 turns it off."""
    keep_uniform_groups: bool = False
    """Train on groups that are all right or all wrong too: true for GRPO, for algorithms with a
    critic, for the starvation policy `relax`, and for windows, whose groups finish bit by bit.
    Where advantages compare a group, such groups add nothing to the gradient but count in its
    denominators."""
    max_verifier_error_rate: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of verified rows whose verifier may fail before the whole stage fails. A response that
    takes it too long is wrong, and none of them."""
    accept_integral_decimals: bool = True
    """`5.0` equals 5."""
    verifier_timeout_seconds: float = Field(default=10.0, gt=0.0, le=600.0)
    """Limit of one mathematical comparison, or call of a verifier of your own; its child process
    is killed after it."""

    @model_validator(mode="after")
    def _check_overlong(self) -> RewardConfig:
        check_overlong(self.max_response_tokens, self.overlong_buffer_tokens)
        if self.reward_correct <= self.reward_wrong:
            raise ValueError(
                "`reward_correct` must be greater than `reward_wrong`, got "
                f"{self.reward_correct!r} and {self.reward_wrong!r}"
            )
        return self
