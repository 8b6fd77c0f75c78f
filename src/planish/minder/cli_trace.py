"""Verbs that work on traces in files: simulate, train, run-once, replay."""

from __future__ import annotations

import argparse
from typing import Any


def add_commands(verbs: Any) -> None:
    """Add the verbs' parsers."""
    del verbs


def run(options: argparse.Namespace) -> int:
    """Do one verb and return the exit code."""
    del options
    return 0
