"""Responses are judged where they are sampled with the options of the reward."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from planish import store
from planish.base.config import parse_section
from planish.models.tokens import character_tokenizer
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.manifest import manifest_uri
from planish.records.rollouts import VERDICT, FinishReason, RolloutSet
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.rollout.carry import read_carry
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.extra_groups import read_surplus
from planish.stages.rollout.generate import GroupSampler
from planish.stages.rollout.groups import Group, Slot, as_set, judged
from planish.verifiers import Verdict, verify
from planish.verifiers.judging import Judging, from_columns
from tests.unit.stages.rollout.test_commits import Killed, kill_after

ALPHABET = "Answer: 0123456789.</think>\n"


@pytest.mark.parametrize(
    ("prompt", "responses", "reward", "num_right"),
    [
        ("6*7", ["Answer: 42.0", "Answer: 42"], {}, 2),
        ("6*7", ["Answer: 42.0", "Answer: 42"], {"accept_integral_decimals": False}, 1),
        ("6*7<think>\n", ["Answer: 42", "4</think>Answer: 42"], {}, 1),
        ("6*7", ["Answer: 42", "4</think>Answer: 42"], {}, 2),
        ("6*7", ["Answer: 42", "9Answer: 42"], {"answer_after": "9"}, 1),
    ],
)
def test_rollouts_are_judged_as_the_reward_says(prompt, responses, reward, num_right):
    tokenizer = character_tokenizer("".join(dict.fromkeys(ALPHABET + "*")))
    sampler = GroupSampler(
        SimpleNamespace(max_model_len=1000),
        tokenizer,
        None,
        RolloutConfig(),
        SimpleNamespace(read=list),
        seed=0,
        iteration=1,
        judging=Judging.of(reward),
    )
    slots = [
        Slot(place, tokens=np.array(tokenizer.encode_response(text)), finish=FinishReason.STOP)
        for place, text in enumerate(responses)
    ]
    group = Group(
        ordinal=0,
        drawn=1,
        prompt_id="0" * 16,
        prompt_tokens=tuple(tokenizer.encode_prompt([{"role": "user", "content": prompt}])),
        answer="42",
        verifier="integer",
        slots=tuple(slots),
    )
    (whole,) = sampler._judge([group])
    assert whole.num_right == num_right
    opened = "<think>\n" if prompt.endswith("\n") else ""
    assert [slot.text for slot in whole.slots] == [opened + text for text in responses]


REWARD = {"functions": [{"name": "exact", "weight": 1.0}], "max_response_tokens": 8,
          "overlong_buffer_tokens": 0, "keep_uniform_groups": True}  # fmt: skip
WHOLE = {"dynamic_sampling": False}
HELD = {"dynamic_sampling": False, "window_tokens": 3, "temperature": 5.0,
        "unfinished": "hold"}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """(verifier, response) of every call of a verifier, in their order."""
    made = []

    def counted(name, response, *others):
        made.append((name, response))
        return verify(name, response, *others)

    monkeypatch.setattr("planish.verifiers.verify", counted)
    return made


def as_before(uri, **attributes):
    """Write a set again as an earlier version wrote it, with other attributes; return its pin."""
    manifest, rollouts = read_manifest(uri), read_set(RolloutSet, uri)
    old = replace(rollouts, **dict.fromkeys((*VERDICT, "functions")))
    store.delete(manifest_uri(uri))
    patch = pytest.MonkeyPatch()
    patch.setattr(RolloutSet, "SCHEMA", "rollouts/1")
    facts = {**manifest.attributes, **attributes}
    pin = write_set(uri, old, parents=manifest.parents, attributes=facts).pin()
    patch.undo()
    return pin


@pytest.mark.parametrize("changes", [WHOLE, {**WHOLE, "commit_steps": 1, "max_rows": 8}, HELD])
def test_a_response_is_judged_once_and_the_reward_reads_it(new_run, calls, changes):
    run = new_run(**changes, tables={"reward": REWARD})
    for _ in range(2 if "commit_steps" in changes else 0):
        patch = kill_after(1)
        with pytest.raises(Killed):
            run.call()
        patch.undo()
    run.call()
    rollouts = read_set(RolloutSet, layout.rollouts(run.root, 1, 0))
    verdicts = [each for each in from_columns(rollouts) if each]
    assert len(verdicts) == rollouts.num_rows > 0
    num_judged = len(verdicts)
    assert len(calls) == num_judged
    config = parse_section(RewardConfig, REWARD, section="reward")
    found = score(rollouts, config)
    assert len(calls) == num_judged
    # Rollouts of an earlier version are judged by the reward, to the same numbers.
    as_before(layout.rollouts(run.root, 1, 0))
    old = read_set(RolloutSet, layout.rollouts(run.root, 1, 0))
    assert old.accuracy is None
    again = score(old, config)
    assert again.rewards == found.rewards
    assert again.metrics == found.metrics
    assert len(calls) == num_judged + rollouts.num_rows


@pytest.mark.parametrize("read", [read_surplus, lambda *given: read_carry(*given)[0]])
@pytest.mark.parametrize(("kind", "num_calls"), [("same", 0), ("old", 2), ("other", 2)])
def test_what_an_iteration_leaves_is_judged_again_only_where_it_must(
    tmp_path, calls, read, kind, num_calls
):
    done = Slot(0).extended([5], [-0.5], [0], FinishReason.STOP)
    verdicts = {"exact": Verdict(0.0, "from before", score=0.0)}
    slots = (
        replace(done, text="7", verdicts=verdicts),
        replace(Slot(1), finish=FinishReason.WINDOW),
    )
    groups = [Group(k, 1, f"{k:016x}", (1,), "7", "exact", slots) for k in range(2)]
    facts = {"config_sha256": "c", "ordinals": [0, 1], "drawn": [1, 1]}
    pin = write_set(tmp_path.as_uri(), as_set(groups), parents={}, attributes=facts).pin()
    if kind == "old":
        pin = as_before(tmp_path.as_uri())
    found = judged(read([pin], "d" if kind == "other" else "c"), Judging.of({}))
    assert len(calls) == num_calls
    assert [group.num_right for group in found] == [1 if num_calls else 0] * 2
    assert all(not group.slots[1].verdicts for group in found)
