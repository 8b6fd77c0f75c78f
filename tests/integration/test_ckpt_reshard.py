"""The resharding matrix: every layout saved, every layout loaded, compared bit by bit."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests import thin
from tests.integration import ckpt_engine as engine
from tests.integration import ckpt_layouts as layouts
from tests.integration.ckpt_forks import run_ranks

NUM_RANKS = 6


def reference():
    """Return a plain model with moments, and its state."""
    model = layouts.Zoo(seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.8, 0.95))
    layouts.fill_moments(optimizer, seed=3)
    return layouts.named(model, optimizer), {"model": model, "optimizer": optimizer}


def scenario_matrix(rank, size, folder, *, every):
    """Save under every layout what was loaded under others; returns what was compared.

    Of the pairs that begin or end with a layout it takes one in `every`.
    """
    meshes, groups = layouts.meshes(), engine.groups()
    expected, state = reference()
    first = f"file://{folder}/first"
    if rank == 0:
        engine.save(first, state, "plain", group=groups[1])
    dist.barrier()
    snapshots, compared, names = {}, 0, list(layouts.LAYOUTS)
    places = itertools.product(range(len(names)), repeat=2)
    pairs = [(names[n], names[m]) for n, m in places if (n + m) % every == 0]
    for name in names:
        if rank in layouts.members(name):
            built = load(name, meshes, groups, first)
            found, wanted = map(layouts.bits, built.compared(expected))
            assert set(found) == set(wanted), set(found) ^ set(wanted)
            assert [n for n in found if found[n] != wanted[n]] == [], name
            snapshots[name] = layouts.bits(built.local())
            group = groups[len(layouts.members(name))]
            engine.save(f"file://{folder}/{name}", built.state, built.framework, group=group)
    dist.barrier()
    for source, target in pairs:
        if rank in layouts.members(target):
            found = layouts.bits(load(target, meshes, groups, f"file://{folder}/{source}").local())
            wanted = snapshots[target]
            assert [n for n in wanted if found[n] != wanted[n]] == [], (source, target)
            compared += len(wanted)
    return {"compared": compared, "pairs": len(pairs)}


def load(name, meshes, groups, place):
    """Build a layout with other values and load it."""
    built = layouts.build(name, meshes.get(name), seed=0)
    group = groups[len(layouts.members(name))]
    _, facts = engine.load(place, built.state, built.framework, group=group)
    built.finish()
    assert (facts["missing"], facts["unexpected"]) == ([], [])
    optimizer = built.state["optimizer"]
    groups_of = optimizer["param_groups"] if isinstance(optimizer, dict) else optimizer.param_groups
    for options in groups_of:
        assert (options["lr"], tuple(options["betas"])) == (0.125, (0.8, 0.95))
    return built


@pytest.mark.slow
def test_every_layout_loads_what_every_layout_saved_bit_by_bit(tmp_path):
    scenario, every = "tests.integration.test_ckpt_reshard:scenario_matrix", 1 if thin.full else 3
    found = run_ranks(scenario, NUM_RANKS, tmp_path, timeout=600, every=every)
    assert {result["pairs"] for result in found} == {225 // every}
    assert sum(result["compared"] for result in found) == (21_330 if thin.full else 7_110)
