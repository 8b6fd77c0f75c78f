"""Every engine that is installed here, on a dense policy and on one with experts."""

from __future__ import annotations

import gc
import importlib
import importlib.util

import pytest

from planish.engines import ENGINES
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from tests.unit.engines.tiny import qwen3_policy

HERE = [name for name in sorted(ENGINES) if importlib.util.find_spec(name)]
"""An engine has the name of the package that it stands on."""

FAMILIES = {
    "dense": {},
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32},
}


def pytest_collection_modifyitems(items):
    """Each test makes engines, so `make check` leaves them out."""
    for item in items:
        if "new_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=FAMILIES)
def make_policy(request):
    """Build a random policy of one seed."""
    sizes = FAMILIES[request.param]
    return lambda seed=0: qwen3_policy(seed, **sizes)


@pytest.fixture(params=HERE)
def new_engine(request, make_policy, monkeypatch):
    """Make a started engine over a policy in memory; all are closed at the end."""
    # vLLM collects garbage eight times for each engine, and there is much of it to look through.
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    module, _, name = ENGINES[request.param].partition(":")
    cls = getattr(importlib.import_module(module), name)
    options = {"max_rows": 4}
    if request.param == "vllm":
        options["config"] = EngineConfig(name="vllm", cache_bytes=16 << 20)
    made = []

    def make(policy=None, **changes):
        engine = cls(**{**options, **changes})
        made.append(engine)
        engine.start(ModelRef(policy=policy or make_policy()))
        return engine

    yield make
    for engine in made:
        engine.close()


def pytest_terminal_summary(terminalreporter):
    """Print which promise each engine holds, on which family."""
    kept, columns = {}, set()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            if "tests/contract/engines" not in report.nodeid or "[" not in report.nodeid:
                continue
            if outcome == "passed" and report.when != "call":
                continue
            name, _, case = report.nodeid.rpartition("::")[2].partition("[")
            column = " ".join(word for word in case[:-1].split("-") if word in (*HERE, *FAMILIES))
            if not column:
                continue
            columns.add(column)
            kept.setdefault(name, {}).setdefault(column, set()).add(outcome)
    if not kept:
        return
    terminalreporter.section("engines")
    heads = sorted(columns)
    terminalreporter.line("  ".join(heads))
    for name, cells in kept.items():
        marks = (", ".join(sorted(cells.get(head, {"-"}))).ljust(len(head)) for head in heads)
        terminalreporter.line(
            "  ".join(marks) + "  " + name.removeprefix("test_").replace("_", " ")
        )
