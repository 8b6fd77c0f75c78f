"""Settings of the evaluate stage; defaults are those that DAPO evaluates with.

Source: DAPO, arXiv 2503.14476, section 4.1: avg@32, temperature 1.0, top-p 0.7.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from planish.base.config import Fraction, Section
from planish.base.parallel import DeviceName
from planish.engines.config import TEMPERATURES


class EvaluateConfig(Section):
    """How accuracy on held-out prompts is measured."""

    every: NonNegativeInt = 0
    """Also measure each policy whose version is a multiple of this, in the first rollout task of
    the iteration that starts from it; 0 measures only before and after a run."""
    num_samples: int = Field(32, ge=1, le=999)
    """Responses to each prompt, n. DAPO, section 4.1: 32."""
    temperature: float = Field(1.0, ge=TEMPERATURES[0], le=TEMPERATURES[1])
    """Of the sampled responses. DAPO, section 4.1: 1."""
    top_p: float = Field(0.7, gt=0.0, le=1.0)
    """Nucleus of the sampled responses. DAPO, section 4.1: 0.7."""
    max_response_tokens: PositiveInt = 20480
    """Longest response in tokens; that of `rollout` where it is not given."""
    greedy: bool = True
    """Also take the likeliest token everywhere, once per prompt."""
    pass_at: list[int] = Field(default_factory=lambda: [1, 8, 32])
    """The k of each pass@k; those above `num_samples` are left out."""
    max_prompts: NonNegativeInt = 0
    """Evaluate only so many prompts, the first by id; 0 takes all."""
    num_resamples: int = Field(1000, ge=2)
    """Draws of the bootstrap over prompts."""
    max_rows: PositiveInt = 256
    """Responses that the engine generates at once."""
    device: DeviceName = "auto"
    """Where the model lives; `auto` takes an accelerator where there is one."""
    num_threads: PositiveInt = 1
    """torch threads on CPU; more than one hurts where cores are shared."""
    max_verifier_error_rate: Fraction = 0.01
    """Share of responses whose verifier may fail before the stage fails."""

    @field_validator("pass_at")
    @classmethod
    def _positive(cls, pass_at: list[int]) -> list[int]:
        if any(k < 1 for k in pass_at) or len(set(pass_at)) < len(pass_at):
            raise ValueError(f"must hold different numbers of at least 1, got {pass_at!r}")
        return pass_at
