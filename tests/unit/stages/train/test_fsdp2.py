"""The trainer on a real tiny model in one process."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from planish import store
from planish.algorithms.base import Denominators, LossOutput
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.base.errors import ConfigError
from planish.base.parallel import Grid, pick_device
from planish.checkpoint import train_state as checkpoint
from planish.records import layout
from planish.records.refs import Ref
from planish.stages.train.batching import split_by_gradient, train_batch
from planish.stages.train.config import TrainConfig
from planish.stages.train.fsdp2 import decoder_layers
from planish.stages.train.model_trainer import STILL_ROWS
from planish.stages.train.ranks.job import TrainJob, write_job
from planish.stages.train.ranks.worker import main
from planish.stages.train.trainer import open_trainer
from planish.store.documents import read_json
from tests.unit.stages.train.runs import (
    TINY,
    add_iteration,
    random_rollouts,
    rewards_for,
    start_run,
)

ALGORITHM = Dapo(DapoConfig())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return start_run(f"file://{tmp_path_factory.mktemp('run')}/root")


@pytest.fixture(scope="module")
def batch(tiny):
    rollouts = random_rollouts(tiny.policy, 5)
    batch = train_batch(rollouts, rewards_for(rollouts, 6))
    # Old log-probabilities a little off, so that ratios are not all 1.
    return ALGORITHM.advantages(batch.updated(old_logprobs=batch.rollout_logprobs - 0.05))


def trainer_of(tiny, *, sets_weights=True, **changes):
    return open_trainer(
        TrainConfig(**{**TINY, **changes}), tiny.policy_pin,
        temperature=1.0, seed=3, grid=Grid(), device=CPU, sets_weights=sets_weights,
    )  # fmt: skip


def loss_over(batch, loss=ALGORITHM.loss):
    counts = ALGORITHM.counts(batch)
    denominators = Denominators(counts, counts, 1)

    def loss_fn(logprobs, entropy, micro):
        return loss(logprobs, entropy, micro, denominators)

    return loss_fn


def one_step(trainer, batch, loss=ALGORITHM.loss):
    return trainer.step(batch, loss_over(batch, loss), learning_rate=5e-4)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters.values()])


@pytest.mark.parametrize("budget", [1, 60, 200, 10**6])
def test_i1_the_token_budget_changes_neither_loss_nor_gradient(tiny, batch, budget):
    whole = trainer_of(tiny, tokens_per_microbatch=10**7)
    wanted = one_step(whole, batch)
    split = trainer_of(tiny, tokens_per_microbatch=budget)
    seen = one_step(split, batch)
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert seen[name] == pytest.approx(value, abs=1e-6, rel=1e-5), name
    # After one step the first moment is a tenth of the clipped gradient.
    ours, theirs = (t.state().parts["optimizer"] for t in (split, whole))
    for name in (n for n in ours if n.endswith(".exp_avg")):
        assert (ours[name] - theirs[name]).abs().max() < 1e-6, name


def test_logprobs_equal_those_of_a_plain_forward_pass(tiny, batch):
    seen = trainer_of(tiny, tokens_per_microbatch=64).logprobs(batch)[0]
    wanted = batch.rollout_logprobs
    assert (seen - wanted).abs().max() < 2e-5
    assert (seen[~batch.policy_mask] == 0).all()


def test_gradient_norm_is_clipped_before_the_step(tiny, batch):
    # Plain AdamW is nearly blind to the scale of a gradient, its second moment is not.
    loose, tight = trainer_of(tiny, grad_clip=1e9), trainer_of(tiny, grad_clip=0.01)
    norm = one_step(loose, batch)["grad_norm"]
    assert one_step(tight, batch)["grad_norm"] == pytest.approx(norm, rel=1e-6)

    def second_moment(trainer):
        return sum(s["exp_avg_sq"].sum().item() for s in trainer.policy.optimizer.state.values())

    scale = second_moment(tight) / second_moment(loose)
    assert scale == pytest.approx((0.01 / norm) ** 2, rel=1e-3)
    off = trainer_of(tiny, grad_clip=None)
    assert one_step(off, batch)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert second_moment(off) == pytest.approx(second_moment(loose), rel=1e-6)


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone(tiny, batch):
    trainer = trainer_of(tiny)
    one_step(trainer, batch)
    before = {k: v.clone() for part in trainer.state().parts.values() for k, v in part.items()}

    def broken(logprobs, entropy, micro, denominators):
        return LossOutput((logprobs * float("nan")).sum())

    metrics = one_step(trainer, batch, broken)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    after = {k: v for part in trainer.state().parts.values() for k, v in part.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert one_step(trainer, batch)["skipped"] == 0.0


def test_recomputing_layers_gives_the_same_gradients_without_dropout(tiny, batch):
    plain, thrifty = trainer_of(tiny), trainer_of(tiny, activation_checkpointing=True)
    assert one_step(thrifty, batch) == one_step(plain, batch)
    assert torch.equal(weights(plain), weights(thrifty))
    inner = [
        m for layer in decoder_layers(thrifty.policy.scorer.model.model) for m in layer.children()
    ]
    assert not any(m.training for m in inner)


def test_half_precision_compute_keeps_float32_weights_and_stays_close(tiny, batch):
    full, half = trainer_of(tiny), trainer_of(tiny, compute_dtype="bfloat16")
    wanted, seen = one_step(full, batch), one_step(half, batch)
    assert seen["loss"] == pytest.approx(wanted["loss"], abs=2e-2)
    assert seen["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters.values())
    assert seen["loss"] != wanted["loss"]


def test_state_loads_back_with_moments_and_random_streams_and_no_weights_of_the_policy_are_read(
    batch, tmp_path
):
    file_root = f"file://{tmp_path}/root"
    tiny = start_run(file_root)
    trainer = trainer_of(tiny)
    one_step(trainer, batch)
    extra = {"grid": Grid().to_json(), "device": "cpu"}
    ref = checkpoint.save(
        layout.state(file_root, 1),
        {**trainer.state().parts, "extra": extra},
        parents={},
        attributes={},
    )
    drawn = torch.rand(3)
    (kept,) = tmp_path.glob("root/policies/00000/*.safetensors")
    kept.unlink()
    again = trainer_of(tiny, sets_weights=False)
    again.load(ref.pin())
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(weights(again), weights(trainer))
    assert one_step(again, batch) == one_step(trainer, batch)
    assert torch.equal(weights(again), weights(trainer))


def test_a_closed_trainer_holds_no_model_and_unknown_trainers_are_refused(tiny):
    trainer = trainer_of(tiny)
    trainer.close()
    assert not hasattr(trainer.policy, "scorer")
    with pytest.raises(ConfigError, match="fsdp2"):
        trainer_of(tiny, trainer="fdsp2")


def test_automatic_device_is_the_cpu_where_there_is_no_accelerator():
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == wanted
    assert pick_device("cpu").type == "cpu"


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun would set for a job of one process."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in {**values, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))


def worker_job(root):
    run = start_run(root)
    rewards = add_iteration(run, 1)
    return TrainJob(root, run.config, run.digest, 1, 2, run.policy_pin, "", rewards.pin())


def test_a_worker_writes_its_result_and_leaves_the_process_group(file_root, one_rank):
    pin = write_job(worker_job(file_root))
    assert main([pin]) == 0
    result = read_json(pin.replace("job.json", "result.json").partition("#")[0])
    ref = Ref.from_json(result["state"])
    assert checkpoint.read_state_info(ref.pin())["step"] == 4
    assert result["metrics"]["num_rollouts"] == 32
    assert not torch.distributed.is_initialized()
    assert os.environ["LOCAL_RANK"] == "0"


def test_a_worker_tells_its_error_beside_the_job(file_root, one_rank):
    job = worker_job(file_root)
    cold = {**job.config, "rollout": {**job.config["rollout"], "temperature": 0.0}}
    pin = write_job(replace(job, config=cold))
    assert main([pin]) == 2
    folder = pin.partition("/job.json")[0]
    fault = read_json(f"{folder}/error.json")
    assert fault["error"] == "ConfigError"
    assert "rollout.temperature" in fault["message"]
    assert not store.exists(f"{folder}/result.json")


def rows_scored(trainer):
    """Count the rows that a trainer scores with a graph and without one."""
    seen = {True: 0, False: 0}

    def count(_, args, results):
        seen[results[0].requires_grad] += len(args[0])

    trainer.policy.scorer.register_forward_hook(count)
    return seen


def test_rows_without_an_advantage_make_no_backward_pass_and_count_in_every_metric(tiny, batch):
    idle = torch.arange(len(batch)) % 2 == 1
    mixed = batch.updated(advantages=batch.advantages.masked_fill(idle[:, None], 0.0))
    moving, still = split_by_gradient(mixed)
    wanted = (mixed.policy_mask & (mixed.advantages != 0)).any(1)
    assert len(moving) == int(wanted.sum()) < len(mixed)
    whole, part = trainer_of(tiny), trainer_of(tiny)
    scored = rows_scored(part)
    seen = whole.step(mixed, loss_over(mixed), learning_rate=5e-4)
    found = part.step(moving, loss_over(mixed), learning_rate=5e-4, still=still)
    assert found == pytest.approx(seen, abs=1e-6, rel=1e-5)
    assert {"approx_kl", "entropy", "clipfrac_high", "clipfrac_low", "ratio_error_max"} <= set(seen)
    assert scored == {True: len(moving), False: len(still)}
    torch.testing.assert_close(weights(whole), weights(part), atol=1e-6, rtol=0.0)


def test_of_many_rows_without_an_advantage_a_few_stand_for_all(tiny, batch):
    # Twenty times the same row: whichever are scored, the metrics are those of all.
    mixed = batch.take(torch.tensor([0, 1, 2, 3] + [4] * 20))
    idle = torch.arange(len(mixed)) >= 4
    mixed = mixed.updated(advantages=mixed.advantages.masked_fill(idle[:, None], 0.0))
    moving, still = split_by_gradient(mixed)
    whole, part = trainer_of(tiny), trainer_of(tiny)
    scored = rows_scored(part)
    seen = whole.step(mixed, loss_over(mixed), learning_rate=5e-4)
    found = part.step(moving, loss_over(mixed), learning_rate=5e-4, still=still)
    errors = {name: found.pop(name) for name in ("approx_kl_error", "entropy_error")}
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-6)
    assert found == pytest.approx(seen, abs=1e-6, rel=1e-5)
    assert scored == {True: len(moving), False: STILL_ROWS}


def test_what_a_few_rows_tell_of_many_comes_with_its_error(tiny, batch):
    generator = torch.Generator().manual_seed(3)
    mixed = batch.take(torch.randint(len(batch), (32,), generator=generator))
    moved = torch.randn(32, 1, generator=generator) * mixed.policy_mask
    mixed = mixed.updated(old_logprobs=mixed.old_logprobs + moved)
    idle = torch.arange(32) >= 8
    mixed = mixed.updated(advantages=mixed.advantages.masked_fill(idle[:, None], 0.0))
    moving, still = split_by_gradient(mixed)
    assert len(still) >= 24
    trainer, draws = trainer_of(tiny), []
    exact = trainer.step(mixed, loss_over(mixed), learning_rate=0.0)
    for _ in range(24):
        some = still.take(torch.randperm(len(still), generator=generator))
        draws.append(trainer.step(moving, loss_over(mixed), learning_rate=0.0, still=some))
    for name in ("approx_kl", "entropy"):
        apart = torch.tensor([found[name] - exact[name] for found in draws]).double()
        told = torch.tensor([found[f"{name}_error"] for found in draws]).double()
        assert bool((told > 0).all())
        assert 0.5 < float(apart.square().mean().sqrt() / told.square().mean().sqrt()) < 2
