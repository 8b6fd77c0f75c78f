"""VC-PPO: PPO with a calibrated critic, the step between PPO and VAPO.

Two changes to PPO: value pretraining, which is `[critic]`, and a critic whose target is the
Monte-Carlo return while the policy's advantages keep a decay of 0.95.

Source: VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118, section 4.1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.algorithms.base import Recipe
from planish.algorithms.losses import Aggregation
from planish.algorithms.vapo import ActorCriticConfig, Vapo


class VcPpoConfig(ActorCriticConfig):
    """Published constants of VC-PPO; a critic's decay of 1 is the shared default."""

    name: Literal["vc_ppo"] = "vc_ppo"
    """Key in the table of algorithms."""
    lambda_alpha: float = Field(default=0.0, ge=0.0)
    """0: the policy's decay is 0.95 at every length."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Symmetric clip."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Every response weighs the same, whatever its length."""
    positive_coefficient: float = Field(default=0.0, ge=0.0)
    """No language-model loss on correct responses."""


RECIPE = Recipe(VcPpoConfig, Vapo)
