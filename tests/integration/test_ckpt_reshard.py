"""The resharding matrix: every layout saved, every layout loaded, compared bit by bit."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planish.checkpoint import api
from planish.checkpoint.adapters.base import RandomStreams
from planish.checkpoint.adapters.loader_state import LoaderShard
from tests import thin
from tests.integration import ckpt_engine as engine
from tests.integration import ckpt_layouts as layouts
from tests.integration.ckpt_forks import run_ranks
from tests.integration.ckpt_layouts import Zoo, bits, fill_moments, named
from tests.integration.megatron_model import Layout, build

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


FRAMEWORK = {"actor": "megatron", "critic": "fsdp2"}


class Prompts:
    """A loader whose ranks hold groups of prompts."""

    num_readers = 1

    def __init__(self, dp_rank, dp_size, groups=()):
        self.dp_rank, self.dp_size, self.groups = dp_rank, dp_size, list(groups)

    def ckpt_common(self):
        return {"next": 9}

    def ckpt_shards(self):
        return [LoaderShard(self.dp_rank, 0, buffer=self.groups)]

    def ckpt_restore(self, common, shards):
        self.groups = [group for shard in shards for group in shard.buffer]


def actor(layout, seed):
    model = build(layout, seed)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=seed)}


def critic(size, seed):
    model = Zoo(seed)
    if size > 1:
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=seed)}


def scenario_roles(rank, size, folder):
    """Save an actor of tp=2 with a critic of FSDP2 and load them under other layouts."""
    wide, deep = Layout(2, 1), Layout(1, 4)
    whole = build(Layout(1, 1), seed=1)
    wanted = bits(deep.use().cut(dict(whole.named_parameters())))
    single = critic(1, seed=3)
    fill_moments(single["optimizer"], seed=2)
    state = {"actor": actor(wide, 1), "critic": critic(size, 3)}
    for parameter, source in zip(
        state["critic"]["model"].parameters(), single["model"].parameters(), strict=True
    ):
        moments = single["optimizer"].state[source]
        mesh, placements = parameter.device_mesh, parameter.placements
        state["critic"]["optimizer"].state[parameter] = {
            "step": moments["step"],
            **{
                key: torch.distributed.tensor.distribute_tensor(moments[key], mesh, placements)
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
    state["critic"]["extra"] = {"kl": 0.25}
    state["actor"]["dataloader"] = Prompts(rank, size, [{"ordinal": rank}])
    state["actor"]["random"] = RandomStreams(5, 1, {"dp": rank}, {"dp": size})
    wide.use()
    api.save(f"file://{folder}/both", state, FRAMEWORK, async_=False, step=1).result(120)
    expected = float(torch.rand(()))

    target = {"actor": actor(deep, 8), "critic": critic(1, 9)}
    target["critic"]["extra"] = {}
    target["actor"]["dataloader"] = Prompts(rank, size)
    target["actor"]["random"] = RandomStreams(5, 1, {"dp": rank}, {"dp": size})
    deep.use()
    info = api.load(f"file://{folder}/both", target, {"actor": "megatron", "critic": "ddp"})
    assert bits(dict(target["actor"]["model"].named_parameters())) == wanted
    found, source = named(*pair(target["critic"])), named(*pair(single))
    assert bits(found) == bits(source)
    assert target["critic"]["extra"] == {"kl": 0.25}
    assert target["actor"]["dataloader"].groups == [{"ordinal": rank}]
    assert (info.facts["rng"], info.facts["loader"]) == ("exact", "exact")
    assert float(torch.rand(())) == expected
    return sorted(info.roles)


def pair(state):
    return state["model"], state["optimizer"]


@pytest.mark.slow
def test_roles_of_two_frameworks_commit_and_load_together(tmp_path):
    run = "tests.integration.test_ckpt_reshard:scenario_roles"
    assert run_ranks(run, 4, tmp_path, timeout=300) == [["actor", "critic"]] * 4
