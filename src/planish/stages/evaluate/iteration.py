"""Evaluate the policy from which an iteration starts, if `evaluate.every` selects it.

It is not a separate task: the first rollout task runs it after its shards, because that task has
the image, the accelerator and the engine already.
"""

from __future__ import annotations

import logging

from planish.base.config import parse_section
from planish.base.errors import PlanishError, exit_code
from planish.engines import OpenEngine
from planish.run.stage import Context, Outcome, execute, is_stopped, load_run
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.evaluate.stage import measure, metric_name

logger = logging.getLogger(__name__)


def run(root: str, config_sha256: str, number: int, offset: int, policy_pin: str) -> None:
    """Measure the policy before an iteration on all sets of prompts, if its turn has come.

    `policy_pin` pins the policy; `number` counts iterations of this run from 1, and `offset` is the
    number of iterations before this run.
    """
    evaluate_iteration(root.rstrip("/"), config_sha256, offset + number, policy_pin)


def evaluate_iteration(
    root: str,
    config_sha256: str,
    iteration: int,
    policy_pin: str,
    opened: OpenEngine | None = None,
) -> None:
    """Do as `run`; `iteration` counts over the whole chain, and `opened` opens the engine."""
    try:
        tables = load_run(root, config_sha256)["config"]
        config = parse_section(EvaluateConfig, tables.get("evaluate", {}), section="evaluate")
        # The policy before iteration i has version i - 1.
        is_due = config.every and (iteration - 1) % config.every == 0
        if not is_due or is_stopped(root, iteration):
            return
    except PlanishError as error:
        logger.error("failed stage=evaluate iteration=%d error=%s", iteration, error)
        raise SystemExit(exit_code(error)) from None

    def work(context: Context) -> Outcome:
        measured = measure(context, [policy_pin], opened)
        metrics = measured.of_best()
        for name, (scored,) in measured.scores.items():
            scores = scored.ref.attributes.items()
            metrics |= {metric_name(name, score): float(value) for score, value in scores}
        return Outcome(metrics=metrics, already_done=measured.already_done)

    digest = config_sha256
    execute("evaluate", work, root=root, config_sha256=digest, iteration=iteration, outputs={})
