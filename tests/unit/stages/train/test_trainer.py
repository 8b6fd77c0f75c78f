"""The trainer of policy and critic on a real tiny model in one process."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import functional_call

from planish.algorithms.base import Denominators, LossOutput
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.errors import LayoutMismatch
from planish.base.parallel import Grid
from planish.checkpoint import train_state as checkpoint
from planish.models.adapters import Adapters
from planish.models.critic import critic_from_policy
from planish.models.logprobs import TokenScorer, ValueScorer
from planish.models.policy import load_policy
from planish.records import layout
from planish.stages.train.batching import (
    Movement,
    scatter_tokens,
    selected_lengths,
    train_batch,
)
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.fsdp2 import decoder_layers
from planish.stages.train.trainer import STILL_ROWS, Trainer
from tests.rounding import GRADIENTS, VALUES
from tests.unit.models.test_policy import reward_model
from tests.unit.stages.train.runs import (
    TINY,
    TINY_CRITIC,
    random_rollouts,
    rewards_for,
    split_rows,
    start_run,
)

DAPO = Dapo(DapoConfig())
VAPO = Vapo(VapoConfig(lambda_alpha=0.5, lambda_min=0.5))
CPU = torch.device("cpu")
ADAPTERS = Adapters(4, 16.0, ())
STEPS, RATE = 6, 5e-3


@pytest.fixture(scope="module")
def raw_batch(tiny):
    rollouts = random_rollouts(tiny.policy, 5)
    return train_batch(rollouts, rewards_for(rollouts, 6))


@pytest.fixture(scope="module")
def batch(raw_batch):
    # Old log-probabilities a little off, so that ratios are not all 1.
    return DAPO.advantages(raw_batch.updated(old_logprobs=raw_batch.rollout_logprobs - 0.05))


@pytest.fixture(scope="module")
def valued(raw_batch):
    values = torch.linspace(-1, 1, raw_batch.values.shape[1]) * raw_batch.value_mask
    return VAPO.advantages(
        raw_batch.updated(old_logprobs=raw_batch.rollout_logprobs - 0.05, values=values)
    )


def trainer_of(tiny, *, critic=None, adapters=None, sets_weights=True, **changes):
    critic = None if critic is None else CriticConfig(**{**TINY_CRITIC, **critic})
    return Trainer(
        TrainConfig(**{**TINY, **changes}), tiny.policy_pin, temperature=1.0, seed=3,
        grid=Grid(), device=CPU, critic=critic, adapters=adapters, sets_weights=sets_weights,
    )  # fmt: skip


def critic_of(tiny, *, critic=None, **changes):
    return trainer_of(tiny, critic=critic or {}, **changes)


def loss_over(batch, loss=DAPO.loss, algorithm=DAPO):
    counts = algorithm.counts(batch)
    denominators = Denominators(counts, counts, 1)

    def loss_fn(logprobs, entropy, micro):
        return loss(logprobs, entropy, micro, denominators)

    return loss_fn


def one_step(trainer, batch, loss=DAPO.loss):
    return trainer.step(batch, loss_over(batch, loss), learning_rate=5e-4)


def value_step(trainer, batch, loss=VAPO.value_loss):
    counts = VAPO.value_counts(batch)
    denominators = Denominators(counts, counts, 1)

    def loss_fn(values, micro):
        return loss(values, micro, denominators)

    return trainer.value_step(batch, loss_fn, learning_rate=1e-3)


def policy_step(trainer, batch):
    return trainer.step(batch, loss_over(batch, VAPO.loss, VAPO), learning_rate=5e-4)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters.values()])


def rows_and_tokens(model):
    """Count what the backbone and the head of a model in training compute."""
    inner = model.scorer.critic if hasattr(model.scorer, "critic") else model.scorer.model
    body = inner.body if hasattr(inner, "body") else inner.model
    seen = {"tokens": 0, "scored": 0}

    def count_body(_, args):
        seen["tokens"] += args[0].numel()

    def count_scores(_, __, scores):
        seen["scored"] += len(scores[0])

    body.embed_tokens.register_forward_pre_hook(count_body)
    if hasattr(inner, "lm_head"):
        model.scorer.register_forward_hook(count_scores)
    return seen


def save(trainer, uri):
    extra = {"grid": Grid().to_json(), "device": "cpu"}
    return checkpoint.save(
        uri, {**trainer.state().parts, "extra": extra}, parents={}, attributes={}
    ).pin()


class Model(NamedTuple):
    """One of the two models of a trainer."""

    name: str
    moments: str
    open: Callable[..., Trainer]
    step: Callable[..., dict[str, Any]]


@pytest.fixture(params=["policy", "critic"])
def model(request, tiny, batch, valued):
    is_policy = request.param == "policy"
    made, rows, make = (
        (one_step, batch, trainer_of) if is_policy else (value_step, valued, critic_of)
    )

    def step(trainer, *loss):
        return made(trainer, rows, *loss)

    moments = "optimizer" if is_policy else "critic_optimizer"
    return Model(request.param, moments, partial(make, tiny), step)


@pytest.mark.parametrize("budget", [1, 60, 200, 10**6])
def test_i1_the_token_budget_changes_neither_loss_nor_gradient(model, budget):
    whole, split = (model.open(tokens_per_microbatch=n) for n in (10**7, budget))
    wanted, seen = model.step(whole), model.step(split)
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert seen[name] == pytest.approx(value, abs=VALUES, rel=VALUES), name
    # After one step the first moment is a tenth of the clipped gradient.
    ours, theirs = (t.state().parts[model.moments] for t in (split, whole))
    for name in (n for n in ours if n.endswith(".exp_avg")):
        assert (ours[name] - theirs[name]).abs().max() < VALUES, name


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone(model):
    trainer = model.open()
    model.step(trainer)
    before = {k: v.clone() for part in trainer.state().parts.values() for k, v in part.items()}
    bad = math.nan if model.name == "policy" else math.inf
    metrics = model.step(trainer, lambda results, *_: LossOutput((results * bad).sum()))
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    after = {k: v for part in trainer.state().parts.values() for k, v in part.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.step(trainer)["skipped"] == 0.0


def test_recomputing_layers_gives_the_same_gradients_without_dropout(model):
    plain, thrifty = model.open(), model.open(activation_checkpointing=True)
    assert model.step(thrifty) == model.step(plain)
    left, right = (flat(getattr(trainer, model.name)) for trainer in (plain, thrifty))
    assert torch.equal(left, right)
    layers = decoder_layers(thrifty.policy.scorer.model.model)
    assert not any(m.training for layer in layers for m in layer.children())


def test_half_precision_compute_keeps_float32_weights_and_stays_close(model):
    full, half = model.open(), model.open(compute_dtype="bfloat16")
    wanted, seen = model.step(full), model.step(half)
    if model.name == "policy":
        assert seen["loss"] == pytest.approx(wanted["loss"], abs=2e-2)
        assert seen["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)
    else:
        assert seen["loss"] == pytest.approx(wanted["loss"], rel=2e-2)
    parameters = getattr(half, model.name).parameters
    assert all(p.dtype == torch.float32 for p in parameters.values())
    assert seen["loss"] != wanted["loss"]


def test_logprobs_equal_those_of_a_plain_forward_pass(tiny, batch):
    seen = trainer_of(tiny, tokens_per_microbatch=64).logprobs(batch)[0]
    wanted = batch.rollout_logprobs
    assert (seen - wanted).abs().max() < GRADIENTS
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


def test_state_loads_back_with_moments_and_random_streams_and_no_weights_of_the_policy_are_read(
    batch, tmp_path
):
    file_root = f"file://{tmp_path}/root"
    tiny = start_run(file_root)
    trainer = trainer_of(tiny)
    one_step(trainer, batch)
    pin = save(trainer, layout.state(file_root, 1))
    drawn = torch.rand(3)
    (kept,) = tmp_path.glob("root/policies/00000/*.safetensors")
    kept.unlink()
    again = trainer_of(tiny, sets_weights=False)
    again.load(pin)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(flat(again.policy), flat(trainer.policy))
    assert one_step(again, batch) == one_step(trainer, batch)
    assert torch.equal(flat(again.policy), flat(trainer.policy))


def test_a_closed_trainer_holds_no_model(tiny):
    trainer = trainer_of(tiny)
    trainer.close()
    assert not hasattr(trainer.policy, "scorer")


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
    moving, still = split_rows(mixed)
    wanted = (mixed.policy_mask & (mixed.advantages != 0)).any(1)
    assert len(moving) == int(wanted.sum()) < len(mixed)
    whole, part = trainer_of(tiny), trainer_of(tiny)
    scored = rows_scored(part)
    seen = whole.step(mixed, loss_over(mixed), learning_rate=5e-4)
    found = part.step(moving, loss_over(mixed), learning_rate=5e-4, still=still)
    assert found == pytest.approx(seen, abs=VALUES, rel=VALUES)
    assert {"approx_kl", "entropy", "clipfrac_high", "clipfrac_low", "ratio_error_max"} <= set(seen)
    assert scored == {True: len(moving), False: len(still.batch)}
    torch.testing.assert_close(flat(whole.policy), flat(part.policy), atol=VALUES, rtol=0.0)


def test_of_many_rows_without_an_advantage_a_few_stand_for_all(tiny, batch):
    # Twenty times the same row: whichever are scored, the metrics are those of all.
    mixed = batch.take(torch.tensor([0, 1, 2, 3] + [4] * 20))
    idle = torch.arange(len(mixed)) >= 4
    mixed = mixed.updated(advantages=mixed.advantages.masked_fill(idle[:, None], 0.0))
    moving, still = split_rows(mixed)
    whole, part = trainer_of(tiny), trainer_of(tiny)
    scored = rows_scored(part)
    seen = whole.step(mixed, loss_over(mixed), learning_rate=5e-4)
    found = part.step(moving, loss_over(mixed), learning_rate=5e-4, still=still)
    errors = {name: found.pop(name) for name in ("approx_kl_error", "entropy_error")}
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=VALUES)
    assert found == pytest.approx(seen, abs=VALUES, rel=VALUES)
    assert scored == {True: len(moving), False: STILL_ROWS}


def test_what_a_few_rows_tell_of_many_comes_with_its_error(tiny, batch):
    generator = torch.Generator().manual_seed(3)
    mixed = batch.take(torch.randint(len(batch), (32,), generator=generator))
    moved = torch.randn(32, 1, generator=generator) * mixed.policy_mask
    mixed = mixed.updated(old_logprobs=mixed.old_logprobs + moved)
    idle = torch.arange(32) >= 8
    mixed = mixed.updated(advantages=mixed.advantages.masked_fill(idle[:, None], 0.0))
    moving, still = split_rows(mixed)
    assert still.num_rows >= 24
    alike = mixed.policy_mask.any(1) & idle
    trainer, draws = trainer_of(tiny), []
    exact = trainer.step(mixed, loss_over(mixed), learning_rate=0.0)
    for _ in range(24):
        order = alike.nonzero().flatten()[torch.randperm(still.num_rows, generator=generator)]
        rows = torch.cat([(~alike).nonzero().flatten(), order]).numpy()
        _, some = Movement(mixed).split(rows, STILL_ROWS)
        draws.append(trainer.step(moving, loss_over(mixed), learning_rate=0.0, still=some))
    for name in ("approx_kl", "entropy"):
        apart = torch.tensor([found[name] - exact[name] for found in draws]).double()
        told = torch.tensor([found[f"{name}_error"] for found in draws]).double()
        assert bool((told > 0).all())
        assert 0.5 < float(apart.square().mean().sqrt() / told.square().mean().sqrt()) < 2


def test_values_equal_those_of_a_plain_forward_pass(tiny, raw_batch):
    trainer = critic_of(tiny, tokens_per_microbatch=64)
    scorer = ValueScorer(critic_from_policy(tiny.policy.model, seed=3, head_std=0.3))
    with torch.no_grad():
        wanted = scorer(raw_batch.input_ids, None, raw_batch.value_mask)
    seen = trainer.values(raw_batch)
    assert seen.dtype == torch.float32
    assert (seen[raw_batch.value_mask] - wanted).abs().max() < GRADIENTS
    assert (seen[~raw_batch.value_mask] == 0).all()
    assert wanted.std() > 0.1


def test_a_critic_step_changes_the_critic_alone_and_a_policy_step_the_policy_alone(tiny, valued):
    trainer = critic_of(tiny)
    policy, critic = flat(trainer.policy), flat(trainer.critic)
    value_step(trainer, valued)
    assert torch.equal(flat(trainer.policy), policy)
    after = flat(trainer.critic)
    assert not torch.equal(after, critic)
    policy_step(trainer, valued)
    assert torch.equal(flat(trainer.critic), after)
    assert not torch.equal(flat(trainer.policy), policy)


def test_rows_without_a_target_are_not_computed(tiny, valued):
    finished = torch.arange(len(valued)) % 3 == 0
    some = valued.updated(value_mask=valued.value_mask & finished[:, None])
    trainer, alone = critic_of(tiny), critic_of(tiny)
    seen = rows_and_tokens(trainer.critic)
    mine = value_step(trainer, some)
    assert seen["tokens"] == int(selected_lengths(some.value_mask)[finished].sum() - finished.sum())
    theirs = value_step(alone, valued.take(finished.nonzero().flatten()))
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert (flat(trainer.critic) - flat(alone.critic)).abs().max() < VALUES


def test_prefix_tokens_never_meet_the_lm_head_and_rows_without_a_token_no_layer(tiny, valued):
    window = valued.policy_mask.clone()
    for row in range(len(valued)):
        window[row, valued.policy_mask[row].nonzero().flatten()[:-2]] = False
    window[:4] = False
    positive = torch.zeros_like(window)
    positive[0] = valued.policy_mask[0]
    trainer = critic_of(tiny)
    seen = rows_and_tokens(trainer.policy)
    policy_step(trainer, valued.updated(policy_mask=window, positive_mask=positive))
    lengths = selected_lengths(window | positive)
    assert seen["tokens"] == int(lengths.sum() - (lengths > 0).sum())
    assert (lengths > 0).sum() == len(valued) - 3
    assert seen["scored"] == int((window | positive).sum())


def test_a_state_without_a_critic_is_refused_unless_the_configuration_names_one(
    tiny, valued, file_root, tmp_path
):
    pin = save(trainer_of(tiny), layout.state(file_root, 1))
    assert checkpoint.parts(pin) == {"model", "optimizer", "random"}
    for init in ("policy", "random"):
        trainer = critic_of(tiny, critic={"init": init})
        before = flat(trainer.policy)
        with pytest.raises(LayoutMismatch, match=r"must hold a critic.*`critic\.init`"):
            trainer.load(pin)
        assert torch.equal(flat(trainer.policy), before)
    reward_model(tmp_path, vocab_size=tiny.policy.tokenizer.vocab_size)
    named = critic_of(tiny, critic={"init": "model", "path": str(tmp_path)})
    before = flat(named.critic)
    named.load(pin)
    assert torch.equal(flat(named.critic), before)


def losses_in_the_subspace(tiny, batch, trainer, steps):
    """Train W0 + s B A by plain torch: dense weights are composed, B and A are what AdamW has."""
    model = load_policy(tiny.policy_pin, dtype=torch.float32).model
    scorer = TokenScorer(model)
    start = {n: t.detach().clone() for n, t in trainer.policy.weights().items()}
    free = {n: t.requires_grad_(True) for n, t in start.items() if ".lora_" in n}
    optimizer = torch.optim.AdamW(free.values(), lr=RATE, weight_decay=0.0)
    metrics = []
    for _ in range(steps):
        weights = {f"model.{n}": t for n, t in start.items() if "lora_" not in n}
        for name in (n.removesuffix(".lora_A.weight") for n in free if ".lora_A." in n):
            change = free[f"{name}.lora_B.weight"] @ free[f"{name}.lora_A.weight"]
            weights[f"model.{name}.weight"] = start[f"{name}.weight"] + 4.0 * change
        mask = batch.policy_mask
        scored = functional_call(scorer, weights, (batch.input_ids, None, mask, 1.0))
        output = loss_over(batch)(*(scatter_tokens(mask, part) for part in scored), batch)
        optimizer.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(free.values(), 1.0)
        optimizer.step()
        metrics.append((output.loss.item(), norm.item()))
    return metrics


def test_losses_of_adapters_equal_those_of_a_dense_run_in_the_same_subspace(tiny, batch):
    batch = batch.updated(old_logprobs=batch.rollout_logprobs)
    trainer = trainer_of(tiny, adapters=ADAPTERS)
    wanted = losses_in_the_subspace(tiny, batch, trainer, STEPS)
    steps = [trainer.step(batch, loss_over(batch), learning_rate=RATE) for _ in range(STEPS)]
    seen = [(step["loss"], step["grad_norm"]) for step in steps]
    print(f"losses {[round(loss, 6) for loss, _ in seen]}")
    for ours, theirs in zip(seen, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    # AdamW has really moved: all steps at the first weights would have this loss again.
    assert abs(wanted[-1][0] - wanted[0][0]) > 1e-2
