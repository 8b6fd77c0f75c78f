"""The resharding matrix: every layout saved, every layout loaded, compared bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.integration import ckpt_layouts as layouts
from tests.integration import ckpt_memory as memory
from tests.integration.ckpt_ranks import run_ranks

NUM_RANKS = 6


def reference():
    """Return a plain model with moments, and its state."""
    model = layouts.Zoo(seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.8, 0.95))
    layouts.fill_moments(optimizer, seed=3)
    return layouts.named(model, optimizer), {"model": model, "optimizer": optimizer}


def scenario_matrix(rank, size, folder):
    """Save under every layout what was loaded under every other; returns what was compared."""
    groups = layouts.meshes()
    expected, state = reference()
    first = memory.save(state, "plain", members=[0])
    first.shared = memory.decode_extra(memory.encode_extra(first.shared))
    snapshots, compared, names = {}, 0, list(layouts.LAYOUTS)
    for source in names:
        built = None
        if rank in layouts.members(source):
            built = load(source, groups, first, rank)
            found, wanted = map(layouts.bits, built.compared(expected))
            assert set(found) == set(expected), set(found) ^ set(expected)
            assert [n for n in found if found[n] != wanted[n]] == [], source
            snapshots[source] = layouts.bits(built.local())
    for source in names:
        built = load(source, groups, first, rank) if rank in layouts.members(source) else None
        saved = memory.save(
            built and built.state, built and built.framework, members=layouts.members(source)
        )
        for target in names:
            if rank in layouts.members(target):
                found = layouts.bits(load(target, groups, saved, rank).local())
                wanted = snapshots[target]
                assert [n for n in wanted if found[n] != wanted[n]] == [], (source, target)
                compared += len(wanted)
        dist.barrier()
    return {"compared": compared, "pairs": len(names) ** 2}


def load(name, groups, saved, rank):
    """Build a layout with other values and load it."""
    built = layouts.build(name, groups.get(name), seed=0)
    memory.load(saved, built.state, built.framework, rank=rank)
    built.finish()
    optimizer = built.state["optimizer"]
    groups_of = optimizer["param_groups"] if isinstance(optimizer, dict) else optimizer.param_groups
    for group in groups_of:
        assert (group["lr"], tuple(group["betas"])) == (0.125, (0.8, 0.95))
    return built


@pytest.mark.slow
def test_every_layout_loads_what_every_layout_saved_bit_by_bit(tmp_path):
    found = run_ranks(
        "tests.integration.test_ckpt_reshard:scenario_matrix", NUM_RANKS, tmp_path, timeout=600
    )
    assert {result["pairs"] for result in found} == {len(layouts.LAYOUTS) ** 2} == {289}
    assert sum(result["compared"] for result in found) == 26_979
