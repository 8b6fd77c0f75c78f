"""The trainers on an accelerator give what they give on the CPU."""

import pytest
import torch

from planish.algorithms import build_algorithm
from planish.base.parallel import Grid
from planish.models.adapters import Adapters
from planish.models.packing import attend, pack_rows
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import Trainer
from tests.gpu.models import DEVICE, HALF, save_random, uneven_batch
from tests.unit.algorithms.batches import value_step, whole_step
from tests.unit.stages.train.runs import (
    TINY,
    TINY_CRITIC,
    random_rollouts,
    rewards_for,
    start_run,
)

CPU = torch.device("cpu")
SIZES = {"dense": {}, "moe": {"num_experts": 4, "expert_intermediate_size": 32}}


@pytest.fixture(scope="module", params=list(SIZES))
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return start_run(f"file://{folder}/root", **SIZES[request.param])


@pytest.fixture(params=["fsdp2", "megatron"])
def trainer(request):
    if request.param == "megatron":
        pytest.importorskip("megatron.core")
    return request.param


def batch_of(tiny, algorithm):
    rollouts = random_rollouts(tiny.policy, 5)
    batch = train_batch(rollouts, rewards_for(rollouts, 6))
    return algorithm.advantages(batch.updated(old_logprobs=batch.rollout_logprobs - 0.05))


def trainer_of(tiny, device, *, critic=None, adapters=None, **changes):
    return Trainer(
        TrainConfig(**{**TINY, "device": "auto", **changes}), tiny.policy_pin,
        temperature=1.0, seed=3, grid=Grid(), device=device, critic=critic, adapters=adapters,
    )  # fmt: skip


def one_step(trainer, batch, algorithm):
    def loss(logprobs, entropy, micro):
        return algorithm.loss(logprobs, entropy, micro, whole_step(algorithm, batch))

    return trainer.step(batch, loss, learning_rate=5e-4)


def first_moments(trainer):
    """After one step a tenth of the clipped gradient."""
    state = trainer.state().parts["optimizer"]
    return {
        name: torch.as_tensor(getattr(x, "tensor", x)).float().cpu()
        for name, x in state.items()
        if name.endswith(".exp_avg")
    }


@pytest.mark.parametrize("packing", [True, False])
def test_float32_is_that_of_the_cpu(tiny, trainer, packing):
    algorithm = build_algorithm({"name": "dapo"})
    batch = batch_of(tiny, algorithm)
    ours = trainer_of(tiny, DEVICE, trainer=trainer, packing=packing)
    wanted = trainer_of(tiny, CPU, packing=packing)
    for seen, right in zip(ours.logprobs(batch)[:2], wanted.logprobs(batch)[:2], strict=True):
        assert (seen - right).abs().max() < 1e-4
    metrics = one_step(ours, batch, algorithm)
    assert metrics == pytest.approx(one_step(wanted, batch, algorithm), rel=1e-3, abs=1e-5)
    if trainer == "fsdp2":
        theirs = first_moments(wanted)
        for name, moment in first_moments(ours).items():
            assert (moment - theirs[name]).abs().max() < 1e-5, name
    ours.close()


@pytest.mark.parametrize("packing", [True, False])
def test_bfloat16_is_near_float32(tiny, trainer, packing):
    algorithm = build_algorithm({"name": "dapo"})
    batch = batch_of(tiny, algorithm)
    mask = batch.policy_mask
    ours = trainer_of(tiny, DEVICE, trainer=trainer, packing=packing, compute_dtype="bfloat16")
    gap = (ours.logprobs(batch)[0] - batch.rollout_logprobs)[mask].abs()
    assert 0 < gap.mean() < 0.02
    metrics = one_step(ours, batch, algorithm)
    wanted = one_step(trainer_of(tiny, CPU), batch, algorithm)
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    ours.close()


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}])
def test_bfloat16_twice_gives_equal_bits(tiny, changes):
    algorithm = build_algorithm({"name": "dapo"})
    batch = batch_of(tiny, algorithm)
    seen = []
    for _ in range(2):
        trainer = trainer_of(tiny, DEVICE, compute_dtype="bfloat16", **changes)
        metrics = one_step(trainer, batch, algorithm)
        seen.append((metrics, {n: p.cpu() for n, p in trainer.policy.parameters.items()}))
    assert seen[0][0] == seen[1][0]
    for name, weight in seen[0][1].items():
        assert torch.equal(weight, seen[1][1][name]), name


