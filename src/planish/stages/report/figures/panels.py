"""Which curves the page has, where their numbers come from, and how to read them.

A chart whose numbers do not exist is left out; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from planish.stages.report.facts import RunFacts
from planish.stages.report.figures.charts import Chart, Mark, Part, boxes, line_chart, stacked_bars
from planish.stages.report.figures.critic_panels import critic_charts, window_charts
from planish.stages.report.figures.curves import (
    Curve,
    Panel,
    Source,
    draw,
    legend,
    lines_of,
    pretraining,
    update,
)
from planish.stages.report.figures.times import stage_times, task_timeline

PANELS: tuple[Panel, ...] = (
    Panel(
        "Reward",
        "mean reward per response",
        "What the update trains on: the verdict's reward plus the length penalty. It should rise; "
        "with dynamic sampling it rises less than accuracy, because solved prompts drop out.",
        (Curve("reward", "blue", (update("reward_mean"), Source("reward", "reward_mean"))),),
    ),
    Panel(
        "Entropy",
        "mean entropy (nats per token)",
        "How undecided the policy is at each token. A fast fall towards 0 means that it has "
        "stopped exploring; a fast rise means that its text falls apart.",
        (Curve("entropy", "violet", (update("entropy"),)),),
        from_zero=True,
    ),
    Panel(
        "Clip fractions",
        "share of trained tokens",
        "Tokens whose probability ratio left the trusted band. Some clipping is normal; many per "
        "cent mean steps that are too large. High is for rising tokens, low for falling ones.",
        (
            Curve("high", "blue", (update("clipfrac_high"),)),
            Curve("low", "orange", (update("clipfrac_low"),)),
            Curve("dual", "red", (update("clipfrac_dual"),), is_secondary=True),
            Curve("value", "violet", (update("value_clipfrac"),), is_quiet=True),
        ),
        unit="percent",
        from_zero=True,
    ),
    Panel(
        "Distance per update",
        "approximate KL (nats per token)",
        "How far the policy moves from the one that sampled the data within one iteration. Spikes "
        "go with clipped tokens and large gradients.",
        (Curve("approximate KL", "teal", (update("approx_kl"),)),),
    ),
    Panel(
        "Distance from the reference",
        "estimated KL (nats per token)",
        "How far the policy is from the reference that the penalty holds it near. It levels off "
        "where the penalty weighs as much as the reward; a smaller coefficient lets it go further.",
        (Curve("KL to the reference", "teal", (update("reference_kl"),)),),
    ),
    Panel(
        "Gradient norm",
        "global norm before clipping",
        "Size of the gradient before it is limited. Steady is good; growth over several "
        "iterations announces a collapse.",
        (
            Curve("mean", "orange", (update("grad_norm"),)),
            Curve("largest", "slate", (update("grad_norm_max"),), is_secondary=True),
            Curve("critic, mean", "violet", (update("value_grad_norm"),)),
        ),
        from_zero=True,
    ),
    Panel(
        "Engine against trainer",
        "|exp(old) - exp(rollout)| per token",
        "How much the probability of a sampled token differs between rollout engine and trainer. "
        "It should stay near rounding; growth means stale or wrong weights.",
        (
            Curve("mean", "teal", (update("mismatch_probability_mean"),)),
            Curve("largest", "slate", (update("mismatch_probability_max"),), is_secondary=True),
        ),
        is_log=True,
    ),
)

LENGTH_MEAN = (
    Source("rollout", "response_length_mean"),
    update("response_tokens_mean"),
)
LENGTH_MAX = (
    Source("rollout", "response_length_max", max),
    update("response_tokens_max"),
)
ACCURACY_SAMPLED = (Source("rollout", "accuracy_mean"),)
ACCURACY_TRAINED = (update("accuracy_mean"), Source("reward", "accuracy_mean"))
GROUPS: tuple[tuple[str, str, str], ...] = (
    ("kept", "blue", "ds/kept_frac"),
    ("all correct", "teal", "ds/all_correct_frac"),
    ("all wrong", "red", "ds/all_wrong_frac"),
)
"""Label, colour and rollout metric of the fates of a group."""


def all_charts(facts: RunFacts, before: Mark | None, after: Mark | None) -> list[Chart]:
    """Draw every chart whose numbers exist, in the order of the page.

    Args:
        facts: the run.
        before: held-out accuracy of the starting policy.
        after: held-out accuracy of the final policy.
    """
    drawn = {panel.title: draw(facts, panel) for panel in PANELS}
    charts = [
        _accuracy(facts, [mark for mark in (before, after) if mark is not None]),
        drawn.pop("Reward"),
        _lengths(facts),
        drawn.pop("Entropy"),
        _groups(facts),
        *drawn.values(),
        *critic_charts(facts),
        *window_charts(facts),
    ]
    found = [chart for chart in charts if chart is not None]
    # Two columns: an odd count would leave a hole before the timeline.
    times = stage_times(facts, is_wide=len(found) % 2 == 0)
    return found + [chart for chart in (times, task_timeline(facts)) if chart is not None]


def _accuracy(facts: RunFacts, marks: Sequence[Mark]) -> Chart | None:
    lines = lines_of(
        facts,
        (
            Curve("all sampled", "blue", ACCURACY_SAMPLED),
            Curve("trained on", "slate", ACCURACY_TRAINED, is_secondary=True),
        ),
    )
    if not lines and not marks:
        return None
    bands = pretraining(facts)
    svg = line_chart(
        "Accuracy",
        lines,
        y_label="share of correct responses",
        unit="percent",
        marks=marks,
        from_zero=True,
        bands=bands,
    )
    keys = legend(lines, bands)
    if marks:
        keys += (("held out", marks[0].color, "mark"),)
    hint = (
        "Groups that are all right or all wrong do not train, so the dashed curve stays near one "
        "half by construction."
    )
    if _keeps_all_groups(facts):
        hint = "Every group trains, whatever its accuracy."
    if marks:
        hint = f"Diamonds: held-out prompts before and after, +- 1 standard error. {hint}"
    return Chart("Accuracy", svg, hint, keys)


def _lengths(facts: RunFacts) -> Chart | None:
    lines = lines_of(
        facts,
        (
            Curve("mean", "blue", LENGTH_MEAN),
            Curve("longest", "slate", LENGTH_MAX, is_secondary=True),
        ),
    )
    if not lines:
        return None
    limit, bands = _max_response_tokens(facts), pretraining(facts)
    svg = line_chart(
        "Response length",
        lines,
        y_label="tokens per response",
        limit=(f"limit {limit:,}", float(limit)) if limit else None,
        from_zero=True,
        bands=bands,
    )
    hint = (
        "Longer answers can mean more reasoning or mere padding: read it together with accuracy. "
        "A mean near the limit says that answers are cut off."
    )
    return Chart("Response length", svg, hint, legend(lines, bands))


def _max_response_tokens(facts: RunFacts) -> int:
    """Return the limit on sampled tokens, 0 when the configuration does not tell."""
    for section in ("rollout", "reward"):
        limit = facts.config.get(section, {}).get("max_response_tokens")
        if isinstance(limit, int):
            return limit
    return 0


def _keeps_all_groups(facts: RunFacts) -> bool:
    return facts.config.get("rollout", {}).get("dynamic_sampling") is False


def _groups(facts: RunFacts) -> Chart | None:
    is_filtered = not _keeps_all_groups(facts)
    labels = {"kept": "kept" if is_filtered else "mixed"}
    found = [
        (labels.get(label, label), color, facts.per_iteration("rollout", key))
        for label, color, key in GROUPS
    ]
    found = [item for item in found if item[2]]
    if not found:
        return None
    iterations = sorted({iteration for _, _, values in found for iteration in values})
    parts = [
        Part(label, color, [values.get(i, 0.0) for i in iterations])
        for label, color, values in found
    ]
    svg = stacked_bars(
        "Groups", iterations, parts, y_label="share of sampled groups", unit="percent"
    )
    title = "Groups kept by dynamic sampling"
    hint = (
        "Only groups with right and wrong responses carry a signal and are kept. A growing share "
        "of all-correct groups says that the prompts become too easy for the policy."
    )
    if not is_filtered:
        title = "Groups by outcome"
        hint = (
            "Nothing is filtered, every group trains. Where advantages compare the responses of a "
            "group they are 0 in those that are all right or all wrong; those of a critic are not."
        )
    return Chart(title, svg, hint, boxes(parts))
