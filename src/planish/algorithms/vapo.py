"""VAPO: policy optimisation with a critic that stays stable on long responses.

VAPO makes seven changes to PPO, here in the order of section 5.1. This file has changes 2 to 6.

1. Value pretraining: settings `[critic]`; the train stage does it while the policy is frozen.
2. Decoupled advantage estimation: the critic's target and the policy's advantage each have their
   own decay.
3. The policy's decay grows with the length of the response.
4. Clip-higher, and
5. token-level loss: constants of the clipped policy loss.
6. A language-model loss on correct responses.
7. Group sampling: settings `[rollout]`. A group only gives more data; advantages come from the
   critic.

Each change can be switched off alone by its field.

Source: VAPO, arXiv 2504.05118, sections 4 and 5.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from planish.algorithms.advantages import (
    adaptive_lambda,
    advantage_metrics,
    gae,
    return_targets,
    scaled_advantages,
    terminal_rewards,
)
from planish.algorithms.base import Denominators, LossOutput, Recipe, TrainBatch
from planish.algorithms.clipped_policy import (
    ClippedPolicy,
    ClippedPolicyConfig,
    clipped_policy_loss,
    with_old_policy,
)
from planish.algorithms.losses import (
    Aggregation,
    aggregate,
    loss_counts,
    negative_log_likelihood,
    value_losses,
)
from planish.algorithms.masked import hidden

if TYPE_CHECKING:
    from torch import Tensor


class ActorCriticConfig(ClippedPolicyConfig):
    """Constants of an update with a critic; the defaults are VAPO's."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount of rewards, per token."""
    lambda_critic: float = Field(default=1.0, ge=0.0, le=1.0)
    """Decay of the critic's target; 1 is the Monte-Carlo return (section 4.1)."""
    decoupled_gae: bool = True
    """False: the critic's target has the policy's decay, whatever `lambda_critic` is."""
    lambda_policy: float = Field(default=0.95, ge=0.0, le=1.0)
    """Decay of the policy's advantage if `lambda_alpha` is 0."""
    lambda_alpha: float = Field(default=0.05, ge=0.0)
    """The decay is 1 - 1 / (lambda_alpha * response tokens) (section 4.2). 0: the decay is
    `lambda_policy` for every length."""
    lambda_min: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Lower bound of the decay that follows the length, as in the public code of T-PPO's authors;
    it applies below 400 tokens."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The upper clip of the ratio is 1 + clip_high; 0.2 switches clip-higher off (section 4.3)."""
    aggregation: Aggregation = "token-mean"
    """Every token weighs the same; `seq-mean-token-mean` is PPO's mean within each response first
    (section 4.2)."""
    positive_coefficient: float = Field(default=0.1, ge=0.0)
    """Weight of the language-model loss on correct responses (section 4.3); 0 is off."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of the whole rollout batch to mean 0 and variance 1. The paper
    does not say whether it does."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Bound of the absolute advantage after whitening; None is off."""
    value_clip_low: float | None = Field(default=None, gt=0.0)
    """Largest distance of a value below its old value in the value loss, after pretraining; None is
    any distance."""
    value_clip_high: float | None = Field(default=None, gt=0.0)
    """Largest distance of a value above its old value; None is any distance."""
    value_aggregation: Aggregation = "token-mean"
    """Rule by which the value losses of tokens become one number."""

    @model_validator(mode="after")
    def _has_norm(self) -> ActorCriticConfig:
        if self.value_aggregation == "seq-sum-norm" and self.norm_tokens is None:
            raise ValueError(
                "`norm_tokens` must be given for value_aggregation 'seq-sum-norm', got None"
            )
        return self


class VapoConfig(ActorCriticConfig):
    """Published constants of VAPO."""

    name: Literal["vapo"] = "vapo"
    """Key in the table of algorithms."""


