"""Warnings and faults of settings that suit a model from scratch and not a trained one.

A local run also finds here which packages its engine lacks.
"""

from __future__ import annotations

import os

from planish.base.parallel import package_fault
from planish.run.stage import LOCAL_RUN
from planish.stages.prepare.memory import Config

HIGHEST_RATE = 1e-4
"""Learning rate above which a trained model forgets how to answer."""


def trained_warnings(config: Config) -> list[str]:
    """Return a warning for each setting that spoils a trained model, with the value to set."""
    train = config.train
    rate = train.learning_rate
    if not config.model.path:
        return []
    found = []
    if rate > HIGHEST_RATE and not config.model.lora_rank:
        found.append(
            f"`train.learning_rate` should be at most {HIGHEST_RATE:g} for a trained model, got "
            f"{rate:g}: 2e-5 suits 0.1 to 1 B parameters, as in the preset `dapo-small`"
        )
    types = {config.model.dtype, train.compute_dtype}
    if getattr(config.algorithm, "correction", "") == "bypass" and "bfloat16" in types:
        found.append(
            "`algorithm.correction` should not be 'bypass' in bfloat16: the log-probabilities of "
            "engine and trainer differ by more than the clip range; take 'token_truncate'"
        )
    if config.curate.gsm8k_as == "steps":
        found.append(
            "`curate.gsm8k_as` should be 'problems' for a trained model, got 'steps', which are "
            "expressions for a model from scratch"
        )
    return found


def package_faults(config: Config) -> tuple[str, ...]:
    """Return a fault if a local run lacks the package of its engine, with the command for it.

    On a cluster each stage has an image of its own, and that of `prepare` has no engine.
    """
    fault = package_fault("engine.name", config.engine.name) if LOCAL_RUN in os.environ else ""
    return (fault,) if fault else ()
