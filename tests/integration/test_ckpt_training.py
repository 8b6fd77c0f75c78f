"""Training goes on after a reshard as if it had never stopped."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planish.checkpoint.adapters.base import RandomStreams
from tests.integration import ckpt_engine as engine
from tests.integration.ckpt_forks import run_ranks

BATCH, WIDTH, STEPS = 12, 9, 6


class Model(nn.Module):
    """A small network with a tied pair of weights; its sizes divide by nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.head.weight


def model_of(seed):
    torch.manual_seed(seed)
    return Model()


def batch_of(step):
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x.float(), x.flip(1).float()


def fsdp2(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model, optimizer, schedule, steps, rank=0, size=1, group=None):
    """Train on this rank's rows; returns the loss of the whole batch at each step."""
    losses = []
    for step in steps:
        x, y = (part.chunk(size)[rank] for part in batch_of(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        if schedule is not None:
            schedule.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total, group=group)
        losses.append(float(total / size))
    return losses


def state_of(model, steps_done, rank=0, size=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    streams = RandomStreams(7, steps_done, {"dp": rank}, {"dp": size})
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedule,
        "random": streams,
        "extra": {"step": steps_done},
    }


def moments(state):
    """Return parameters and moments as this rank's tensors, by name."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        found[name] = parameter
        for key, value in state["optimizer"].state[parameter].items():
            found[f"{name}.{key}"] = value
    return found


def whole(tensors):
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def scenario_fsdp2(rank, size, folder, stages):
    """Train two steps under each number of ranks; save behind and load before each."""
    groups = engine.groups()
    meshes = {n: DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("dp",)) for n in stages}
    losses, equal, done = [], True, 0
    for number, ranks in enumerate(stages):
        if rank < ranks:
            state = state_of(fsdp2(model_of(seed=number), meshes[ranks]), done, rank, ranks)
            if number:
                report, _ = engine.load(
                    f"file://{folder}/step-{done}", state, "fsdp2", group=groups[ranks]
                )
                before = torch.load(folder / f"whole-{done}.pt")
                found = whole(moments(state))
                assert set(found) == set(before)
                equal = equal and all(torch.equal(found[n], before[n]) for n in before)
                assert state["extra"]["step"] == done
                assert report["rng"] == ("exact" if ranks == stages[number - 1] else "reseeded")
            parts = state["model"], state["optimizer"], state["scheduler"]
            group = groups[ranks]
            losses += train(*parts, range(done, done + 2), rank, ranks, group)
            state["extra"]["step"] = done + 2
            engine.save(f"file://{folder}/step-{done + 2}", state, "fsdp2", group=group)
            found = whole(moments(state))
            if rank == 0:
                torch.save(found, folder / f"whole-{done + 2}.pt")
        done += 2
        dist.barrier()
    return {"losses": losses, "equal": equal}


def uninterrupted():
    state = state_of(model_of(seed=0), 0)
    parts = state["model"], state["optimizer"], state["scheduler"]
    return train(*parts, range(STEPS))


@pytest.mark.slow
def test_four_then_two_then_three_ranks_train_like_one_run(tmp_path):
    run = "tests.integration.test_ckpt_training:scenario_fsdp2"
    found = run_ranks(run, 4, tmp_path, timeout=300, stages=[4, 2, 3])
    assert [result["equal"] for result in found] == [True] * 4
    expected = uninterrupted()
    assert expected[-1] < 0.85 * expected[0]
    assert found[0]["losses"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_the_same_number_of_ranks_goes_on_to_the_bit(tmp_path):
    run = "tests.integration.test_ckpt_training:scenario_fsdp2"
    stopped = run_ranks(run, 3, tmp_path / "stopped", timeout=300, stages=[3, 3, 3])
    whole_run = "tests.integration.test_ckpt_training:scenario_whole"
    straight = run_ranks(whole_run, 3, tmp_path / "straight", timeout=300)
    assert stopped[0]["losses"] == straight[0]
    assert all(result["equal"] for result in stopped)


def scenario_whole(rank, size, folder):
    mesh = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("dp",))
    state = state_of(fsdp2(model_of(seed=0), mesh), 0, rank, size)
    parts = state["model"], state["optimizer"], state["scheduler"]
    return train(*parts, range(STEPS), rank, size)
