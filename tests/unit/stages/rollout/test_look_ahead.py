"""The next round's prompts take the rows that the last responses of a round leave free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import as_set
from planish.stages.rollout.sampler import draw_batch
from tests.unit.stages.rollout.tails import draw
from tests.unit.stages.rollout.test_sampler import group


@pytest.mark.parametrize("shrink_rounds", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_and_consumed_does_not_depend_on_it(tmp_path, seed, shrink_rounds):
    plain, ahead = (
        draw(tmp_path / str(on), look_ahead=on, seed=seed, shrink_rounds=shrink_rounds)
        for on in (False, True)
    )
    assert plain.batch.num_rounds == ahead.batch.num_rounds > 1
    assert as_set(plain.batch.kept) == as_set(ahead.batch.kept)
    assert as_set(plain.batch.surplus) == as_set(ahead.batch.surplus)
    assert plain.batch.consumed() == ahead.batch.consumed()
    assert ahead.steps < plain.steps


def test_groups_enter_only_where_rows_are_free(tmp_path):
    # All responses of a round and more fit into the rows that are there.
    drawn = draw(tmp_path, look_ahead=True, max_rows=4096)
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


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_every_ordinal_is_drawn_once_and_in_order(num_groups, size, limit):
    seen = []

    def sample(ordinals, ahead):
        seen.extend(ordinals)
        assert list(ahead.ordinals) == list(range(seen[-1] + 1, seen[-1] + 1 + len(ahead.ordinals)))
        return [group(k, "mww"[k % 3]) for k in ordinals]

    config = RolloutConfig(
        group_size=2, generation_prompts_factor=size / num_groups, max_generation_rounds=limit
    )
    draw_batch(iter(range(10_000)), sample, num_groups, config)
    assert seen == list(range(len(seen)))
