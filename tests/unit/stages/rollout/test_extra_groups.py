import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.records.stream import advance, assign, fresh_cursor
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.extra_groups import group_facts, settle, share, take_over
from planish.stages.rollout.metrics import batch_metrics
from planish.stages.rollout.sampler import draw_batch
from tests.unit.stages.rollout.test_sampler import group, ordinals


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
