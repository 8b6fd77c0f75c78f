"""vLLM that guesses tokens by n-grams samples what it would sample without."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tests.contract.engines.conftest import FAMILIES
from tests.contract.engines.guessing import DRAWS, REPEATED, REQUESTS
from tests.contract.engines.test_sampling import CHI_SQUARE_LIMIT
from tests.unit.engines.tiny import exact_logits, exact_logprobs, qwen3_policy, reference_greedy

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]


@pytest.fixture(scope="module", params=[pytest.param("dense", marks=pytest.mark.full), "experts"])
def case(request):
    line = [sys.executable, "-m", "tests.contract.engines.guessing", request.param]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    policy = qwen3_policy(**FAMILIES[request.param])
    return policy, json.loads(done.stdout.splitlines()[-1])


def test_guesses_change_no_greedy_token_and_no_probability(case):
    policy, told = case
    assert told["rate"] > 1, "a row without a guess takes a token a step"
    assert "`top_k` must be 0 where vLLM guesses" in told["alone"]
    for one, (tokens, logprobs) in zip(REQUESTS, told["sampled"], strict=True):
        assert len(tokens) == 40
        assert np.abs(np.array(logprobs) - exact_logprobs(policy, one, tokens)).max() < 1e-4
        if not one.sampling.temperature:
            assert tokens == reference_greedy(policy, one.prompt_ids, 40)


def test_guesses_leave_the_law_of_tokens_as_it_is(case):
    """Pairs of tokens after a prompt that repeats itself, against the product of softmaxes."""
    policy, told = case

    def law(ids):
        logits = exact_logits(policy, ids)[-1]
        return np.exp(logits - np.logaddexp.reduce(logits))

    first = law(REPEATED)
    wanted = np.zeros((len(first), len(first)))
    for token in np.flatnonzero(first * DRAWS >= 20):
        wanted[token] = DRAWS * first[token] * law([*REPEATED, int(token)])
    seen = np.zeros_like(wanted)
    np.add.at(seen, tuple(np.array(told["pairs"]).T), 1)
    common = wanted >= 5
    found = np.append(seen[common], DRAWS - seen[common].sum())
    expected = np.append(wanted[common], DRAWS - wanted[common].sum())
    freedom = len(found) - 1
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < CHI_SQUARE_LIMIT * np.sqrt(2 * freedom)
