from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.config import parse_section, resolve_config
from planish.base.errors import ConfigError, RecordError
from planish.engines.requests import FinishReason, Output
from planish.records.io import write_set
from planish.records.prompts import PromptSet, prompt_id
from planish.records.stream import advance, assign, fresh_cursor
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Group
from planish.stages.rollout.metrics import batch_metrics
from planish.stages.rollout.sampler import draw_batch
from planish.stages.rollout.surplus import Surplus, read_surplus, settle, take_over

FATES = {"m": (1.0, 0.0), "r": (1.0, 1.0), "w": (0.0, 0.0), "i": ()}
ASKS = [[{"role": "user", "content": str(k)}] for k in range(3)]
PROMPTS = PromptSet(
    prompt_id=[prompt_id(ask, "1") for ask in ASKS],
    messages=ASKS,
    answer=["1"] * 3,
    verifier=["exact"] * 3,
    source=["sums"] * 3,
    pass_rate=np.full(3, np.nan, np.float32),
)


def group(ordinal, letter="m", version=0, length=3):
    reason = FinishReason.ERROR if letter == "i" else FinishReason.STOP
    outputs = tuple(
        Output(f"{ordinal}-{s}", [5] * length, [-0.5] * length, [version] * length, reason)
        for s in range(2)
    )
    return Group(ordinal, ordinal % 3, (1, 2), outputs, ("1", "2"), FATES[letter])


def surplus(*pairs):
    """Groups given as (ordinal, version)."""
    return Surplus.concat([Surplus.of([group(k, version=v)], PROMPTS, v) for k, v in pairs])


def test_the_default_draws_surplus_prompts_again_and_leaves_the_configuration_as_it_was():
    assert RolloutConfig().max_staleness == 0
    plain = resolve_config({})
    assert "max_staleness" not in plain["rollout"]
    assert resolve_config({"rollout": {"max_staleness": 0}}) == plain
    table = resolve_config({"rollout": {"max_staleness": 2}})["rollout"]
    assert table["max_staleness"] == 2
    assert parse_section(RolloutConfig, table, section="rollout").max_staleness == 2
    assert parse_section(RolloutConfig, plain["rollout"], section="rollout") == RolloutConfig()
    with pytest.raises(ConfigError, match="greater than or equal to 0, got -1"):
        parse_section(RolloutConfig, {"max_staleness": -1}, section="rollout")


def test_groups_are_dealt_oldest_first_whatever_the_shards():
    pool = surplus((9, 2), (4, 3), (7, 1), (3, 2), (1, 3))
    assert pool.share(0, 1).ordinals == [7, 3, 9, 1, 4]
    assert [pool.share(s, 2).ordinals for s in range(2)] == [[7, 9, 4], [3, 1]]
    assert [pool.share(s, 7).ordinals for s in range(7)] == [[7], [3], [9], [1], [4], [], []]
    assert pool.share(1, 2).versions == [2, 3]


def test_old_groups_expire_and_the_oldest_young_ones_are_used():
    mine = surplus((5, 1), (2, 3), (8, 3), (6, 4))
    taken = take_over(mine, room=2, version=5, max_staleness=2)
    assert (taken.used.ordinals, taken.left.ordinals, taken.num_expired) == ([2, 8], [6], 1)
    assert len(taken) == 4
    # the policy of the next iteration is version 6: what version 3 sampled is 3 old by then
    exchange = settle(taken, surplus((11, 5)), next_version=6, max_staleness=2)
    assert (exchange.carried.ordinals, exchange.num_expired) == ([6, 11], 1)
    exchange = settle(taken, surplus((11, 5)), next_version=6, max_staleness=1)
    assert (exchange.carried.ordinals, exchange.num_expired) == ([11], 2)


def test_without_staleness_earlier_surplus_expires_whole():
    taken = take_over(surplus((5, 1), (2, 2)), room=4, version=3, max_staleness=0)
    assert (len(taken.used), len(taken.left), taken.num_expired) == (0, 0, 2)


def test_the_age_of_a_group_is_that_of_its_oldest_token():
    mixed = group(4, version=6)
    mixed.outputs[1].versions[0] = 4
    assert Surplus.of([mixed, group(5, version=6)], PROMPTS, 7).versions == [4, 6]


def test_groups_come_back_from_disk_as_they_were_sampled(tmp_path):
    made = surplus((9, 2), (4, 3))
    uri = (tmp_path / "s").as_uri()
    pin = write_set(uri, made.rollouts, parents={}, attributes=made.attributes()).pin()
    back = read_surplus([pin])
    assert (back.ordinals, back.versions, back.num_right) == ([9, 4], [2, 3], [1, 1])
    assert back.rollouts == made.rollouts
    assert back.take([1]).rollouts.policy_version.values.tolist() == [3] * 6
    assert read_surplus([]).rollouts.num_rows == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"versions": [2]}, r"for each of its 2 groups, got \[2, 2, 1\]|got \[2, 1, 2\]"),
        ({"ordinals": None}, "`ordinals` of the surplus set .* list of counts, got None"),
        ({"num_right": [1, True]}, "`num_right` of the surplus set"),
    ],
)
def test_a_damaged_set_is_refused(tmp_path, change, text):
    made = surplus((9, 2), (4, 3))
    attributes = {**made.attributes(), **change}
    uri = (tmp_path / "s").as_uri()
    pin = write_set(uri, made.rollouts, parents={}, attributes=attributes).pin()
    with pytest.raises(RecordError, match=text):
        read_surplus([pin])


def test_metrics_count_reused_groups_in():
    config = RolloutConfig(group_size=2, generation_prompts_factor=5.0, max_staleness=1)
    taken = take_over(surplus((90, 0), (91, 2)), room=2, version=3, max_staleness=1)
    batch = draw_batch(
        itertools.count(), lambda ks: [group(k, "mmrwi"[k], 3, 4) for k in ks], 1, config
    )
    fresh = Surplus.of(batch.surplus, PROMPTS, 3)
    metrics = batch_metrics(batch, settle(taken, fresh, next_version=4, max_staleness=1))
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
        pool, waiting, consumed = Surplus.concat(waiting), [], []
        for shard in range(num_shards):

            def sample(ordinals, version=version):
                return [group(k, letters[k % len(letters)], version) for k in ordinals]

            mine = pool.share(shard, num_shards)
            taken = take_over(mine, room=room, version=version, max_staleness=staleness)
            stream = assign(cursor, shard, num_shards)
            batch = draw_batch(stream, sample, room - len(taken.used), config)
            exchange = settle(
                taken,
                Surplus.of(batch.surplus, PROMPTS, version),
                next_version=iteration,
                max_staleness=staleness,
            )
            consumed += batch.consumed(with_surplus=True)
            waiting.append(exchange.carried)
            yield iteration, batch, exchange, batch_metrics(batch, exchange)
        cursor = advance(cursor, consumed)


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
        assert all(0 < iteration - 1 - v <= staleness for v in exchange.used.versions)
        assert all(0 < iteration - v <= staleness for v in exchange.carried.versions)
        assert len(exchange.used) + len(batch.kept) <= rooms[iteration - 1]
        waiting = waiting if iteration == last else []
        last = iteration
        waiting += exchange.carried.ordinals
        trained += [*exchange.used.ordinals, *(g.ordinal for g in batch.kept)]
        dropped += [g.ordinal for g in batch.dropped]
        expired += exchange.num_expired
        generated += len(batch.generated())
    seen = [*trained, *dropped, *waiting]
    assert len(set(seen)) == len(seen) == generated - expired
