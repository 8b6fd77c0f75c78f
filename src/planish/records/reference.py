"""The reference policy of a KL penalty, from the first iteration to the last.

It is the policy that the training began with, after the supervised start, unless the configuration
pins another. The first train state names the reference and every later state passes the name on.
Iterations, chained runs and forks go on with a state, so they keep the reference of the first run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.records.files import POLICY_SCHEMA
from planish.records.manifest import read_manifest
from planish.records.refs import parse_pin
from planish.records.stream import state_root

KEY = "reference"
"""Key of the reference in a train state. Its value is a pin, relative to the root of the run if it
lies there, so that equal runs have equal states."""

_REMEDY = "pin the policy to stay near by `train.reference_policy` (`<uri>#sha256=<digest>`)"


def find_reference(pinned: str, *, policy_pin: str, state_pin: str, info: Mapping[str, Any]) -> str:
    """Return the pinned URI of the reference policy, which exists.

    Args:
        pinned: `train.reference_policy`; wins unless it is empty.
        policy_pin: policy before the iteration; the reference of the first.
        state_pin: train state before the iteration; empty before the first.
        info: JSON part of that state.

    Raises:
        ConfigError: the training began without a penalty, or the policy was deleted.
        StoreUnavailable: the store does not answer.
    """
    pin = pinned or policy_pin
    if state_pin and not pinned:
        pin = named_reference(state_pin, info)
        if not pin:
            raise ConfigError(
                "the train state before an iteration with a KL penalty must name the reference "
                f"policy, got {info.get(KEY)!r} in {state_pin!r}; its training began without a "
                f"penalty: {_REMEDY}, or set `algorithm.kl_coefficient` to 0"
            )
    uri, digest = parse_pin(pin)
    try:
        schema = read_manifest(uri, sha256=digest).schema
    except (ObjectMissing, RecordError) as error:
        raise ConfigError(
            f"the reference policy of the KL penalty must be at {pin!r}, got: {error}; restore it, "
            f"or {_REMEDY}"
        ) from None
    if schema != POLICY_SCHEMA:
        raise ConfigError(
            f"the reference policy of the KL penalty must be a {POLICY_SCHEMA}, got {schema} at "
            f"{uri!r}; {_REMEDY}"
        )
    return pin


def named_reference(state_pin: str, info: Mapping[str, Any]) -> str:
    """Return the absolute pin of the reference in a train state; empty if it names none."""
    named = info.get(KEY)
    if not isinstance(named, str) or not named:
        return ""
    return named if "://" in named else f"{state_root(state_pin)}/{named}"
