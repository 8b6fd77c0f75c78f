"""Models that every rank opens by its own parts: the bits of the files, and no more memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planish.base.parallel import Ranks
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import Trainer
from tests.golden.write import EXPERTS, WIDE
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_megatron_training import CPU, LAYOUTS, preload, save
from tests.integration.test_train_stage import all_tensors
from tests.unit.stages.train.runs import TINY

pytestmark = pytest.mark.slow

LARGE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_layers": 16, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 64,
}  # fmt: skip
__all__ = ["preload"]


def written(folder, **sizes):
    """Save a policy in bfloat16; returns its pin."""
    policy = build_policy(ModelConfig(**sizes, dtype="bfloat16"), 3)
    return save_policy(folder.as_uri(), policy, version=0, parents={}, attributes={}).pin()


def opened(layout, rank, size, pin, **how):
    config = TrainConfig(**TINY, **{"trainer": "megatron", **LAYOUTS[layout]})
    grid = config.grid(Ranks(rank, size))
    return Trainer(config, pin, temperature=1.0, seed=3, grid=grid, device=CPU, **how), grid


def states(rank, size, folder, *, pin, root, layouts):
    """Save what trainers begin with; returns pins."""
    pins = []
    for layout in layouts:
        critic = CriticConfig(head_std=0.5)
        trainer, grid = opened(layout, rank, size, pin, critic=critic)
        pins.append(save(trainer, f"{root}/{layout}", grid))
        trainer.close()
    return pins


@pytest.mark.parametrize(
    ("sizes", "size", "layouts"),
    [
        (WIDE, 2, ["tp2", "shards", "offload"]),
        (WIDE, 4, ["replicas", "tp2-pp2", "shards-cp4"]),
        (EXPERTS, 2, ["ep2", "shards"]),
        (EXPERTS, 4, ["tp2-ep4", "replicas-offload"]),
        (EXPERTS, 1, ["offload", "tp1"]),
    ],
)
def test_a_model_that_is_opened_by_parts_has_the_bits_of_its_files(tmp_path, sizes, size, layouts):
    pin = written(tmp_path / "policy", **sizes)
    model = load_policy(pin, dtype=torch.float32).model
    wanted = dict(model.named_parameters())
    body = {f"body.{name}": x for name, x in model.model.named_parameters()}
    found = run_ranks(
        f"{__name__}:states", size, tmp_path / "ranks", pin=pin, root=f"file://{tmp_path}",
        layouts=layouts,
    )  # fmt: skip
    for state in found[0]:
        tensors = all_tensors(state)
        heads = [tensors.pop(f"critic.head.{name}") for name in ("weight", "bias")]
        assert heads[0].std() > 0.3
        for part, names in (("model", wanted), ("critic", body)):
            held = {n: x for n, x in tensors.items() if n.startswith(f"{part}.")}
            assert held.keys() == {f"{part}.{name}" for name in names}
            assert all(torch.equal(held[f"{part}.{name}"], x) for name, x in names.items())


def peak(rank, size, folder, *, pin, small, layout):
    """Return the most host memory of opening beyond what was held, and the bytes of this rank.

    A small policy comes first: pages of libraries that a process runs first count as its own.
    """
    status = Path("/proc/self/status")

    def told(name):
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    opened(layout, rank, size, small)[0].close()
    Path("/proc/self/clear_refs").write_text("5")
    before = told("VmRSS")
    trainer, _ = opened(layout, rank, size, pin)
    most = told("VmHWM") - before
    parts = [getattr(p, "_local_tensor", p).nbytes for p in trainer.policy.parameters.values()]
    trainer.close()
    return most, 3 * sum(parts)


@pytest.mark.parametrize("layout", ["shards", "replicas", "tp4", "offload"])
def test_a_rank_opens_no_more_than_its_part(tmp_path, layout):
    """Weights and moments, a fifth of them, and the largest tensor of the files."""
    pin = written(tmp_path / "policy", **LARGE)
    small = written(tmp_path / "small", **{**LARGE, "num_layers": 1})
    for most, own in run_ranks(
        f"{__name__}:peak", 4, tmp_path / "ranks", pin=pin, small=small, layout=layout
    ):
        print(f"{layout}: {most / 2**20:.0f} MiB for {own / 2**20:.0f} MiB")
        assert most < 1.2 * own + 4 * 512 * 2048
