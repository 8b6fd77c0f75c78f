import math

import numpy as np
import pytest
import torch

from planish.engines.sampling import Choice, choose, noise, request_seed


def test_noise_is_the_published_mixer_of_seed_and_position():
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (7, 3), (2**62 + 11, 20479)):
        bits = mix((mix((seed + golden) % 2**64) + position * golden) % 2**64) >> 32
        seen = noise(torch.tensor([seed]), torch.tensor([position])).item()
        assert seen == (bits + 0.5) / 2**32


def test_noise_is_uniform_and_uncorrelated_between_neighbouring_seeds():
    block = noise(torch.arange(200)[:, None], torch.arange(500)[None]).numpy()
    counts, _ = np.histogram(block, bins=20, range=(0, 1))
    # chi-square with 19 degrees of freedom: 43.8 is its 99.9 % point
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
    assert abs(np.corrcoef(block[:-1].ravel(), block[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(block[:, :-1].ravel(), block[:, 1:].ravel())[0, 1]) < 0.01


def test_request_seed_tells_every_argument_apart_and_is_stable():
    seeds = {
        request_seed(*key)
        for key in ((0, 1, "a", 2), (1, 1, "a", 2), (0, 2, "a", 2), (0, 1, "b", 2), (0, 1, "a", 3))
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, "a", 2) == 4694350938045291394


def test_choose_takes_the_token_whose_cumulative_share_holds_the_noise():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(4, 3)
    ids, logprobs = choose(logits, torch.tensor([0.1, 0.2001, 0.69, 0.71], dtype=torch.float64))
    assert ids.tolist() == [0, 1, 1, 2]
    expected = [math.log(0.2), math.log(0.5), math.log(0.5), math.log(0.3)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_choose_never_takes_a_forbidden_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    ids, _ = choose(logits, torch.tensor([2**-33, 0.5, 1 - 2**-33], dtype=torch.float64))
    assert set(ids.tolist()) <= {1, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).expand(3, 4)
    choice = Choice(top_p=torch.tensor([0.69, 0.71, 1.0]))
    uniform = torch.tensor([0.99, 0.7, 0.05], dtype=torch.float64)
    ids, logprobs = choose(logits, uniform, choice)
    # 0.4 + 0.3 reaches 0.69; 0.71 needs 0.2 too; 1 keeps all
    assert ids.tolist() == [3, 3, 0]
    assert logprobs.exp().tolist() == pytest.approx([0.3 / 0.7, 0.3 / 0.9, 0.1], abs=1e-6)


def test_top_p_after_top_k_and_a_tiny_top_p_keeps_one_token():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    both = Choice(top_k=torch.tensor([2]), top_p=torch.tensor([0.5]))
    ids, logprobs = choose(logits, torch.tensor([0.9], dtype=torch.float64), both)
    # of the two kept, 0.4 / 0.7 alone reaches 0.5
    assert (ids.item(), logprobs.item()) == (1, 0.0)
    tiny = Choice(top_p=torch.tensor([1e-6]))
    assert choose(logits, torch.tensor([0.9], dtype=torch.float64), tiny)[0].item() == 1


def test_rows_with_bad_logits_give_log_probabilities_that_are_not_finite():
    logits = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0], [0.0, 1.0]])
    ids, logprobs = choose(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert torch.isfinite(logprobs).tolist() == [False, False, True]
    assert ids.max().item() < 2
