"""Selection of groups: the order of preference, and what becomes of tokens that are left out."""

import json
import math

import pytest
import torch

from planish import store
from planish.algorithms import ALGORITHMS, build_algorithm
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.tppo import Tppo, TppoConfig
from planish.base.config import (
    config_sha256,
    load_preset,
    merge,
    parse_section,
    preset_names,
    resolve_config,
)
from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.io import read_manifest
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.ranks.job import TrainJob, draw_order, read_inputs
from planish.stages.train.selection import preferred_groups, select_groups
from planish.stages.train.update import run_update
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config, train_once
from tests.unit.stages.train.tables import TableTrainer, batch_of, table_config
from tests.unit.stages.train.windows import add_window_iteration

CRITIC = CriticConfig(warmup_iterations=0, learning_rate=0.1, pretrain_iterations=0)


def rows(*groups):
    """Build a batch from (group index, verdicts): `r` right, `w` wrong, `.` unfinished.

    A `-` is unfinished and has got no token in this iteration.
    """
    facts = [(group, verdict) for group, verdicts in groups for verdict in verdicts]
    marks = [verdict for _, verdict in facts]
    response = ragged_mask([3] * len(facts), 3)
    fresh = torch.tensor([mark != "-" for mark in marks])[:, None]
    return make_batch(
        response & fresh & (torch.arange(3) > 0),
        response=response,
        group=[group for group, _ in facts],
        reward=[float(mark == "r") for mark in marks],
        finished=[mark in "rw" for mark in marks],
    )


def mixed_first(max_groups, **changes):
    return table_config(selection="mixed_first", max_groups=max_groups, **changes)


@pytest.mark.parametrize(
    ("groups", "places", "wanted"),
    [
        # Mixed groups come first, then those with many unfinished responses, then the rest.
        (["rr.", "www", "r.w", "...", "rrr", "w..", "wr"], None, [2, 6, 3, 5, 0, 1, 4]),
        # A response that got no token is no reason to prefer its group.
        (["w--", "w.", "--", "w"], None, [1, 0, 2, 3]),
        # Ties are settled by the place in the stream of prompts.
        (["rw", "w.", "rw", "w.", "ww", "ww"], [40, 31, 20, 30, 11, 10], [2, 0, 3, 1, 5, 4]),
    ],
)
def test_groups_are_preferred_by_their_verdicts_and_then_by_their_places(groups, places, wanted):
    assert preferred_groups(rows(*enumerate(groups)), places) == wanted


def test_the_reward_of_an_unfinished_response_makes_no_group_mixed():
    batch = rows((0, "r."), (1, "rw"))
    batch = batch.updated(accuracy=torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert preferred_groups(batch) == [1, 0]


def test_neither_the_order_of_rows_nor_that_of_shards_matters():
    batch = rows((0, "rw"), (1, "w.."), (2, "ww."), (3, "r."), (4, "rw"), (5, "ww"))
    places = [7, 2, 9, 4, 5, 0]
    wanted = [places[g] for g in preferred_groups(batch, places)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shuffled = batch.take(torch.randperm(len(batch), generator=generator))
        # other shards number the groups in another way
        number = torch.randperm(6, generator=generator)
        moved = shuffled.updated(group_index=number[shuffled.group_index.long()].int())
        at = {int(new): old for old, new in enumerate(number)}
        found = preferred_groups(moved, [places[at[g]] for g in range(6)])
        assert [places[at[g]] for g in found] == wanted


def test_whole_groups_are_selected_and_their_tokens_stay():
    batch = rows((3, "r.w"), (1, "..."), (0, "rr"), (3, "w"))
    selection = select_groups(batch, mixed_first(2))
    assert selection.chosen.tolist() == [True] * 6 + [False] * 2 + [True]
    kept = selection.apply(batch)
    assert kept.policy_mask.any(1).tolist() == selection.chosen.tolist()
    assert torch.equal(kept.value_mask, batch.value_mask)
    assert selection.metrics(batch) == {"num_selected_groups": 2.0, "num_unselected_tokens": 4.0}


def test_without_selection_the_batch_is_the_same_object_and_nothing_is_counted():
    batch = rows((0, "rw"), (1, ".."))
    selection = select_groups(batch, table_config())
    assert selection.apply(batch) is batch
    assert selection.metrics(batch) == {}


def update(trainer, algorithm, batch, config, **more):
    return run_update(
        trainer, algorithm, batch, config=config, progress=Progress(), seed=(0, 1),
        critic=CRITIC, **more,
    )  # fmt: skip


def num_trained(result):
    return sum(step.get("num_tokens", 0.0) for step in result.minibatches)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_policy_trains_as_if_the_groups_left_out_were_not_there(name):
    batch = rows((0, "ww"), (1, "rw"), (2, "rr"), (3, "wr"))
    short = torch.ones(8, 3, dtype=torch.bool)
    short[3, 2] = False
    batch = batch.updated(
        policy_mask=batch.policy_mask & short, value_mask=batch.value_mask & short
    )
    algorithm = build_algorithm({"name": name})
    config = mixed_first(2, rollouts_per_minibatch=8)
    selected, alone = TableTrainer(3, value=0.5), TableTrainer(3, value=0.5)
    result = update(selected, algorithm, batch, config)
    only = batch.take(torch.tensor([2, 3, 6, 7]))
    wanted = update(alone, algorithm, only, table_config(rollouts_per_minibatch=8))
    torch.testing.assert_close(selected.table, alone.table, atol=1e-7, rtol=0)
    assert selected.table.tolist() != [-1.0] * 3
    scalars = result.scalars
    assert (scalars["num_groups"], scalars["num_selected_groups"]) == (4.0, 2.0)
    assert scalars["zero_advantage_groups"] == wanted.scalars["zero_advantage_groups"]
    assert num_trained(result) == num_trained(wanted) == 7.0
    assert num_trained(result) + scalars["num_unselected_tokens"] == scalars["num_tokens"]
    assert result.progress.step == wanted.progress.step


def test_the_critic_trains_on_finished_responses_of_every_group():
    batch = rows((0, "ww"), (1, "rw"), (2, "rr"), (3, "w."))
    algorithm = Tppo(TppoConfig(window_tokens=3, ignored_tail_tokens=1))
    selected, whole = TableTrainer(3), TableTrainer(3)
    earlier = torch.full((8, 3), math.nan)
    earlier[:, 0] = 0.25
    config = mixed_first(1, rollouts_per_minibatch=8)
    result = update(selected, algorithm, batch, config, earlier_values=earlier)
    wanted = update(
        whole, algorithm, batch, table_config(rollouts_per_minibatch=8), earlier_values=earlier
    )
    assert torch.equal(selected.value_table, whole.value_table)
    assert torch.equal(result.values, wanted.values)
    for name in ("num_finished", "num_value_tokens", "num_missing_values", "value_loss"):
        assert result.scalars[name] == wanted.scalars[name]
    assert (result.scalars["num_missing_values"], result.scalars["num_finished"]) == (0.0, 7.0)
    # right responses of groups that were left out are not imitated either
    assert selected.order == ["critic", "policy"]
    assert num_trained(result) == 4.0


def test_groups_that_are_left_out_are_not_scored():
    seen = []

    class Spy(TableTrainer):
        def logprobs(self, batch):
            seen.append(batch.policy_mask.any(1).tolist())
            return super().logprobs(batch)

    update(Spy(3), Dapo(DapoConfig()), batch_of(), mixed_first(1))
    assert seen == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"selection": "mixed_first", "max_groups": 0}, "train.max_groups"),
        ({"selection": "mixed"}, "train.selection"),
    ],
)
def test_a_selection_that_is_none_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(TrainConfig, table, section="train")


