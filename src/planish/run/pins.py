"""Outputs of a training task for the next one."""

from __future__ import annotations

from typing import NamedTuple


class Pins(NamedTuple):
    """Output parameters of a task that trains; the next one starts from them."""

    policy_pin: str
    """Pinned URI of the exported policy."""
    state_pin: str
    """Pinned URI of the new train state; the input state if nothing was trained."""
