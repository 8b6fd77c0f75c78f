"""Curves of the page: the sources of their numbers, and hints for reading them.

A curve without numbers is left out of its chart, and a chart without curves out of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planish.stages.report.text import Unit


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Example:
        >>> Curve("entropy", "violet", ("update/entropy",)).sources
        ('update/entropy',)
    """

    label: str
    color: str
    sources: tuple[str, ...]
    """Sources `stage/metric` (`update` is the update report); the first with numbers is drawn."""
    combine: Callable[[list[float]], float] | None = None
    """Reduction of the values of parallel tasks; None is the mean weighted by their groups."""
    is_secondary: bool = False
    """True for a thinner, dashed line."""
    is_quiet: bool = False
    """True if the curve is left out when all its values are 0."""
    unless: str = ""
    """Source whose non-zero iterations have no point on this curve; empty for none."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    y_label: str
    """Quantity and unit of the vertical axis."""
    hint: str
    curves: tuple[Curve, ...] = ()
    unit: Unit = "number"
    from_zero: bool = True
    is_log: bool = False
    """True for a logarithmic vertical axis, if every value is positive."""
    floor: float = -math.inf
    """Lower bound of the vertical axis; lower points are drawn on its edge."""


def _gibibytes(values: list[float]) -> float:
    return max(values) / 2**30


def _panel(title: str, y_label: str, hint: str, *curves: Curve, **axis: Any) -> Panel:
    return Panel(title, y_label, hint, curves, **axis)


ACCURACY = _panel(
    "Accuracy",
    "share of correct responses",
    "Groups that are all right or all wrong do not train, so the dashed curve stays near one half "
    "by construction.",
    Curve("all sampled", "blue", ("rollout/accuracy_mean",)),
    Curve(
        "trained on", "slate", ("update/accuracy_mean", "reward/accuracy_mean"), is_secondary=True
    ),
    unit="percent",
)

LENGTHS = _panel(
    "Response length",
    "tokens per response",
    "Longer answers can mean more reasoning or mere padding: read it together with accuracy. A "
    "mean near the limit says that answers are cut off.",
    Curve("mean", "blue", ("rollout/response_length_mean", "update/response_tokens_mean")),
    Curve(
        "longest",
        "slate",
        ("rollout/response_length_max", "update/response_tokens_max"),
        max,
        is_secondary=True,
    ),
)

PANELS: tuple[Panel, ...] = (
    _panel(
        "Reward",
        "mean reward per response",
        "What the update trains on: the verdict's reward plus the length penalty. It should rise; "
        "with dynamic sampling it rises less than accuracy, because solved prompts drop out.",
        Curve("reward", "blue", ("update/reward_mean", "reward/reward_mean")),
        from_zero=False,
    ),
    _panel(
        "Entropy",
        "mean entropy (nats per token)",
        "How undecided the policy is at each token. A fast fall towards 0 means that it has "
        "stopped exploring; a fast rise means that its text falls apart.",
        Curve("entropy", "violet", ("update/entropy",)),
    ),
    _panel(
        "Clip fractions",
        "share of trained tokens",
        "Tokens whose probability ratio left the trusted band. Some clipping is normal; many per "
        "cent mean steps that are too large. High is for rising tokens, low for falling ones.",
        Curve("high", "blue", ("update/clipfrac_high",)),
        Curve("low", "orange", ("update/clipfrac_low",)),
        Curve("dual", "red", ("update/clipfrac_dual",), is_secondary=True),
        Curve("value", "violet", ("update/value_clipfrac",), is_quiet=True),
        unit="percent",
    ),
    _panel(
        "Distance per update",
        "approximate KL (nats per token)",
        "How far the policy moves from the one that sampled the data within one iteration. Spikes "
        "go with clipped tokens and large gradients. It is estimated where many rows of a "
        "mini-batch have no advantage; the metric approx_kl_error is its standard error.",
        Curve("approximate KL", "teal", ("update/approx_kl",)),
        from_zero=False,
    ),
    _panel(
        "Distance from the reference",
        "estimated KL (nats per token)",
        "How far the policy is from the reference that the penalty holds it near. It levels off "
        "where the penalty weighs as much as the reward; a smaller coefficient lets it go further.",
        Curve("KL to the reference", "teal", ("update/reference_kl",)),
        from_zero=False,
    ),
    _panel(
        "Gradient norm",
        "global norm before clipping",
        "Size of the gradient before it is limited. Steady is good; growth over several "
        "iterations announces a collapse.",
        Curve("mean", "orange", ("update/grad_norm",)),
        Curve("largest", "slate", ("update/grad_norm_max",), is_secondary=True),
        Curve("critic, mean", "violet", ("update/value_grad_norm",)),
    ),
    _panel(
        "Engine against trainer",
        "|exp(old) - exp(rollout)| per token",
        "How much the probability of a sampled token differs between rollout engine and trainer. "
        "It should stay near rounding; growth means stale or wrong weights.",
        Curve("mean", "teal", ("update/mismatch_probability_mean",)),
        Curve("largest", "slate", ("update/mismatch_probability_max",), is_secondary=True),
        is_log=True,
        from_zero=False,
    ),
    _panel(
        "Speed",
        "tokens per second",
        "Tokens that all shards of an iteration sampled in a second of sampling, and those that "
        "trained in a second of updates. A sudden fall is a slow machine or longer responses.",
        Curve("sampled", "blue", ("rollout/tokens_per_second",), sum),
        Curve("trained", "teal", ("train/tokens_per_second",)),
    ),
    _panel(
        "Memory of training",
        "GiB of the first rank",
        "The most that the rank has held at once: the device as PyTorch counts it, beside what "
        "`planish plan` counted, and the host.",
        Curve("device", "orange", ("train/peak_device_bytes",), _gibibytes),
        Curve("host", "slate", ("train/peak_host_bytes",), _gibibytes),
    ),
    _panel(
        "Routers against the engine",
        "share of recorded experts",
        "Experts that the engine sent a token to and the router of the trainer would not. A few "
        "per mille are near ties; with replay they do not part engine and trainer.",
        Curve("other experts", "violet", ("update/routing_disagreement",)),
        unit="percent",
    ),
)

"""Charts of every run, in the order of the page: `all_charts` puts others between the first."""


CRITIC_PANELS: tuple[Panel, ...] = (
    _panel(
        "Value loss",
        "half the mean squared error",
        "How far the critic is from what the responses were worth. The dashed curve is measured "
        "before the critic has trained on the batch; if only the solid one falls, it learns the "
        "batch by heart.",
        Curve("while training", "violet", ("update/value_loss",)),
        Curve("before", "slate", ("update/fresh_value_loss",), is_secondary=True),
    ),
    _panel(
        "Explained variance of the critic",
        "share of the variance of returns",
        "1 is a critic that knows every outcome, 0 one that knows only the mean; below 0 it is "
        "worse than the mean. Measured before the critic has trained on the batch; iterations in "
        "which all returns are equal have no point, and points below -1 are drawn at -1.",
        Curve(
            "explained variance",
            "teal",
            ("update/explained_variance",),
            unless="update/ev_undefined",
        ),
        floor=-1.0,
        from_zero=False,
    ),
    _panel(
        "Values against returns",
        "mean per response token",
        "A lasting gap is a bias of the critic: it reaches every advantage and adds up along a "
        "response. Value pretraining is there to close it before the policy moves.",
        Curve("value", "violet", ("update/value_mean",)),
        Curve("return", "slate", ("update/return_mean",), is_secondary=True),
        from_zero=False,
    ),
    _panel(
        "Responses that train the critic",
        "finished responses per iteration",
        "Only a finished response has a return. With windows their number varies from one "
        "iteration to the next; correct ones also train the policy as examples.",
        Curve("finished", "blue", ("update/num_finished",)),
        Curve("correct", "teal", ("update/positive_rollouts",), is_quiet=True),
    ),
    _panel(
        "Learning rates",
        "step size of AdamW",
        "The critic has to follow the policy, so its rate is the higher one. The policy's is 0 "
        "while the critic is pretrained.",
        Curve("critic", "violet", ("update/critic_learning_rate",)),
        Curve("policy", "blue", ("update/learning_rate",), is_secondary=True),
    ),
    _panel(
        "Advantages before scaling",
        "per trained token",
        "A mean away from 0 says that the critic expects too little or too much of the policy; the "
        "deviation is the noise and the signal that the update sees.",
        Curve("deviation", "orange", ("update/advantage_std",)),
        Curve("mean", "slate", ("update/advantage_mean",), is_secondary=True),
        from_zero=False,
    ),
)

"""Charts of the critic, in the order of the page."""


SLOTS = _panel(
    "Slots",
    "share",
    "Continued: slots that began the iteration with a response from the one before. Utilisation: "
    "sampled tokens over decode steps times rows; what is missing to 100 % was spent waiting for "
    "the longest response.",
    unit="percent",
)

PREFIX = _panel(
    "Prefix tokens",
    "tokens per iteration",
    "Tokens of earlier windows that were read again under the newer policy, beside those that were "
    "sampled: what it costs to go on with a response.",
    Curve("sampled", "blue", ("rollout/num_generated_tokens",), sum),
    Curve("read again", "orange", ("rollout/num_prefix_tokens",), sum),
)
