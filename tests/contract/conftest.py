"""Fixtures of the contract suites."""

from __future__ import annotations

from tests.stacks import stacks_without_sources

__all__ = ["stacks_without_sources"]
