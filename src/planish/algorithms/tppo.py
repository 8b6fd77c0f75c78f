"""T-PPO: the policy learns from a response while the response is still being generated.

Generation is cut into windows: in each iteration a slot generates at most `window_tokens` tokens.

1. The policy trains on the tokens of the window, whether the response is finished or not. The
   estimate of the advantage takes, for the state after a cut, the value of the last state before
   the cut.
2. The tokens just before a cut depend most on that value, so they are left out (public code).
3. The critic trains on finished responses only, on the tokens of all their windows.

The rollout stage fills the slots with new prompts (successive batching). If a window is as long as
the longest response, this is VAPO with other constants. "Public code" is the code of the paper's
authors, which may differ from the code behind the paper.

Source: T-PPO, arXiv 2506.15050.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from planish.algorithms.advantages import (
    advantage_metrics,
    gae,
    last_value,
    terminal_rewards,
)
from planish.algorithms.base import Recipe, TrainBatch
from planish.algorithms.clipped_policy import ClippedPolicy
from planish.algorithms.losses import Aggregation
from planish.algorithms.masked import without_last
from planish.algorithms.vapo import ActorCriticConfig, Once, Vapo, policy_decay, with_estimates
from planish.base.config import Needs, Wanted, setting

if TYPE_CHECKING:
    from torch import Tensor


class TppoConfig(ActorCriticConfig):
    """Constants of T-PPO; decay, positive loss and clip of the ratio are those of VAPO."""

    name: Literal["tppo"] = "tppo"
    """Key in the table of algorithms."""
    window_tokens: int = setting(
        8192,
        Needs("rollout.window_tokens", Wanted.SAME, "rollout cuts the windows", when=Wanted.ANY),
        Needs("rollout.unfinished", "train", "it trains on windows", when=Wanted.ANY),
        ge=1,
    )
    """Most tokens that a slot generates in an iteration; must equal `rollout.window_tokens`."""
    ignored_tail_tokens: int = Field(default=8, ge=0)
    """Number of tokens before a cut that do not train the policy, as in the public code."""
    dual_clip: float | None = Field(default=10.0, gt=1.0)
    """Bound of the loss of tokens with negative advantage, as a multiple of the advantage; from the
    public code."""
    advantage_clip: float | None = Field(default=10.0, gt=0.0)
    """Bound of the absolute advantage after whitening, as in the public code."""
    value_clip_low: float | None = Field(default=0.5, gt=0.0)
    """Largest distance of a value below its old value in the value loss, as in the public code."""
    value_clip_high: float | None = Field(default=0.6, gt=0.0)
    """Largest distance of a value above its old value, as in the public code."""
    aggregation: Aggregation = "batch-token"
    """Every token of the rollout batch has the same weight, as in the public code."""
    value_aggregation: Aggregation = "seq-mean-token-mean"
    """Every finished response has the same weight, as in the public code."""

    @model_validator(mode="after")
    def _leaves_tokens(self) -> TppoConfig:
        if self.ignored_tail_tokens >= self.window_tokens:
            raise ValueError(
                "`ignored_tail_tokens` must be below `window_tokens`, got "
                f"{self.ignored_tail_tokens} >= {self.window_tokens}; no unfinished response "
                "would train the policy"
            )
        return self


class Tppo(ClippedPolicy):
    """Advantages over a window; the losses are VAPO's, but on other tokens."""

    config: TppoConfig
    needs_values: ClassVar[bool] = True

    def __init__(self, config: TppoConfig) -> None:
        self.config = config
        self._estimates = Once(self._estimate)
        vapo = Vapo(config)
        self.counts, self.loss = vapo.counts, vapo.loss
        self.value_counts, self.value_loss = vapo.value_counts, vapo.value_loss

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with masks, advantages of the window, and returns of finished
        responses.
        """
        mask = trained_tokens(batch, self.config.ignored_tail_tokens)
        return with_estimates(batch, mask, *self._estimates.take(batch), self.config)

    def describe(self, batch: TrainBatch) -> dict[str, float]:
        """Return metrics of the decay, of the advantages before whitening, and of the tokens left
        out.
        """
        advantages, decay = self._estimates.keep(batch)
        trained = trained_tokens(batch, self.config.ignored_tail_tokens)
        whiten = self.config.whiten_advantages
        return {
            **advantage_metrics(advantages, trained, decay, batch.share, whiten=whiten),
            "num_ignored_tokens": float(batch.share.sum((batch.policy_mask & ~trained).sum())),
        }

    def _estimate(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return the advantages of the window's tokens, [B, S], and the decay of each row, [B]."""
        window = batch.policy_mask
        decay = policy_decay(expected_lengths(batch, self.config.window_tokens), self.config)
        advantages = gae(
            terminal_rewards(batch.reward, window, batch.is_finished),
            batch.values,
            window,
            gamma=self.config.gamma,
            lam=decay,
            bootstrap=boundary_values(batch),
        )
        return advantages, decay


def boundary_values(batch: TrainBatch) -> Tensor:
    """Return the value after each row's last token, [B]: 0 if finished, else the last known value.

    With gamma 1 the last step before a cut then has no error. A critic that is constant over the
    window gives no advantage, so a critic must be trained before its policy.

    Source: T-PPO, arXiv 2506.15050, extended generalised advantage estimation.
    """
    return last_value(batch.values, batch.policy_mask).masked_fill(batch.is_finished, 0.0)


def expected_lengths(batch: TrainBatch, window_tokens: int) -> Tensor:
    """Return [B] int64, the tokens of each response, plus half a window if it is unfinished."""
    so_far = batch.value_mask.sum(1)
    return so_far + (window_tokens // 2) * batch.is_finished.logical_not()


def trained_tokens(batch: TrainBatch, ignored_tail_tokens: int) -> Tensor:
    """Return [B, S] bool, the window's tokens without those just before a cut."""
    before_cut = without_last(batch.policy_mask, ignored_tail_tokens)
    return batch.policy_mask.where(batch.is_finished.unsqueeze(1), before_cut)


RECIPE = Recipe(TppoConfig, Tppo)
