"""Responses are judged where they are sampled with the options of the reward."""

from types import SimpleNamespace

import numpy as np
import pytest

from planish.models.tokens import character_tokenizer
from planish.records.rollouts import FinishReason
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.generate import GroupSampler
from planish.stages.rollout.groups import Group, Slot
from planish.verifiers import VerifierOptions

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
        judging=VerifierOptions.of(reward),
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
    (judged,) = sampler._judge([group])
    assert judged.num_right == num_right
    opened = "<think>\n" if prompt.endswith("\n") else ""
    assert [slot.text for slot in judged.slots] == [opened + text for text in responses]
