import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.records.rollouts import FinishReason
from planish.records.stream import advance, assign, fresh_cursor
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.extra_groups import group_facts, settle, share, take_over
from planish.stages.rollout.groups import Fate, Group, Slot, as_set
from planish.stages.rollout.metrics import batch_metrics
from planish.stages.rollout.sampler import draw_batch
from planish.verifiers import Verdict
from tests.unit.stages.rollout import tails

VERDICTS = {"m": (1.0, 0.0), "r": (1.0, 1.0), "w": (0.0, 0.0), "i": (), "p": (0.0, 0.5)}
"""A group of two, mixed, right, wrong, incomplete or with a part of a point, to its scores."""


def group(ordinal, letter, version=0, length=3):
    finish = FinishReason.STOP if letter != "i" else FinishReason.ABORT
    slots = tuple(
        replace(
            Slot(s).extended([5] * length, [-0.5] * length, [version] * length, finish),
            text="ab"[s],
            verdicts={"exact": Verdict(score // 1, score=score)} if score is not None else {},
        )
        for s, score in itertools.zip_longest(range(2), VERDICTS[letter])
    )
    name = f"{ordinal % 3:016x}"
    return Group(ordinal, 1, name, (1, 2), "1", "exact", slots)


def draw(letters, num_groups, num_prompts=0, **config):
    """Draw from a stream whose k-th prompt has the fate of letter k (repeating)."""
    rounds = []

    def sample(ordinals, ahead):
        rounds.append(len(ordinals))
        return [group(k, letters[k % len(letters)]) for k in ordinals]

    options = {"group_size": 2, "generation_prompts_factor": 1.0, **config}
    settings = RolloutConfig(**options)
    batch = draw_batch(itertools.count(), sample, num_groups, settings, num_prompts=num_prompts)
    return batch, rounds


def ordinals(groups):
    return [g.ordinal for g in groups]


ALL_ROUNDS = {"max_generation_rounds": 2}


@pytest.mark.parametrize(
    ("letters", "num_groups", "options", "kept", "dropped", "surplus", "sizes", "starved"),
    [
        # 0 and 3 qualify in the first round, 4 and 7 in the second.
        ("mrwm", 4, {}, [0, 3, 4, 7], [1, 2, 5, 6], [], [4, 4], False),
        ("mmr", 3, {"generation_prompts_factor": 3.0}, [0, 1, 3], [2, 5, 8], [4, 6, 7], [9], False),
        # Without the filter every complete group is kept; 3 is incomplete and replaced.
        ("mrwi", 6, {"dynamic_sampling": False}, [0, 1, 2, 4, 5, 6], [3], [], [6, 1], False),
        ("mwww", 4, ALL_ROUNDS, [0, 4], [1, 2, 3, 5, 6, 7], [], [4, 4], True),
        (
            *("miww", 4, {**ALL_ROUNDS, "starvation_policy": "relax"}),
            *([0, 4, 2, 3], [1, 5, 6, 7], [], [4, 4], True),
        ),
        # A batch that is full at the last round is not starved; 0 is no limit of rounds.
        ("mw", 2, ALL_ROUNDS, [0, 2], [1, 3], [], [2, 2], False),
        ("w" * 50 + "m", 1, {"max_generation_rounds": 0}, [50], [*range(50)], [], [1] * 51, False),
    ],
)
def test_a_group_is_kept_dropped_or_left_over(
    letters, num_groups, options, kept, dropped, surplus, sizes, starved
):
    batch, rounds = draw(letters, num_groups, **options)
    found = (ordinals(batch.kept), ordinals(batch.dropped), ordinals(batch.surplus))
    assert found == (kept, dropped, surplus)
    assert (rounds, batch.starved) == (sizes, starved)
    assert batch.consumed() == sorted(kept + dropped)


def test_later_rounds_can_shrink_to_what_is_missing():
    batch, rounds = draw("mrmr" * 4 + "m" * 40, 16, shrink_rounds=True)
    # 8 of 16 kept; 8 missing at a share of one half, plus a quarter: 20, cut to the full 16
    assert rounds == [16, 16]
    batch, rounds = draw("mmmr", 16, shrink_rounds=True)
    # 12 of 16 kept, 4 missing: 4 * 16 / 12 * 1.25 = 6.67
    assert rounds == [16, 7]
    assert ordinals(batch.kept)[-4:] == [16, 17, 18, 20]
    assert ordinals(batch.surplus) == [21, 22]


def test_starvation_with_no_group_at_all_gives_an_empty_batch():
    batch, _ = draw("w", 3, max_generation_rounds=2)
    assert (batch.kept, batch.starved, batch.consumed()) == ([], True, list(range(6)))
    metrics = batch_metrics(batch)
    assert metrics["ds/kept_frac"] == 0.0
    assert metrics["ds/all_wrong_frac"] == 1.0
    assert "ds/samples_per_trained_sample" not in metrics


def test_starvation_can_fail_loudly():
    with pytest.raises(ConfigError, match=r"4 groups must qualify within 2 .* got 2 of 8; give"):
        draw("mwww", 4, max_generation_rounds=2, starvation_policy="raise")


@pytest.mark.parametrize(
    ("letters", "options", "words"),
    [
        ("w", {}, "got 6 all wrong, 0 all right, 0 incomplete; .* try easier problems"),
        ("r", {}, "got 0 all wrong, 6 all right, 0 incomplete; .* try harder problems"),
        ("wr", {"shrink_rounds": True}, "got 3 all wrong, 3 all right, .* none with both"),
        ("i", {}, "0 all right, 6 incomplete; raise `rollout.max_prompt_tokens`"),
        ("i", {"dynamic_sampling": False}, "0 all right, 6 incomplete; raise"),
        ("w", {"starvation_policy": "relax"}, "got 6 all wrong"),
    ],
)
def test_rounds_without_a_limit_end_after_one_pass_that_finds_no_group(letters, options, words):
    with pytest.raises(ConfigError, match=f"in one pass over the prompts, .* {words}"):
        draw(letters, 2, max_generation_rounds=0, num_prompts=5, **options)


@pytest.mark.parametrize("num_prompts", [5, 6, 20])
def test_rounds_without_a_limit_keep_what_a_pass_has_found(num_prompts):
    whole, rounds = draw("w" * 4 + "m", 2, max_generation_rounds=0, num_prompts=num_prompts)
    assert (ordinals(whole.kept), rounds, whole.starved) == ([4, 9], [2] * 5, False)
    fates = "wm" + "w" * 1000
    batch, _ = draw(fates, 2, max_generation_rounds=0, num_prompts=num_prompts)
    assert (ordinals(batch.kept), batch.starved) == ([1], True)
    assert num_prompts <= len(batch.dropped) - 1 <= num_prompts + 1


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
        assert all(g.num_right in (0, 2) for g in batch.dropped)
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
        return [group(k, "pwr"[k % 3]) for k in ordinals]

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


@pytest.mark.parametrize(
    ("fates", "size", "options", "looked_at", "wanted"),
    [
        # The round is likely to fill the batch; little of it qualifies.
        ("mm", 4, {}, [4, 5, 6, 7], [0, 0, 0]),
        ("ww", 4, {}, [4, 5, 6, 7], [0, 4, 4]),
        # One of two qualified, so four of eight will, and four more take eight and a quarter.
        ("mw", 8, {"shrink_rounds": True}, [*range(8, 16)], [0, 0, 8]),
        # It is the last one that is allowed.
        ("ww", 4, {"max_generation_rounds": 1}, [], [0, 4, 4]),
    ],
)
def test_a_round_asks_for_what_its_ended_groups_make_likely(
    fates, size, options, looked_at, wanted
):
    rounds = []

    def sample(ordinals, ahead):
        ended = [group(k, fate) for k, fate in zip(ordinals, fates, strict=False)]
        rounds.append((list(ahead.ordinals), [ahead.num_wanted(ended[:n]) for n in range(3)]))
        return [group(k, "m") for k in ordinals]

    config = RolloutConfig(group_size=2, generation_prompts_factor=1.0, **options)
    draw_batch(iter(range(100)), sample, size, config)
    assert rounds == [(looked_at, wanted)]


def surplus(*pairs):
    """Mixed groups given as (ordinal, version)."""
    return [group(ordinal, "m", version) for ordinal, version in pairs]


def versions(groups):
    return [g.oldest_version for g in groups]


def test_groups_are_dealt_oldest_first_whatever_the_shards():
    pool = surplus((9, 2), (4, 3), (7, 1), (3, 2), (1, 3))
    assert ordinals(share(pool, 0, 1)) == [7, 3, 9, 1, 4]
    assert [ordinals(share(pool, s, 2)) for s in range(2)] == [[7, 9, 4], [3, 1]]
    shares = [ordinals(share(pool, s, 7)) for s in range(7)]
    assert shares == [[7], [3], [9], [1], [4], [], []]
    assert versions(share(pool, 1, 2)) == [2, 3]


def test_old_groups_expire_and_the_oldest_young_ones_are_used():
    mine = surplus((5, 1), (2, 3), (8, 3), (6, 4))
    taken = take_over(mine, room=2, version=5, max_staleness=2)
    assert (ordinals(taken.used), ordinals(taken.carried)) == ([2, 8], [6])
    assert (taken.num_expired, taken.num_taken) == (1, 4)
    # the policy of the next iteration is version 6: what version 3 sampled is 3 old by then
    exchange = settle(taken, surplus((11, 5)), next_version=6, max_staleness=2)
    assert (ordinals(exchange.carried), exchange.num_expired) == ([6, 11], 1)
    exchange = settle(taken, surplus((11, 5)), next_version=6, max_staleness=1)
    assert (ordinals(exchange.carried), exchange.num_expired) == ([11], 2)
    assert exchange.num_undrawn == 0


def test_without_staleness_earlier_surplus_expires_whole():
    taken = take_over(surplus((5, 1), (2, 2)), room=4, version=3, max_staleness=0)
    assert (taken.used, taken.carried, taken.num_expired) == ([], [], 2)
    exchange = settle(taken, surplus((7, 3), (8, 3)), next_version=4, max_staleness=0)
    assert (exchange.carried, exchange.num_expired, exchange.num_undrawn) == ([], 2, 2)


def test_the_age_of_a_group_is_that_of_its_oldest_token():
    mixed = group(4, "m", 6)
    mixed.slots[1].versions[0] = 4
    assert group_facts([mixed, group(5, "m", 6)])["versions"] == [4, 6]


def test_metrics_count_reused_groups_in():
    config = RolloutConfig(group_size=2, generation_prompts_factor=5.0, max_staleness=1)
    taken = take_over(surplus((90, 0), (91, 2)), room=2, version=3, max_staleness=1)
    batch = draw_batch(
        itertools.count(), lambda ks, ahead: [group(k, "mmrwi"[k], 3, 4) for k in ks], 1, config
    )
    exchange = settle(taken, batch.surplus, next_version=4, max_staleness=1)
    metrics = batch_metrics(batch, exchange)
    # drawn: two mixed (one kept, one surplus) and three dropped; taken: one used, one too old
    assert (metrics["num_groups"], metrics["num_generated_groups"]) == (2, 5)
    assert (metrics["num_rollouts"], metrics["num_generated_rollouts"]) == (4, 10)
    assert metrics["num_kept_tokens"] == 2 * 3 + 2 * 4
    assert metrics["kept_response_length_mean"] == 3.5
    assert metrics["kept_accuracy_mean"] == 0.5
    assert metrics["ds/samples_per_trained_sample"] == 2.5
    assert metrics["num_dropped_groups"] == 3
    assert (metrics["ds/surplus"], metrics["ds/surplus_used"]) == (1, 1)
    assert (metrics["ds/surplus_taken"], metrics["ds/surplus_expired"]) == (2, 1)
    assert metrics["ds/kept_frac"] == 0.5


def play(letters, rooms, shards, staleness, factor):
    """Play iterations with a new number of shards each; yields what became of every ordinal."""
    config = RolloutConfig(
        group_size=2,
        generation_prompts_factor=factor,
        max_generation_rounds=3,
        max_staleness=staleness,
    )
    cursor, waiting = fresh_cursor(), []
    for iteration, (room, num_shards) in enumerate(zip(rooms, shards, strict=True), start=1):
        version = iteration - 1
        pool, waiting, consumed = waiting, [], []
        for shard in range(num_shards):

            def sample(ordinals, ahead, version=version):
                return [group(k, letters[k % len(letters)], version) for k in ordinals]

            mine = share(pool, shard, num_shards)
            taken = take_over(mine, room=room, version=version, max_staleness=staleness)
            stream = assign(cursor, shard, num_shards)
            batch = draw_batch(stream, sample, room - len(taken.used), config)
            exchange = settle(taken, batch.surplus, next_version=iteration, max_staleness=staleness)
            consumed += batch.consumed(with_surplus=True)
            waiting += exchange.carried
            yield iteration, batch, exchange, batch_metrics(batch, exchange)
        cursor = advance(cursor, consumed)


@pytest.mark.slow
@given(
    st.text("mmmrwi", min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.floats(0.5, 4.0),
)
def test_no_group_is_lost_or_trained_twice(letters, plan, staleness, factor):
    rooms, shards = zip(*plan, strict=True)
    trained, dropped, last, waiting, expired, generated = [], [], 0, [], 0, 0
    for iteration, batch, exchange, numbers in play(letters, rooms, shards, staleness, factor):
        assert (
            numbers["num_groups"]
            + numbers["num_dropped_groups"]
            + numbers["ds/surplus"]
            + numbers["ds/surplus_expired"]
            == numbers["num_generated_groups"] + numbers["ds/surplus_taken"]
        )
        assert all(0 < iteration - 1 - v <= staleness for v in versions(exchange.used))
        assert all(0 < iteration - v <= staleness for v in versions(exchange.carried))
        assert len(exchange.used) + len(batch.kept) <= rooms[iteration - 1]
        waiting = waiting if iteration == last else []
        last = iteration
        waiting += ordinals(exchange.carried)
        trained += ordinals([*exchange.used, *batch.kept])
        dropped += ordinals(batch.dropped)
        expired += exchange.num_expired
        generated += len(batch.generated())
    seen = [*trained, *dropped, *waiting]
    assert len(set(seen)) == len(seen) == generated - expired
