"""Every engine that is installed here, on a dense policy and on one with experts."""

import gc
import importlib
import importlib.util

import pytest

from planish.engines import APART, ENGINES
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from tests.stacks import packages_of_an_image
from tests.unit.engines.disagg.instances import ThreadRank
from tests.unit.engines.tiny import qwen3_policy

__all__ = ["packages_of_an_image"]

PACKAGES = {"disagg": "transformers", "vllm_disagg": "vllm"}
"""What an engine stands on, where that is not a package of its own name."""

HERE = [name for name in sorted(ENGINES) if importlib.util.find_spec(PACKAGES.get(name, name))]

FAMILIES = {
    "dense": {},
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32},
}


def pytest_collection_modifyitems(items):
    """Leave what makes an engine out of `make check`, and out of `make test` all engines but one.

    A dense policy needs no experts apart.
    """
    params = {item: getattr(item, "callspec", None) and item.callspec.params for item in items}
    items[:] = [
        item
        for item in items
        if not params[item]
        or params[item].get("new_engine") not in APART
        or params[item].get("make_policy") != "dense"
    ]
    for item in items:
        if "new_engine" in getattr(item, "fixturenames", ()):
            quick = params[item]["new_engine"] == "transformers"
            item.add_marker(pytest.mark.slow if quick else pytest.mark.long)


def has_our_noise(engine) -> bool:
    """Tell whether windows, neighbours and earlier requests change no bit of a response."""
    return "vllm" not in getattr(engine, "_config", EngineConfig()).name


@pytest.fixture(params=FAMILIES)
def make_policy(request):
    """Build a random policy of one seed."""
    sizes = FAMILIES[request.param]
    return lambda seed=0: qwen3_policy(seed, **sizes)


@pytest.fixture(params=HERE)
def new_engine(request, make_policy, monkeypatch):
    """Make a started engine over a policy in memory; a second vLLM closes the first."""
    # vLLM collects garbage eight times for each engine, and there is much of it to look through.
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    module, _, name = ENGINES[request.param].partition(":")
    cls = getattr(importlib.import_module(module), name)
    options = {"max_rows": 4}
    if request.param == "vllm":
        options["config"] = EngineConfig(name="vllm", cache_bytes=16 << 20)
    made = []

    def make(policy=None, **changes):
        if request.param == "disagg":
            # As many ranks as the rows allow; they are threads, tests/integration has processes.
            number = 2 if {**options, **changes}["max_rows"] >= 4 else 1
            changes["config"] = EngineConfig(
                name="disagg", attention_ranks=number, expert_ranks=2, micro_batches=number
            )
            changes["launcher"] = ThreadRank
        if request.param == "vllm_disagg":
            changes["config"] = EngineConfig(
                name=request.param, expert_ranks=2, cache_bytes=16 << 20
            )
            changes["launcher"] = ThreadRank
        if "vllm" in request.param and made:
            made[-1].close()  # a process has one
        engine = cls(**{**options, **changes})
        made.append(engine)
        engine.start(ModelRef(policy=policy or make_policy()))
        return engine

    yield make
    for engine in made:
        engine.close()
