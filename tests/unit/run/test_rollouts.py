"""With fewer tasks than shards, each task runs several shards in turn."""

import pytest

from planish.run import rollouts
from planish.run.stage import PathArtifact


@pytest.mark.parametrize(
    ("num_tasks", "expected"),
    [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 2, 4], [1, 3]]), (5, [[0], [1], [2], [3], [4]])],
)
def test_every_shard_runs_once(monkeypatch, num_tasks, expected):
    seen = []
    monkeypatch.setattr(
        rollouts,
        "stage_run",
        lambda stage: lambda **given: seen.append((stage, given.get("shard"))),
    )
    found = []
    for shard in range(num_tasks):
        rollouts.run(
            "file:///r",
            "0" * 64,
            number=1,
            offset=0,
            shard=shard,
            num_tasks=num_tasks,
            num_shards=5,
            policy_pin="p",
            state_pin="s",
            rollouts=PathArtifact("r"),
            metrics=PathArtifact("m"),
        )
        # The policy is evaluated once, behind the shards of the first task.
        if shard == 0:
            assert seen.pop() == ("evaluate_iteration", None)
        assert {stage for stage, _ in seen} == {"rollout"}
        found.append([index for _, index in seen])
        seen.clear()
    assert found == expected
