"""DAPO and GRPO: published constants, numbers by hand, edge cases."""

import math
import subprocess
import sys

import pytest
import torch

from planish.algorithms import algorithm_config, build_algorithm
from planish.algorithms.cispo import CispoConfig
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.grpo import GrpoConfig
from planish.algorithms.gspo import GspoConfig
from planish.base.config import parse_section
from planish.base.errors import ConfigError
from tests.unit.algorithms.batches import make_batch, ragged_mask, whole_step


def run_loss(algorithm, batch, new, entropy=None):
    batch = algorithm.advantages(batch)
    entropy = torch.zeros_like(new) if entropy is None else entropy
    return algorithm.loss(new, entropy, batch, whole_step(algorithm, batch))


def test_dapo_defaults_are_the_published_ones():
    # DAPO section 4.1: clip 0.2 / 0.28; equation 8: one mean over all tokens; no KL, no dual clip.
    config = DapoConfig()
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    assert config.aggregation == "token-mean"
    assert (config.std, config.advantage_epsilon) == ("sample", 1e-6)
    assert config.dual_clip is None
    assert config.correction == "off"
    assert not config.overlong_filtering


def test_grpo_defaults_are_the_published_ones():
    # GRPO section 4.1 and DAPO equation 4: symmetric clip of 0.2, mean within each response first.
    config = GrpoConfig()
    assert (config.clip_low, config.clip_high) == (0.2, 0.2)
    assert config.aggregation == "seq-mean-token-mean"


def test_dapo_and_grpo_by_hand_on_one_group_of_two():
    mask = ragged_mask([3, 1], 3)
    old, new = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0 + math.log(1.25))
    batch = make_batch(mask, old=old, reward=[1.0, -1.0])
    a = 1 / math.sqrt(2)  # advantages of rewards 1, -1 under the sample deviation sqrt(2)
    # DAPO: ratio 1.25 is inside 1.28. GRPO: cut to 1.2 where the advantage is positive.
    dapo = run_loss(Dapo(DapoConfig(advantage_epsilon=0.0)), batch, new)
    assert dapo.loss.item() == pytest.approx((-3 * 1.25 * a + 1.25 * a) / 4, abs=1e-6)
    grpo = run_loss(Dapo(GrpoConfig(advantage_epsilon=0.0)), batch, new)
    assert grpo.loss.item() == pytest.approx((-1.2 * a + 1.25 * a) / 2, abs=1e-6)


def test_metrics_by_hand():
    mask = ragged_mask([2, 2], 3)
    old = torch.log(torch.tensor([[0.1, 0.5, 1.0], [0.5, 0.5, 1.0]]))
    new = torch.log(torch.tensor([[0.2, 0.5, 1.0], [0.3, 0.9, 1.0]]))
    batch = make_batch(mask, old=old, reward=[1.0, -1.0])
    output = run_loss(Dapo(DapoConfig()), batch, new, torch.full((2, 3), 0.5))
    means = {k: (s / n).item() for k, (s, n) in output.means.items()}
    assert means["clipfrac_high"] == 0.25
    assert means["clipfrac_low"] == 0.25
    assert means["mean_upclipped_prob"] == pytest.approx(0.1)
    assert means["entropy"] == pytest.approx(0.5)
    wanted = (math.log(0.5) + math.log(5 / 3) + math.log(5 / 9)) / 4
    assert means["approx_kl"] == pytest.approx(wanted, abs=1e-6)
    assert output.maxima["ratio_error_max"].item() == pytest.approx(1.0, abs=1e-6)
    assert "clipfrac_dual" not in means


def test_dual_clip_fraction_counts_tokens_whose_loss_it_lowered():
    mask = ragged_mask([2, 2], 2)
    new = torch.log(torch.tensor([[1.0, 1.0], [0.9, 0.4]]))
    old = torch.log(torch.tensor([[1.0, 1.0], [0.1, 0.4]]))
    batch = make_batch(mask, old=old, reward=[1.0, -1.0])
    output = run_loss(Dapo(DapoConfig(dual_clip=3.0)), batch, new)
    total, count = output.means["clipfrac_dual"]
    assert (total / count).item() == 0.25


def test_truncated_responses_outside_of_the_statistics_of_equal_ones_train_nothing():
    mask = ragged_mask([2] * 4, 2)
    batch = make_batch(mask, reward=[1, 1, -2, -2], truncated=[False, False, True, True])
    for name in ("dapo", "grpo", "gspo", "cispo"):
        algorithm = build_algorithm({"name": name, "exclude_truncated_from_stats": True})
        filled = algorithm.advantages(batch)
        assert not filled.advantages.any()
        output = algorithm.loss(
            torch.zeros(4, 2), torch.zeros(4, 2), filled, whole_step(algorithm, filled)
        )
        assert output.loss.item() == 0


