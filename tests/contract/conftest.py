"""Fixtures of the contract suites."""

from __future__ import annotations

import importlib

import pytest

from planish.engines import ENGINES
from tests.stacks import stacks_without_sources

__all__ = ["new_engine", "stacks_without_sources"]


@pytest.fixture(params=sorted(ENGINES))
def new_engine(request):
    """Make a started engine over a policy in memory; all are closed at the end."""
    module, _, name = ENGINES[request.param].partition(":")
    cls = getattr(importlib.import_module(module), name)
    made = []

    from planish.engines.requests import ModelRef
    from tests.unit.engines.tiny import qwen3_policy

    def make(policy=None, **options):
        engine = cls(**{"max_rows": 4, **options})
        made.append(engine)
        engine.start(ModelRef(policy=policy or qwen3_policy()))
        return engine

    yield make
    for engine in made:
        engine.close()