class Once:
    """Cache of a batch's estimates, so that `describe` and `advantages` compute them once."""

    def __init__(self, make: Callable[[TrainBatch], tuple[Tensor, Tensor]]) -> None:
        self._make = make
        self._kept: tuple[TrainBatch, tuple[Tensor, Tensor]] | None = None

    def keep(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Compute the estimates of a batch and cache them until `take`."""
        self._kept = batch, self._make(batch)
        return self._kept[1]

    def take(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return the estimates of a batch and empty the cache."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is batch else self._make(batch)


class Vapo(ClippedPolicy):
    """Advantages and returns from a critic, policy loss with its language-model part, value loss.

    A row that was cut at the end of a window has no loss until it is finished.
    """

    config: ActorCriticConfig
    needs_values: ClassVar[bool] = True

    def __init__(self, config: ActorCriticConfig) -> None:
        self.config = config
        self._estimates = Once(self._estimate)

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with masks, advantages (policy's decay) and returns (critic's decay)."""
        mask = of_finished(batch, batch.policy_mask)
        return with_estimates(batch, mask, *self._estimates.take(batch), self.config)

    def describe(self, batch: TrainBatch) -> dict[str, float]:
        """Return metrics of the decay and of the advantages before whitening; `batch` is the input
        of `advantages`.
        """
        advantages, decay = self._estimates.keep(batch)
        mask = of_finished(batch, batch.policy_mask)
        whiten = self.config.whiten_advantages
        return advantage_metrics(advantages, mask, decay, batch.share, whiten=whiten)

    def _estimate(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return the policy's advantages, [B, S], and the decay of each row, [B]."""
        decay = policy_decay(batch.value_mask.sum(1), self.config)
        mask = of_finished(batch, batch.policy_mask)
        rewards = terminal_rewards(batch.reward, mask, batch.is_finished)
        return gae(rewards, batch.values, mask, gamma=self.config.gamma, lam=decay), decay

    def counts(self, batch: TrainBatch) -> dict[str, float]:
        """Return the number of tokens and sequences in the policy loss, and of tokens in its
        positive part.
        """
        return {
            **loss_counts(batch.policy_mask),
            "positive_tokens": loss_counts(batch.positive_mask)["tokens"],
        }

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch, denominators: Denominators
    ) -> LossOutput:
        """Return one micro-batch's part of the clipped loss and of its positive part."""
        output = clipped_policy_loss(logprobs, entropy, batch, denominators, self.config)
        coefficient = self.config.positive_coefficient
        if coefficient == 0:
            return output
        likelihood = negative_log_likelihood(logprobs, batch.positive_mask)
        num_tokens = max(denominators.minibatch["positive_tokens"], 1.0)
        metrics = {"nll_loss": (likelihood.detach(), batch.positive_mask.sum())}
        return replace(
            output,
            loss=output.loss + coefficient * likelihood / num_tokens,
            means={**output.means, **metrics},
        )

    def value_counts(self, batch: TrainBatch) -> dict[str, float]:
        """Return the number of tokens and sequences in the value loss."""
        return loss_counts(batch.value_mask)

    def value_loss(
        self,
        values: Tensor,
        batch: TrainBatch,
        denominators: Denominators,
        *,
        is_pretraining: bool = False,
    ) -> LossOutput:
        """Return one micro-batch's part of the squared error, clipped if so configured.

        Value pretraining is never clipped, since a new critic must move far from its old values.
        """
        config, mask = self.config, batch.value_mask
        new, old = hidden(values, mask), hidden(batch.values, mask)
        returns = hidden(batch.returns, mask)
        free = value_losses(new, old, returns)
        losses = free
        if not is_pretraining:
            losses = value_losses(
                new, old, returns, clip_low=config.value_clip_low, clip_high=config.value_clip_high
            )
        loss = aggregate(
            losses, mask, config.value_aggregation, denominators, norm_tokens=config.norm_tokens
        )
        raised = mask & (losses.detach() > free.detach())
        return LossOutput(loss, {"value_clipfrac": (raised.sum(), mask.sum())})


def with_estimates(
    batch: TrainBatch,
    policy_mask: Tensor,
    advantages: Tensor,
    decay: Tensor,
    config: ActorCriticConfig,
) -> TrainBatch:
    """Return the rollout batch with its masks, scaled advantages and returns.

    `policy_mask` [B, S] bool has the tokens that train the policy. `advantages` [B, S] float32 are
    not scaled yet. `decay` [B] is the decay of each row.
    """
    return with_old_policy(batch, config).updated(
        policy_mask=policy_mask,
        value_mask=of_finished(batch, batch.value_mask),
        positive_mask=positive_tokens(batch, config),
        advantages=scaled_advantages(
            advantages,
            policy_mask,
            batch.share,
            whiten=config.whiten_advantages,
            clip=config.advantage_clip,
        ),
        returns=critic_targets(batch, decay, config),
    )


def of_finished(batch: TrainBatch, mask: Tensor) -> Tensor:
    """Return the mask without unfinished rows, [B, S] bool."""
    return mask & batch.is_finished.unsqueeze(1)


def policy_decay(lengths: Tensor, config: ActorCriticConfig) -> Tensor:
    """Return [B] float32, the decay of the policy's advantages for response lengths [B]."""
    if config.lambda_alpha == 0:
        return lengths.float().new_full(lengths.shape, config.lambda_policy)
    return adaptive_lambda(lengths, alpha=config.lambda_alpha, minimum=config.lambda_min)


def critic_targets(batch: TrainBatch, decay: Tensor, config: ActorCriticConfig) -> Tensor:
    """Return the critic's target at every response token of finished rows, [B, S].

    Without `decoupled_gae` the critic takes the policy's `decay` [B].
    """
    mask = of_finished(batch, batch.value_mask)
    rewards = terminal_rewards(batch.reward, mask, batch.is_finished)
    lam = config.lambda_critic if config.decoupled_gae else decay
    return return_targets(rewards, batch.values, mask, gamma=config.gamma, lam=lam)


def positive_tokens(batch: TrainBatch, config: ActorCriticConfig) -> Tensor:
    """Return [B, S] bool, the response tokens of finished, correct rows; none if the loss is
    off.
    """
    chosen = (batch.accuracy > 0) & (config.positive_coefficient > 0)
    return of_finished(batch, batch.value_mask) & chosen.unsqueeze(1)


RECIPE = Recipe(VapoConfig, Vapo)