@pytest.mark.parametrize(("name", "most"), [("dapo-tiny", 128), ("tppo-tiny", 1024)])
def test_a_limit_that_could_leave_out_nothing_is_refused(name, most):
    preset = load_preset(name)
    on = ["train.selection=mixed_first"]
    resolve_config(merge(preset, overrides=[*on, f"train.max_groups={most - 1}"]))
    with pytest.raises(ConfigError, match=f"below the {most} groups .*got {most}"):
        resolve_config(merge(preset, overrides=[*on, f"train.max_groups={most}"]))


@pytest.mark.parametrize(
    ("presets", "off", "on"),
    [
        (
            preset_names(),
            ["train.selection=all"],
            ["train.selection=mixed_first", "train.max_groups=2"],
        ),
        (preset_names(), ["critic.min_finished=1"], ["critic.min_finished=2"]),
        (["dapo-tiny"], ["rollout.max_staleness=0"], ["rollout.max_staleness=2"]),
    ],
)
def test_a_setting_changes_the_digest_only_where_it_is_on(presets, off, on):
    for name in presets:
        plain = resolve_config(load_preset(name))
        without = resolve_config(merge(load_preset(name), overrides=off))
        assert config_sha256(without) == config_sha256(plain)
        given = {word.partition("=")[0].partition(".")[2] for word in on}
        section = on[0].partition(".")[0]
        assert not given & set(plain[section])
        table = resolve_config(merge(load_preset(name), overrides=on))[section]
        assert set(table) - set(plain[section]) == given


def test_shards_that_draw_in_turns_have_the_places_of_the_stream():
    assert draw_order([4]) == [0, 1, 2, 3]
    assert draw_order([2, 2, 1]) == [0, 3, 1, 4, 2]
    assert draw_order([]) == []


def job_of(tiny):
    rewards = layout.rewards(tiny.root, 1)
    pin = read_manifest(rewards).ref(rewards).pin()
    return TrainJob(
        tiny.root, tiny.config, tiny.digest, 1, tiny.num_shards, tiny.policy_pin, "", pin
    )


@pytest.mark.parametrize("windows", [False, True])
def test_the_places_of_groups_are_their_ordinals_where_no_prompt_was_passed_over(windows, tmp_path):
    tiny = start_run(f"file://{tmp_path}/root")
    if windows:
        add_window_iteration(tiny, 1, 6)
    else:
        add_iteration(tiny, 1)
    inputs = read_inputs(job_of(tiny))
    assert inputs.places == [0, 2, 4, 6, 1, 3, 5, 7]
    assert (inputs.ordinals is not None) == windows


def test_the_train_stage_selects(tmp_path):
    root = f"file://{tmp_path}/root"
    tiny = start_run(root, tiny_config("dapo", selection="mixed_first", max_groups=3))
    train_once(tiny, 1, "", add_iteration(tiny, 1), tmp_path)
    report = json.loads(store.read(layout.update(root, 1)))
    scalars = report["scalars"]
    assert (scalars["num_selected_groups"], scalars["num_groups"]) == (3.0, 8.0)
    trained = sum(step.get("num_tokens", 0.0) for step in report["minibatches"])
    assert trained + scalars["num_unselected_tokens"] == scalars["num_tokens"]
    assert 0 < trained < scalars["num_tokens"]
