"""A shard whose engine gives any number of tokens in a step."""

from __future__ import annotations

import pytest

from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.progress import SamplingProgress
from tests.unit.stages.rollout import simulation
from tests.unit.stages.rollout.scripted_engine import ScriptedEngine
from tests.unit.stages.rollout.simulation import Simulation


@pytest.fixture
def iterate(template, tmp_path, monkeypatch):
    """Run an iteration with steps of some sizes; returns it, and the tokens after each step."""
    simulation.register(monkeypatch)
    prompts, policies = simulation.write_policies_and_prompts(template.as_uri(), tmp_path.as_uri())
    config = RolloutConfig(
        dynamic_sampling=False,
        prompts_per_iteration=4,
        group_size=3,
        max_response_tokens=16,
        window_tokens=8,
        sample_retries=0,
        max_rows=5,
    )

    def run(name, step_sizes):
        looks = []

        def look(self, *, num_rows, stats, **_):
            looks.append((num_rows, stats()["tokens"]))

        monkeypatch.setattr(SamplingProgress, "look", look)
        monkeypatch.setattr(ScriptedEngine, "step_sizes", step_sizes)
        made = Simulation((tmp_path / name).as_uri(), prompts, policies, config)
        made.iterate(1)
        return made, looks

    return run


def test_the_pace_counts_the_tokens_that_steps_give(iterate):
    plain, _ = iterate("plain", (1,))
    made, looks = iterate("uneven", (0, 3))
    assert (made.windows, made.carried) == (plain.windows, plain.carried)
    counts = [num_tokens for _, num_tokens in looks]
    grown = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert counts[-1] == made.num_generated
    # All rows are taken, and of responses that end inside of a step the rest is not counted.
    assert grown.count(0) >= len(grown) // 2
    assert 5 < max(grown) <= 3 * 5
    assert sum(num_rows for num_rows, _ in looks) != counts[-1]
