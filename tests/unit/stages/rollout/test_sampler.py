import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.records.rollouts import FinishReason
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Fate, Group, Slot, as_set
from planish.stages.rollout.metrics import batch_metrics
from planish.stages.rollout.sampler import draw_batch
from tests.unit.stages.rollout import tails

NUM_RIGHT = {"m": 1, "r": 2, "w": 0, "i": None}
"""Fate of a group of two, mixed, right, wrong or incomplete, to its right responses."""


def group(ordinal, letter, version=0, length=3):
    finish = FinishReason.STOP if letter != "i" else FinishReason.ABORT
    slots = tuple(
        replace(
            Slot(s).extended([5] * length, [-0.5] * length, [version] * length, finish),
            text="ab"[s],
        )
        for s in range(2)
    )
    name = f"{ordinal % 3:016x}"
    return Group(ordinal, 1, name, (1, 2), "1", "exact", slots, NUM_RIGHT[letter])


def draw(letters, num_groups, **config):
    """Draw from a stream whose k-th prompt has the fate of letter k (repeating)."""
    rounds = []

    def sample(ordinals, ahead):
        rounds.append(len(ordinals))
        return [group(k, letters[k % len(letters)]) for k in ordinals]

    options = {"group_size": 2, "generation_prompts_factor": 1.0, **config}
    batch = draw_batch(itertools.count(), sample, num_groups, RolloutConfig(**options))
    return batch, rounds


def ordinals(groups):
    return [g.ordinal for g in groups]


def test_only_groups_with_right_and_wrong_responses_are_kept():
    batch, rounds = draw("mrwm", 4)
    # 0 and 3 qualify in the first round, 4 and 7 in the second
    assert ordinals(batch.kept) == [0, 3, 4, 7]
    assert ordinals(batch.dropped) == [1, 2, 5, 6]
    assert (batch.surplus, batch.starved, rounds) == ([], False, [4, 4])
    assert batch.consumed() == list(range(8))


def test_surplus_groups_are_not_consumed():
    batch, rounds = draw("mmr", 3, generation_prompts_factor=3.0)
    assert rounds == [9]
    assert ordinals(batch.kept) == [0, 1, 3]
    assert ordinals(batch.surplus) == [4, 6, 7]
    assert batch.consumed() == [0, 1, 2, 3, 5, 8]


def test_later_rounds_can_shrink_to_what_is_missing():
    batch, rounds = draw("mrmr" * 4 + "m" * 40, 16, shrink_rounds=True)
    # 8 of 16 kept; 8 missing at a share of one half, plus a quarter: 20, cut to the full 16
    assert rounds == [16, 16]
    batch, rounds = draw("mmmr", 16, shrink_rounds=True)
    # 12 of 16 kept, 4 missing: 4 * 16 / 12 * 1.25 = 6.67
    assert rounds == [16, 7]
    assert ordinals(batch.kept)[-4:] == [16, 17, 18, 20]
    assert ordinals(batch.surplus) == [21, 22]


def test_without_dynamic_sampling_every_complete_group_is_kept():
    batch, rounds = draw("mrwi", 6, dynamic_sampling=False)
    # prompt 3 and 7 are incomplete and replaced one by one
    assert ordinals(batch.kept) == [0, 1, 2, 4, 5, 6]
    assert ordinals(batch.dropped) == [3]
    assert rounds == [6, 1]


def test_starvation_trains_on_what_there_is():
    batch, rounds = draw("mwww", 4, max_generation_rounds=2)
    assert (ordinals(batch.kept), batch.starved, rounds) == ([0, 4], True, [4, 4])
    assert batch.consumed() == list(range(8))


def test_starvation_with_no_group_at_all_gives_an_empty_batch():
    batch, _ = draw("w", 3, max_generation_rounds=2)
    assert (batch.kept, batch.starved, batch.consumed()) == ([], True, list(range(6)))
    metrics = batch_metrics(batch)
    assert metrics["ds/kept_frac"] == 0.0
    assert metrics["ds/all_wrong_frac"] == 1.0
    assert "ds/samples_per_trained_sample" not in metrics


def test_relaxed_starvation_fills_up_with_complete_groups():
    batch, _ = draw("miww", 4, max_generation_rounds=2, starvation_policy="relax")
    assert ordinals(batch.kept) == [0, 4, 2, 3]
    assert ordinals(batch.dropped) == [1, 5, 6, 7]
    assert batch.starved


def test_starvation_can_fail_loudly():
    with pytest.raises(ConfigError, match=r"4 groups must qualify within 2 .* got 2 of 8; give"):
        draw("mwww", 4, max_generation_rounds=2, starvation_policy="raise")


def test_no_round_limit_goes_on_until_the_batch_is_full():
    batch, rounds = draw("w" * 50 + "m", 1, max_generation_rounds=0)
    assert ordinals(batch.kept) == [50]
    assert len(rounds) == 51


def test_a_full_batch_at_the_last_round_is_not_starved():
    batch, _ = draw("mw", 2, max_generation_rounds=2)
    assert (len(batch.kept), batch.starved) == (2, False)


