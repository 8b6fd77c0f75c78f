"""A verifier is called once for each response of a run, with the options of the run."""

import numpy as np
import pytest

from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet
from planish.verifiers.judging import from_columns
from tests.integration.resident_equal import QUICK, run

STYLE = '''
import time
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls")


def style(response, answer):
    """Take longer than a verifier may by default, once; `prepare` gives answers as responses."""
    if response != answer:
        if not CALLS.exists():
            time.sleep(11)
        with CALLS.open("a") as file:
            file.write(f"{response!r}\\n")
    return len(response) % 3 / 2
'''
SETTINGS = (
    *QUICK,
    "rollout.dynamic_sampling=false",
    "reward.keep_uniform_groups=true",
    "reward.verifier_timeout_seconds=60",
    "reward.functions=['counted:style']",
)


@pytest.mark.slow
@pytest.mark.parametrize("resident", ["0", "2"])
def test_a_response_is_judged_once_in_a_whole_run(tmp_path, monkeypatch, resident):
    (tmp_path / "counted.py").write_text(STYLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    folder = tmp_path / "run"
    run(folder, "dapo-tiny", 2, SETTINGS, "--resident", resident)
    root, num_rows = folder.as_uri(), 0
    for iteration in (1, 2):
        num_shards = len(read_manifest(layout.rewards(root, iteration)).parents)
        rollouts = RolloutSet.concat(
            [
                read_set(RolloutSet, layout.rollouts(root, iteration, shard))
                for shard in range(num_shards)
            ]
        )
        rewards = read_set(RewardSet, layout.rewards(root, iteration))
        assert np.array_equal(rollouts.accuracy, rewards.accuracy)
        assert rollouts.extracted == rewards.extracted
        verdicts = [each["counted:style"] for each in from_columns(rollouts)]
        assert not any(verdict.error or verdict.timeout for verdict in verdicts)
        scores = [len(text) % 3 / 2 for text in rollouts.response]
        assert [verdict.score for verdict in verdicts] == scores
        given = zip(rollouts.response, rollouts.answer, strict=True)
        num_rows += sum(response != answer for response, answer in given)
    assert len((tmp_path / "counted.calls").read_text().splitlines()) == num_rows > 0
