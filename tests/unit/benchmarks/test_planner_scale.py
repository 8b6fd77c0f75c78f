"""The planning simulator plans what real ranks would plan."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planish.checkpoint.format.geometry import flat_boxes, shift
from planish.checkpoint.format.items import Columns, LocalItem
from planish.checkpoint.plan.save import plan_save
from tests.benchmarks.planner.layouts import (
    DIT_4B,
    GPT_70B,
    GPT_405B,
    LAYOUTS,
    STATES,
    Layout,
    Sizes,
)
from tests.benchmarks.planner.simulate import simulate


def random_layout(rng):
    tp, pp, dp = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 6)
    heads = tp * rng.choice([1, 2, 4])
    sizes = Sizes(
        layers=rng.randint(pp, 5),
        hidden=heads * rng.randint(1, 6),
        ffn=tp * rng.randint(1, 12),
        vocab=tp * rng.randint(1, 20),
        heads=heads,
        kv_heads=rng.choice([tp, heads]),
    )
    if rng.random() < 0.3:
        return Layout(sizes, dp=dp, rows=True, host=rng.randint(1, 4))
    return Layout(sizes, tp=tp, pp=pp, dp=dp, host=rng.randint(1, 4))


def test_layouts_that_nobody_could_train_are_refused():
    sizes = Sizes(layers=2, hidden=8, ffn=8, vocab=8, heads=4, kv_heads=4)
    with pytest.raises(ValueError, match="at least as many layers as pipeline stages, got 2 and 3"):
        Layout(sizes, pp=3)
    with pytest.raises(ValueError, match=r"tensor-parallel size must divide .* got 3"):
        Layout(sizes, tp=3)


def rank_items(layout, rank):
    """Return the items of one rank, from the layout alone: what its own process would collect."""
    tensor, rest = rank % layout.tp, rank // layout.tp
    data, pipeline = rest % layout.dp, rest // layout.dp
    first, last = (layout.sizes.layers * one // layout.pp for one in (pipeline, pipeline + 1))
    weights = layout.sizes.tensors(first, last)
    model, optim, begin = [], [], 0
    total = sum(one.box(tensor, layout.tp).volume for one in weights)
    low, high = (total * one // layout.dp for one in (data, data + 1))
    for one in weights:
        box = one.box(tensor, layout.tp)
        if layout.rows:
            chunk = -(-one.shape[0] // layout.dp)
            rows = range(one.shape[0])[data * chunk : (data + 1) * chunk]
            kept = flat_boxes(
                one.shape,
                *(row * int(np.prod(one.shape[1:])) for row in (rows.start, rows.stop)),
            )
            model.append(LocalItem(one.spec(), tuple(kept)))
        else:
            model.append(LocalItem(one.spec(), (box,)))
        part = [min(max(edge - begin, 0), box.volume) for edge in (low, high)]
        if part[1] > part[0]:
            boxes = tuple(shift(piece, box.offsets) for piece in flat_boxes(box.lengths, *part))
            optim += [LocalItem(one.spec(state), boxes) for state in STATES]
        begin += box.volume
    return model + optim


@pytest.mark.slow
def test_64_random_layouts_are_planned_as_separate_ranks_would_be():
    rng = random.Random(17)
    for _ in range(64):
        layout = random_layout(rng)
        split = rng.choice([64, 1000, 64 << 20])
        wires = [
            Columns.from_items(rank_items(layout, rank)).encode() for rank in range(layout.ranks)
        ]
        real = plan_save(map(Columns.decode, wires), hosts=layout.hosts, split_bytes=split)
        made = plan_save(layout.columns(), hosts=layout.hosts, split_bytes=split)
        assert [made.wire(rank) for rank in range(layout.ranks)] == [
            real.wire(rank) for rank in range(layout.ranks)
        ]
        for one, other in zip(
            vars(made.metadata({}).shards).values(),
            vars(real.metadata({}).shards).values(),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
        assert made.sizes.sum() == real.sizes.sum() > 0


@pytest.mark.parametrize(
    ("sizes", "billions"), [(DIT_4B, 3.95), (GPT_70B, 70.56), (GPT_405B, 405.88)]
)
def test_the_models_have_the_published_sizes(sizes, billions):
    assert round(sizes.num_parameters / 1e9, 2) == billions


def test_the_layouts_have_the_published_ranks():
    assert {name: layout.ranks for name, layout in LAYOUTS.items()} == {
        "dit-4b-32": 32, "dit-4b-128": 128, "gpt-70b-2400": 2400, "gpt-70b-4800": 4800,
        "gpt-405b-8960": 8960, "gpt-405b-16384": 16384, "gpt-405b-65536": 65536,
    }  # fmt: skip


def test_a_simulation_reports_what_was_planned():
    sizes = Sizes(layers=4, hidden=64, ffn=128, vocab=256, heads=8, kv_heads=2)
    layout = Layout(sizes, tp=2, pp=2, dp=4)
    report = simulate(layout)
    counts = report.counts
    # Two layers of twelve tensors a stage, two outer ones in all, and the optimizer's slices.
    assert counts["ranks"] == 16
    assert counts["items"] > 16 * 24 + 8 + 16
    # Two bytes of the model and three states of four bytes, and headers.
    assert counts["written_bytes"] / sizes.num_parameters == pytest.approx(14, rel=0.35)
    assert counts["written_bytes"] / sizes.num_parameters > 14
    assert counts["wanted_over_unique_bytes"] > 1.4
    assert counts["tree_depth"] == 2
    assert counts["largest_message_bytes"] == pytest.approx(
        8 * counts["column_bytes_per_rank"], rel=0.05
    )
    assert set(report.watch.cpu) >= {"decode", "gather", "dedup", "validate", "offsets", "share"}
    assert report.watch.wall["cached_plan"] < 50e-3
    assert report.summary["plan_wall_s"] > 0
