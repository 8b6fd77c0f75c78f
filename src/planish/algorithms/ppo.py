"""PPO with a critic, the baseline from which VAPO starts; it has none of VAPO's seven changes.

Source: PPO, arXiv 1707.06347, section 3; VAPO, arXiv 2504.05118, section 5.1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.algorithms.base import Recipe
from planish.algorithms.losses import Aggregation
from planish.algorithms.vapo import ActorCriticConfig, Vapo


class PpoFamilyConfig(ActorCriticConfig):
    """Constants that PPO and VC-PPO share; `lambda_policy` is 0.95 by default."""

    lambda_alpha: float = Field(default=0.0, ge=0.0)
    """0: the policy's decay is `lambda_policy` for every length."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """The upper clip of the ratio is 1 + clip_high; here it equals the lower clip."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Every response has the same weight, whatever its length."""
    positive_coefficient: float = Field(default=0.0, ge=0.0)
    """0: there is no language-model loss on correct responses."""


class PpoConfig(PpoFamilyConfig):
    """Constants of the baseline."""

    name: Literal["ppo"] = "ppo"
    """Key in the table of algorithms."""
    lambda_critic: float = Field(default=0.95, ge=0.0, le=1.0)
    """Decay of the critic's target, equal to the policy's decay."""


RECIPE = Recipe(PpoConfig, Vapo)