def test_equal_bits_of_half_a_billion(tmp_path):
    """Long rows over many blocks of the device, whose sums come in another order each time."""
    pin = save_random(tmp_path, HALF)
    batch = uneven_batch(16, prompt=64, longest=960, vocabulary=HALF.vocabulary)
    algorithm = build_algorithm({"name": "dapo"})
    batch = algorithm.advantages(batch)
    config = TrainConfig(compute_dtype="bfloat16", tokens_per_microbatch=8192, learning_rate=1e-5)
    seen = []
    for _ in range(2):
        trainer = Trainer(config, pin, temperature=1.0, seed=0, grid=Grid(), device=DEVICE)
        metrics = one_step(trainer, batch, algorithm)
        seen.append((metrics, {n: p.detach() for n, p in trainer.policy.parameters.items()}))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(weight, seen[1][1][name]) for name, weight in seen[0][1].items())


def test_a_critic_learns(tiny):
    algorithm = build_algorithm({"name": "vapo"})
    rollouts = random_rollouts(tiny.policy, 5)
    batch = train_batch(rollouts, rewards_for(rollouts, 6))
    batch = batch.updated(old_logprobs=batch.rollout_logprobs)
    critic = CriticConfig(**TINY_CRITIC)
    ours, wanted = (trainer_of(tiny, place, critic=critic) for place in (DEVICE, CPU))
    values = ours.values(batch)
    assert (values - wanted.values(batch)).abs().max() < 1e-4
    ready = algorithm.advantages(batch.updated(values=values))

    def loss(values, micro):
        return algorithm.value_loss(values, micro, value_step(algorithm, ready))

    seen, right = (t.value_step(ready, loss, learning_rate=1e-3) for t in (ours, wanted))
    assert seen == pytest.approx(right, rel=1e-3, abs=1e-5)


def test_adapters_learn(tiny):
    pytest.importorskip("peft")
    algorithm = build_algorithm({"name": "dapo"})
    batch = batch_of(tiny, algorithm)
    adapters = Adapters(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
    ours, wanted = (trainer_of(tiny, place, adapters=adapters) for place in (DEVICE, CPU))
    seen, right = (one_step(t, batch, algorithm) for t in (ours, wanted))
    assert seen == pytest.approx(right, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 8, 64), (8, 2, 64), (12, 2, 128)])
def test_rows_end_to_end_never_see_each_other(heads, groups, size):
    """The kernel for rows of any length against attention of each row alone in float64."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 700, 2, 129, 64]).numpy()
    packing = pack_rows(lengths, 700).to(DEVICE)
    total = int((lengths - 1).sum())
    parts = [torch.randn(total, n, size) for n in (heads, groups, groups)]
    ours = [part.to(DEVICE, torch.bfloat16).requires_grad_() for part in parts]
    seen = attend(*ours, packing)
    weights = torch.randn_like(seen)
    (seen * weights).sum().backward()
    exact = [part.detach().double().requires_grad_() for part in ours]
    rows = []
    for begin, end in zip(packing.bounds[:-1].tolist(), packing.bounds[1:].tolist(), strict=True):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in exact)
        read = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads != groups
        )
        rows.append(read[0].transpose(0, 1))
    right = torch.cat(rows)
    (right * weights.double()).sum().backward()
    for mine, theirs in [
        (seen, right),
        *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True)),
    ]:
        assert (mine.double() - theirs).norm() / theirs.norm() < 1e-2
