"""VC-PPO: PPO with a calibrated critic, the step between PPO and VAPO.

It makes two changes to PPO: value pretraining (settings `[critic]`), and a critic whose target is
the Monte-Carlo return while the policy's advantages keep a decay of 0.95.

Source: VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118, section 4.1.
"""

from __future__ import annotations

from typing import Literal

from planish.algorithms.base import Recipe
from planish.algorithms.ppo import PpoFamilyConfig
from planish.algorithms.vapo import Vapo


class VcPpoConfig(PpoFamilyConfig):
    """Published constants of VC-PPO; `lambda_critic` is 1 by default."""

    name: Literal["vc_ppo"] = "vc_ppo"
    """Key in the table of algorithms."""


RECIPE = Recipe(VcPpoConfig, Vapo)
