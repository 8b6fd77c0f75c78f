"""Curation measures pass rates with the engine of the run, whichever it is."""

import pytest

from planish.engines.config import EngineConfig
from planish.models.policy import save_policy
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.pass_rate import measure_pass_rates
from planish.stages.curate.problem import Problem
from tests.contract.engines.conftest import HERE
from tests.contract.engines.test_sft_probe import SETTINGS
from tests.unit.engines.tiny import qwen3_policy, reference_greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HERE if name in SETTINGS])
def test_pass_rates_are_those_of_the_policy_on_the_engine_of_the_run(name, tmp_path, caplog):
    caplog.set_level("INFO")
    policy = qwen3_policy()
    # So sharp that every sample is the likeliest token.
    policy.model.model.norm.weight.data *= 1000.0
    pin = save_policy(f"file://{tmp_path}/p", policy, version=0, parents={}, attributes={}).pin()
    problems = []
    for number in range(6):
        messages = [{"role": "user", "content": f"{number}+1="}]
        ids = policy.tokenizer.encode_prompt(messages)
        text = policy.tokenizer.decode(reference_greedy(policy, tuple(ids), 1))
        answer = text if number % 2 else f"not {text}"
        problems.append(Problem(f"{number}+1=", messages, answer, "exact", "sums"))
    config = CurateConfig(
        pass_rate_policy=pin, pass_rate_samples=3, pass_rate_max_tokens=1, pass_rate_max_rows=8
    )
    measured = measure_pass_rates(problems, config, EngineConfig(**SETTINGS[name]), seed=0)
    assert [problem.pass_rate for problem in measured] == [0.0, 1.0] * 3
    assert ("started engine=vllm" in caplog.text) == (name == "vllm")
