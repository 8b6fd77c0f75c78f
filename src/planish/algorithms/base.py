"""Input and output of an algorithm: batches, losses and their denominators.

The trainer knows no algorithm by name. It passes a `TrainBatch`, gets masks and advantages, and
then calls a loss. The denominators of the loss are fixed for the whole optimizer step, so the split
into micro-batches and ranks does not change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from planish.base.config import Section, parse_section
from planish.base.parallel import ALONE, Share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TrainBatch:
    """Sequences (prompt, then response) from column 0, padded on the right; never stored.

    Column `t` of every per-token field belongs to token `input_ids[:, t]`: `old_logprobs[:, t]` is
    the log-probability of that token given the tokens before it. Column 0 is never in a mask.

    Example:
        A prompt of two tokens and a response of three has `policy_mask` `[0, 0, 1, 1, 1]`; its
        first response token is predicted from the hidden state at column 1.
    """

    input_ids: Tensor
    """[B, S] int64."""
    position_ids: Tensor
    """[B, S] int64, 0 to S - 1 in each row."""
    attention_mask: Tensor
    """[B, S] bool, True on real tokens."""
    policy_mask: Tensor
    """[B, S] bool, tokens in the policy loss."""
    value_mask: Tensor
    """[B, S] bool, tokens in the value loss."""
    positive_mask: Tensor
    """[B, S] bool, tokens in the language-model loss on correct responses."""
    rollout_logprobs: Tensor
    """[B, S] float32, log-probabilities from the engine that sampled; 0 outside responses."""
    old_logprobs: Tensor
    """[B, S] float32, log-probabilities from the trainer at the start of the iteration."""
    reference_logprobs: Tensor
    """[B, S] float32, log-probabilities of the reference policy for a KL penalty; 0 without a
    penalty."""
    values: Tensor
    """[B, S] float32, critic's value of the state before each token; 0 outside the masks."""
    advantages: Tensor
    """[B, S] float32, 0 outside the masks."""
    returns: Tensor
    """[B, S] float32, 0 outside the masks."""
    reward: Tensor
    """[B] float32, shaped reward that trains."""
    accuracy: Tensor
    """[B] float32, 0 or 1."""
    group_index: Tensor
    """[B] int32, rows of one prompt share a value."""
    is_truncated: Tensor
    """[B] bool, True if the response reached the maximum length without an end token."""
    is_finished: Tensor
    """[B] bool, True if the response ended by a stop token or by the maximum length."""
    routing: Tensor | None = None
    """[T, layers with experts, experts per token] of the smallest integer type: the experts to
    which the engine sent each of the T input tokens of `attention_mask`, row after row; -1 if
    unknown. None if the run did not record routing."""
    is_fresh: Tensor | None = None
    """[B] bool, True if all tokens of the policy loss come from the policy before the iteration, so
    the trainer must compute the engine's log-probabilities; None if this is true of every row."""
    share: Share = ALONE
    """This rank's rows of the rollout batch."""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    def take(self, rows: Tensor, *, num_columns: int | None = None) -> TrainBatch:
        """Return the given rows, cut to the first `num_columns` columns.

        Args:
            rows: [K] int64 row numbers.
            num_columns: columns to keep; None keeps all. Only padding may be cut.
        """
        tensors = self.without_routing().tensors()
        picked = {name: value.index_select(0, rows) for name, value in tensors.items()}
        for name, value in picked.items():
            if value.dim() == 2:
                picked[name] = value[:, :num_columns]
        if self.routing is not None:
            lengths = self.attention_mask.sum(1)
            starts = (lengths.cumsum(0) - lengths)[rows]
            real = picked["attention_mask"]
            # Rows begin in column 0, so a column is a token's place in its row.
            picked["routing"] = self.routing[(starts[:, None] + real.cumsum(1) - 1)[real]]
        return TrainBatch(**picked, share=self.share.take(rows))

    def routing_by_column(self) -> Tensor | None:
        """Return `routing` as [B, S, layers, experts per token], -1 in padding."""
        if self.routing is None:
            return None
        choices = self.routing.new_full((*self.input_ids.shape, *self.routing.shape[1:]), -1)
        choices[self.attention_mask] = self.routing
        return choices

    def tensors(self) -> dict[str, Any]:
        """Return the tensors that the batch has, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "share"}
        return {name: value for name, value in found.items() if value is not None}

    def to(self, device: Any) -> TrainBatch:
        """Return the batch on another device."""
        return TrainBatch(**{name: value.to(device) for name, value in self.tensors().items()})

    def updated(self, **changes: Any) -> TrainBatch:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def without_routing(self) -> TrainBatch:
        """Return a copy without recorded routing, for a model that chooses experts by itself."""
        return replace(self, routing=None)


@dataclass(frozen=True)
class Denominators:
    """Denominators of one optimizer step: sums over all its micro-batches and all ranks."""

    minibatch: Mapping[str, float]
    """`Algorithm.counts` of the mini-batch; for the value loss, `ActorCritic.value_counts`."""
    batch: Mapping[str, float]
    """Counts of the whole rollout batch."""
    num_minibatches: int
    """Optimizer steps that share the rollout batch in one pass over it."""


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's part of the loss, and metrics to log."""

    loss: Tensor
    """Scalar with gradient; the parts of all micro-batches and ranks add up to the loss."""
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Metric to (sum, count). Sums and counts are added up first and divided then; a metric with
    count 0 is left out."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Map from metric to the largest value seen."""

    def scaled(self, weight: float, device: Any) -> LossOutput:
        """Return a copy on a device, with loss, sums and counts multiplied by a factor."""
        means = {
            name: (total.to(device) * weight, count.to(device) * weight)
            for name, (total, count) in self.means.items()
        }
        maxima = {name: value.to(device) for name, value in self.maxima.items()}
        return LossOutput(self.loss.to(device) * weight, means, maxima)


