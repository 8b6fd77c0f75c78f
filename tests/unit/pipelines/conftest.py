"""Pipelines are compiled here."""

from tests.stacks import stacks_without_sources

__all__ = ["stacks_without_sources"]
