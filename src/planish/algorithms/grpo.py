"""GRPO, as the baseline of DAPO: symmetric clip and a loss averaged within each response first.

The KL penalty to a reference policy is off by default, as in the baseline that DAPO compares with.
The GRPO paper itself has `kl_coefficient = 0.04`.

Source: GRPO, arXiv 2402.03300, section 4.1; DAPO, arXiv 2503.14476, section 2.2.
"""

from __future__ import annotations

from typing import Literal

from planish.algorithms.base import Recipe
from planish.algorithms.dapo import Dapo, GroupPolicyConfig
from planish.algorithms.losses import Aggregation


class GrpoConfig(GroupPolicyConfig):
    """Published constants of GRPO; the symmetric clip of 0.2 is the shared default."""

    name: Literal["grpo"] = "grpo"
    """Key in the table of algorithms."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Every response has the same weight, whatever its length."""


RECIPE = Recipe(GrpoConfig, Dapo)