class LossFn(Protocol):
    """The policy loss that a trainer calls on each micro-batch; its denominators are already
    set.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossOutput:
        """Return the part of the loss that belongs to one micro-batch.

        Args:
            logprobs: [B, S] float32 under the current policy, 0 outside `batch.policy_mask` and
                `batch.positive_mask`.
            entropy: [B, S] float32 of the distribution at each token, no gradient.
            batch: the micro-batch.
        """


class ValueLossFn(Protocol):
    """The value loss that a trainer calls on each micro-batch; its denominators are already set."""

    def __call__(self, values: Tensor, batch: TrainBatch) -> LossOutput:
        """Return the part of the value loss that belongs to one micro-batch.

        Args:
            values: [B, S] float32 of the current critic, 0 outside `batch.value_mask`.
            batch: the micro-batch; its own `values` are those of the old critic.
        """


class Algorithm(Protocol):
    """One published recipe: masks and advantages, then a loss with its denominators."""

    needs_values: ClassVar[bool]
    """True if the trainer must also run a critic; the class then meets `ActorCritic` too."""

    @property
    def needs_old_logprobs(self) -> bool:
        """False if the policy ratio compares with the engine's own log-probabilities."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss keeps the policy near a reference policy.

        Every token in `policy_mask` then has a gradient, whatever its advantage.
        """

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the rollout batch with masks, advantages and returns filled in.

        Statistics over groups or the batch are over the rows of all ranks, by `batch.share`.
        """

    def counts(self, batch: TrainBatch) -> dict[str, float]:
        """Return the denominators of the policy loss; counts of disjoint batches add up.

        A mini-batch whose counts are all 0 makes no policy step.
        """

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch, denominators: Denominators
    ) -> LossOutput:
        """Return one micro-batch's part of the policy loss; see `LossFn`."""


class ActorCritic(Algorithm, Protocol):
    """A recipe with a critic: `needs_values` is True."""

    def describe(self, batch: TrainBatch) -> dict[str, float]:
        """Return metrics of the advantages before scaling, for a batch with values."""

    def value_counts(self, batch: TrainBatch) -> dict[str, float]:
        """Return the denominators of the value loss; counts of disjoint batches add up.

        A mini-batch whose counts are all 0 makes no critic step.
        """

    def value_loss(
        self,
        values: Tensor,
        batch: TrainBatch,
        denominators: Denominators,
        *,
        is_pretraining: bool = False,
    ) -> LossOutput:
        """Return one micro-batch's part of the value loss; see `ValueLossFn`.

        In pretraining the policy does not change, and no clip limits how far a value may move.
        """


@dataclass(frozen=True)
class Recipe:
    """An entry of the table of algorithms: a class and the constants that it runs with.

    Recipes share a class if their papers' algorithms differ only in constants.
    """

    config_class: type[Section]
    """Class of the `[algorithm]` table; its field `name` is the key in `ALGORITHMS`."""
    algorithm_class: Callable[[Any], Algorithm]
    """Class of the algorithm; called with a parsed `config_class`."""

    def build(self, raw: Mapping[str, Any]) -> Algorithm:
        """Build from the raw `[algorithm]` table.

        Raises:
            ConfigError: unknown key or wrong value.
        """
        return self.algorithm_class(parse_section(self.config_class, raw, section="algorithm"))