@given(
    st.text("mrwi", min_size=1, max_size=30),
    st.integers(1, 12),
    st.floats(0.1, 4.0),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["train_partial", "relax"]),
)
def test_no_prompt_is_lost_and_the_filter_keeps_mixed_groups_only(
    letters, num_groups, factor, shrink, dynamic, policy
):
    batch, rounds = draw(
        letters,
        num_groups,
        generation_prompts_factor=factor,
        shrink_rounds=shrink,
        dynamic_sampling=dynamic,
        starvation_policy=policy,
    )
    assert ordinals(batch.generated()) == list(range(sum(rounds)))
    assert sorted(batch.consumed() + ordinals(batch.surplus)) == list(range(sum(rounds)))
    assert (
        len(batch.kept) == num_groups
        or (batch.starved and len(batch.kept) < num_groups)
        or (policy == "relax")
    )
    if dynamic and not batch.starved:
        assert all(g.num_right == 1 for g in batch.kept)
        assert all(g.num_right in (None, 0, 2) for g in batch.dropped)
    assert all(g.fate is not Fate.INCOMPLETE for g in batch.kept)
    assert all(g.fate is Fate.MIXED or not dynamic for g in batch.surplus)


def test_metrics_worked_by_hand():
    batch, _ = draw("mmrwi", 2, generation_prompts_factor=5.0)
    metrics = batch_metrics(batch)
    # ten groups: four mixed (two kept, two surplus), two right, two wrong, two incomplete
    assert metrics["num_generated_groups"] == 10
    assert metrics["num_groups"] == 2
    assert metrics["num_rollouts"] == 4
    assert metrics["num_generated_rollouts"] == 20
    assert metrics["num_generated_tokens"] == 60
    assert metrics["num_kept_tokens"] == 12
    assert metrics["group_dropped_incomplete"] == 2
    assert metrics["ds/gen_rounds"] == 1
    assert metrics["ds/surplus"] == 2
    assert metrics["ds/starved"] == 0
    assert metrics["ds/kept_frac"] == 0.5
    assert metrics["ds/all_correct_frac"] == metrics["ds/all_wrong_frac"] == 0.25
    assert metrics["ds/samples_per_trained_sample"] == 5.0
    # four mixed at 0.5, two at 1, two at 0
    assert metrics["accuracy_mean"] == 0.5
    assert metrics["kept_accuracy_mean"] == 0.5
    assert metrics["response_length_mean"] == metrics["response_length_max"] == 3.0
    assert metrics["truncated_frac"] == 0.0
    assert metrics["logprob_mean"] == -0.5


def test_one_response_per_prompt_is_allowed_without_the_filter_alone():
    with pytest.raises(ConfigError, match="must be at least 2 with `dynamic_sampling`, got 1"):
        parse_section(RolloutConfig, {"group_size": 1}, section="rollout")
    raw = {"group_size": 1, "dynamic_sampling": False, "generation_prompts_factor": 1}
    assert parse_section(RolloutConfig, raw, section="rollout").group_size == 1


def test_groups_whose_wrong_responses_have_other_scores_are_kept():
    def sample(ordinals, ahead):
        return [replace(group(k, "wwr"[k % 3]), scores_differ=k % 3 == 0) for k in ordinals]

    options = {"group_size": 2, "generation_prompts_factor": 1.0, "max_generation_rounds": 1}
    batch = draw_batch(itertools.count(), sample, 6, RolloutConfig(**options))
    assert [g.ordinal for g in batch.kept] == [0, 3]
    assert batch_metrics(batch)["ds/all_wrong_frac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("shrink_rounds", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_looking_ahead_changes_nothing_that_is_kept_or_consumed(tmp_path, seed, shrink_rounds):
    plain, ahead = (
        tails.draw(tmp_path / str(on), look_ahead=on, seed=seed, shrink_rounds=shrink_rounds)
        for on in (False, True)
    )
    assert plain.batch.num_rounds == ahead.batch.num_rounds > 1
    assert as_set(plain.batch.kept) == as_set(ahead.batch.kept)
    assert as_set(plain.batch.surplus) == as_set(ahead.batch.surplus)
    assert plain.batch.consumed() == ahead.batch.consumed()
    assert ahead.steps < plain.steps


def test_groups_enter_only_where_rows_are_free(tmp_path):
    # All responses of a round and more fit into the rows that are there.
    drawn = tails.draw(tmp_path, look_ahead=True, max_rows=4096)
    longest = max(slot.num_tokens for g in drawn.batch.generated() for slot in g.slots)
    assert drawn.steps <= 2 * longest


def asked(fates, num_groups, size, **options):
    """What each round asks for after so many of its groups have ended with these fates."""
    rounds = []

    def sample(ordinals, ahead):
        ended = [group(k, fate) for k, fate in zip(ordinals, fates, strict=False)]
        rounds.append((list(ahead.ordinals), [ahead.num_wanted(ended[:n]) for n in range(3)]))
        return [group(k, "m") for k in ordinals]

    config = RolloutConfig(group_size=2, generation_prompts_factor=size / num_groups, **options)
    draw_batch(iter(range(100)), sample, num_groups, config)
    return rounds


def test_a_round_that_is_likely_to_fill_the_batch_asks_for_nothing():
    ((_, wanted),) = asked("mm", 4, 4)
    assert wanted == [0, 0, 0]


def test_a_round_of_which_little_qualifies_asks_for_a_whole_one():
    ((ordinals, wanted),) = asked("ww", 4, 4)
    assert ordinals == [4, 5, 6, 7]
    assert wanted == [0, 4, 4]


def test_rounds_that_shrink_ask_for_what_is_missing():
    ((_, wanted),) = asked("mw", 8, 8, shrink_rounds=True)
    # One of two qualified, so four of eight will, and four more take eight and a quarter.
    assert wanted == [0, 0, 8]


def test_the_last_round_that_is_allowed_looks_at_nothing():
    ((ordinals, _),) = asked("ww", 4, 4, max_generation_rounds=1)
    assert ordinals == []
