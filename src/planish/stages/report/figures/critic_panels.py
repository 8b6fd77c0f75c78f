"""Charts of runs with a critic, and of runs that cut responses into windows."""

from __future__ import annotations

from planish.stages.report.facts import RunFacts
from planish.stages.report.figures.charts import Chart, Line, line_chart
from planish.stages.report.figures.curves import (
    Curve,
    Panel,
    Source,
    draw,
    legend,
    pretraining,
    update,
)

CRITIC_PANELS: tuple[Panel, ...] = (
    Panel(
        "Value loss",
        "half the mean squared error",
        "How far the critic is from what the responses were worth. The dashed curve is measured "
        "before the critic has trained on the batch; if only the solid one falls, it learns the "
        "batch by heart.",
        (
            Curve("while training", "violet", (update("value_loss"),)),
            Curve("before", "slate", (update("fresh_value_loss"),), is_secondary=True),
        ),
        from_zero=True,
    ),
    Panel(
        "Explained variance of the critic",
        "share of the variance of returns",
        "1 is a critic that knows every outcome, 0 one that knows only the mean; below 0 it is "
        "worse than the mean. Measured before the critic has trained on the batch; iterations in "
        "which all returns are equal have no point, and points below -1 are drawn at -1.",
        (
            Curve(
                "explained variance",
                "teal",
                (update("explained_variance"),),
                unless=update("ev_undefined"),
            ),
        ),
        floor=-1.0,
    ),
    Panel(
        "Values against returns",
        "mean per response token",
        "A lasting gap is a bias of the critic: it reaches every advantage and adds up along a "
        "response. Value pretraining is there to close it before the policy moves.",
        (
            Curve("value", "violet", (update("value_mean"),)),
            Curve("return", "slate", (update("return_mean"),), is_secondary=True),
        ),
    ),
    Panel(
        "Responses that train the critic",
        "finished responses per iteration",
        "Only a finished response has a return. With windows their number varies from one "
        "iteration to the next; correct ones also train the policy as examples.",
        (
            Curve("finished", "blue", (update("num_finished"),)),
            Curve("correct", "teal", (update("positive_rollouts"),), is_quiet=True),
        ),
        from_zero=True,
    ),
    Panel(
        "Learning rates",
        "step size of AdamW",
        "The critic has to follow the policy, so its rate is the higher one. The policy's is 0 "
        "while the critic is pretrained.",
        (
            Curve("critic", "violet", (update("critic_learning_rate"),)),
            Curve("policy", "blue", (update("learning_rate"),), is_secondary=True),
        ),
        from_zero=True,
    ),
    Panel(
        "Advantages before scaling",
        "per trained token",
        "A mean away from 0 says that the critic expects too little or too much of the policy; the "
        "deviation is the noise and the signal that the update sees.",
        (
            Curve("deviation", "orange", (update("advantage_std"),)),
            Curve("mean", "slate", (update("advantage_mean"),), is_secondary=True),
        ),
    ),
)
"""Charts of the critic, in the order of the page."""

PREFIX = Panel(
    "Prefix tokens",
    "tokens per iteration",
    "Tokens of earlier windows that were read again under the newer policy, beside those that were "
    "sampled: what it costs to go on with a response.",
    (
        Curve("sampled", "blue", (Source("rollout", "num_generated_tokens", sum),)),
        Curve("read again", "orange", (Source("rollout", "num_prefix_tokens", sum),)),
    ),
    from_zero=True,
)


def critic_charts(facts: RunFacts) -> list[Chart | None]:
    """Draw the charts of the critic; none without one."""
    if not any("critic_learning_rate" in scalars for scalars in facts.updates.values()):
        return []
    return [draw(facts, panel) for panel in CRITIC_PANELS]


def window_charts(facts: RunFacts) -> list[Chart | None]:
    """Draw the charts of slots and windows; none where whole responses were generated."""
    live = facts.per_iteration("rollout", "num_live_slots", sum)
    continued = facts.per_iteration("rollout", "num_continued", sum)
    if not live or not any(continued.values()):
        return []
    return [_slots(facts, live, continued), draw(facts, PREFIX)]


def _slots(facts: RunFacts, live: dict[int, float], continued: dict[int, float]) -> Chart:
    """Draw how many slots went on with a response, and how well the engine's rows were used."""
    shares = {number: continued.get(number, 0.0) / max(n, 1.0) for number, n in live.items()}
    used = facts.per_iteration("rollout", "slot_utilisation")
    lines = [Line("continued", "orange", [*shares], [*shares.values()])]
    if used:
        lines.append(Line("utilisation", "teal", [*used], [*used.values()]))
    bands = pretraining(facts)
    svg = line_chart("Slots", lines, y_label="share", unit="percent", from_zero=True, bands=bands)
    hint = (
        "Continued: slots that began the iteration with a response from the one before. "
        "Utilisation: sampled tokens over decode steps times rows; what is missing to 100 % was "
        "spent waiting for the longest response."
    )
    return Chart("Slots", svg, hint, legend(lines, bands))
