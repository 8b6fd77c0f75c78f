"""Warnings and faults of settings that suit a model from scratch and not a trained one.

A local run also finds here which packages its engine lacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from planish.run.stage import LOCAL_RUN

Config = Mapping[str, Mapping[str, Any]]

HIGHEST_RATE = 1e-4
"""Learning rate above which a trained model forgets how to answer."""
REMEDIES = {
    "vllm": "`make engines` and `make demo ENGINE=vllm`, or `pip install 'planish[rollout]'`",
    "transformers": "`pip install 'planish[train]'`",
}
"""Package to the command that installs it."""


def trained_warnings(config: Config) -> list[str]:
    """Return a warning for each setting that spoils a trained model, with the value to set."""
    train = config["train"]
    rate = train["learning_rate"]
    if not config["model"]["path"]:
        return []
    found = []
    if rate > HIGHEST_RATE and not config["model"].get("lora_rank"):
        found.append(
            f"`train.learning_rate` should be at most {HIGHEST_RATE:g} for a trained model, got "
            f"{rate:g}: 2e-5 suits 0.1 to 1 B parameters, as in the preset `dapo-small`"
        )
    types = {config["model"]["dtype"], train["compute_dtype"]}
    if config["algorithm"].get("correction") == "bypass" and "bfloat16" in types:
        found.append(
            "`algorithm.correction` should not be 'bypass' in bfloat16: the log-probabilities of "
            "engine and trainer differ by more than the clip range; take 'token_truncate'"
        )
    if config["curate"]["gsm8k_as"] == "steps":
        found.append(
            "`curate.gsm8k_as` should be 'problems' for a trained model, got 'steps', which are "
            "expressions for a model from scratch"
        )
    return found


def package_faults(config: Config) -> tuple[str, ...]:
    """Return a fault if a local run lacks the package of its engine, with the command for it.

    On a cluster each stage has an image of its own, and that of `prepare` has no engine.
    """
    engine = config["engine"].get("name", "transformers")
    package = "vllm" if engine.startswith("vllm") else "transformers"
    if LOCAL_RUN not in os.environ or find_spec(package) is not None:
        return ()
    return (
        f"`engine.name` must be an engine whose package is installed, got {engine!r} without "
        f"{package}: {REMEDIES[package]}",
    )