@pytest.mark.parametrize(
    ("name", "wanted"),
    # Ratios 8 and .1 of each sign of the advantage, and of a token without one.
    [("dapo", (1 / 6, 1 / 6)), ("cispo", (2 / 6, 2 / 6))],
)
def test_clip_fractions_count_every_token_that_a_clip_bounds(name, wanted):
    ratios = torch.tensor([[8.0, 0.1]] * 3)
    advantages = [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
    batch = make_batch(ragged_mask([2] * 3, 2), advantages=advantages)
    algorithm = build_algorithm({"name": name, "clip_low": 0.5})
    output = algorithm.loss(ratios.log(), ratios, batch, whole_step(algorithm, batch))
    low, high = (output.means[f"clipfrac_{end}"] for end in ("low", "high"))
    assert (float(high[0] / high[1]), float(low[0] / low[1])) == pytest.approx(wanted)
    assert float(output.means["mean_upclipped_prob"][1]) == wanted[1] * 6


def test_overlong_filtering_masks_truncated_rows_but_keeps_them_in_the_statistics():
    mask = ragged_mask([2, 2, 2], 2)
    batch = make_batch(mask, reward=[1.0, 0.0, -1.0], truncated=[False, False, True])
    algorithm = Dapo(DapoConfig(overlong_filtering=True, advantage_epsilon=0.0))
    filled = algorithm.advantages(batch)
    assert filled.policy_mask.any(1).tolist() == [True, True, False]
    assert filled.advantages[:, 0].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert algorithm.counts(filled) == {"tokens": 4.0, "sequences": 2.0}
    apart = Dapo(DapoConfig(exclude_truncated_from_stats=True, advantage_epsilon=0.0))
    assert apart.advantages(batch).advantages[0, 0].item() == pytest.approx(math.sqrt(0.5))


def test_gspo_and_cispo_defaults_are_the_published_ones():
    gspo, cispo = GspoConfig(), CispoConfig()
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert gspo.aggregation == "seq-mean-token-mean"
    assert (cispo.clip_low, cispo.clip_high, cispo.aggregation) == (1.0, 4.0, "token-mean")
    with pytest.raises(ConfigError, match="dual_clip"):
        build_algorithm({"name": "cispo", "dual_clip": 3.0})


def test_gspo_clips_a_response_whole_and_cispo_leaves_every_token_a_gradient():
    mask = ragged_mask([2, 2], 2)
    # Ratios of tokens 4, 1/2 and 1, 8; of responses the roots of 2 and 8.
    new = torch.tensor([[math.log(4), -math.log(2)], [0.0, math.log(8)]], requires_grad=True)
    batch = make_batch(mask, advantages=[[1.0, 1.0], [-1.0, -1.0]])
    gradients = {}
    for name in ("gspo", "cispo", "dapo"):
        algorithm = build_algorithm({"name": name, "clip_high": 0.28})
        output = algorithm.loss(new, torch.zeros(2, 2), batch, whole_step(algorithm, batch))
        gradients[name] = torch.autograd.grad(output.loss, new)[0].flatten().tolist()
    half = math.sqrt(8) / 4
    assert gradients["gspo"] == pytest.approx([0.0, 0.0, half, half])
    assert gradients["cispo"] == pytest.approx([-0.32, -0.125, 0.25, 0.32])
    assert gradients["dapo"] == pytest.approx([0.0, -0.125, 0.25, 2.0])


def test_picker_follows_the_name_and_names_the_nearest_key():
    assert algorithm_config({"name": "grpo"}) is GrpoConfig
    assert algorithm_config({}) is DapoConfig
    with pytest.raises(ConfigError, match="did you mean `dapo`"):
        algorithm_config({"name": "dpao"})
    with pytest.raises(ConfigError, match="clip_higher"):
        build_algorithm({"name": "dapo", "clip_higher": 0.3})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"aggregation": "seq-sum-norm"}, "norm_tokens"),
        ({"correction_min": 3.0}, "correction_min"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_low": -0.1}, "greater than or equal to 0"),
        ({"aggregation": "mean"}, "token-mean"),
    ],
)
def test_impossible_constants_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(DapoConfig, table, section="algorithm")


def test_algorithms_and_their_configurations_import_without_torch():
    code = (
        "import sys; from planish.algorithms import ALGORITHMS, build_algorithm\n"
        "assert len([build_algorithm({'name': name}) for name in ALGORITHMS]) == 8\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
