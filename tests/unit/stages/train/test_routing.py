"""Recorded experts in the trainer: which tokens get them, when, and what it gains."""

import math

import numpy as np
import pytest
import torch

from planish.algorithms.base import Denominators
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.mismatch import mismatch_metrics
from planish.base.parallel import SINGLE, Ranks, Share
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.transformers.engine import TransformersEngine
from planish.models.policy import load_policy, save_policy
from planish.records import layout
from planish.records.ragged import Ragged
from planish.records.reports import UpdateReport, read_report
from planish.records.rollouts import FinishReason
from planish.stages.train.batching import gather_rows, train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import TRAINERS, Trainer
from planish.stages.train.wait import as_waiting, with_waiting
from tests.integration.ckpt_forks import run_ranks
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.engines.tiny import family_policy, prompt
from tests.unit.records import rules
from tests.unit.records.samples import build_rollouts
from tests.unit.stages.train import runs
from tests.unit.stages.train.runs import TINY, rewards_for

CPU = torch.device("cpu")
ALGORITHM = Dapo(DapoConfig())
GROUPS, SIZE, LAYERS, EXPERTS, CHOSEN = 8, 4, 2, 8, 2
POLICY = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
}
SPLIT = {
    "trainer": "megatron",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "expert_parallel": 2,
    "sequence_parallel": True,
}
"""Tokens, layers and experts are on four ranks."""


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    uri = f"file://{tmp_path_factory.mktemp('policy')}"
    policy = family_policy("Qwen3Moe", **POLICY)
    return save_policy(uri, policy, version=0, parents={}, attributes={}).pin()


def sample(pin, prefix=None):
    """Return a real rollout with its experts, each response behind its part of `prefix`."""
    before = prefix or [()] * (GROUPS * SIZE)
    requests = [
        Request(
            f"r{i}", prompt(i // SIZE, 3 + i // SIZE),
            Sampling(max_new_tokens=12 + i % 13, seed=i, ignore_eos=True, want_routing=True),
            response_prefix=tuple(before[i]),
        )
        for i in range(GROUPS * SIZE)
    ]  # fmt: skip
    with TransformersEngine(max_rows=32, routing=True) as engine:
        engine.start(ModelRef(policy=load_policy(pin)))
        outputs = list(engine.generate(requests))
    responses = [[*b, *o.token_ids] for b, o in zip(before, outputs, strict=True)]
    logprobs = [[0.0] * len(b) + o.logprobs for b, o in zip(before, outputs, strict=True)]
    last = np.full((1, LAYERS, CHOSEN), -1, np.int8)
    rows = len(requests)
    return build_rollouts(
        [r.prompt_ids for r in requests[::SIZE]],
        responses,
        rollout_logprobs=Ragged.from_lists(logprobs, np.float32),
        window_start=np.array([len(b) for b in before], np.int32),
        finish=[FinishReason.LENGTH] * rows,
        routing=Ragged.from_lists(
            [np.concatenate([o.routing, last]).flatten() for o in outputs], np.int8
        ),
        experts_per_token=np.full(rows, CHOSEN, np.int32),
    )


@pytest.fixture(scope="module")
def rollouts(pin):
    made = sample(pin)
    rules.check(made)
    return made


def batch_of(rollouts):
    return ALGORITHM.advantages(train_batch(rollouts, rewards_for(rollouts, 6)))


@pytest.fixture(scope="module")
def batch(rollouts):
    return batch_of(rollouts)


def shuffled(batch, seed=0):
    """Return the batch with the choices of each row in another order of tokens."""
    routing, generator = batch.routing.clone(), torch.Generator().manual_seed(seed)
    for row in routing.split(batch.attention_mask.sum(1).tolist()):
        known = (row >= 0).all(-1).all(-1).nonzero().flatten()
        row[known] = row[known[torch.randperm(len(known), generator=generator)]]
    return batch.updated(routing=routing)


def trainer_of(pin, ranks=None, critic=None, **changes):
    config = TrainConfig(**{**TINY, "tokens_per_microbatch": 4096, **changes})
    grid = config.grid(ranks or SINGLE)
    return Trainer(config, pin, temperature=1.0, seed=3, grid=grid, device=CPU, critic=critic)


def one_step(trainer, batch, whole=None):
    counts = ALGORITHM.counts(batch if whole is None else whole)

    def loss_fn(logprobs, entropy, micro):
        return ALGORITHM.loss(logprobs, entropy, micro, Denominators(counts, counts, 1))

    return trainer.step(batch, loss_fn, learning_rate=5e-4)


def mismatch(pin, batch, **changes):
    """Return the divergence of a trainer in half precision from the engine, and its metrics."""
    found = trainer_of(pin, compute_dtype="bfloat16", **changes).logprobs(batch)
    k3 = mismatch_metrics(found[0], batch.rollout_logprobs, batch.policy_mask)["mismatch_k3"]
    return k3, found[2]["routing_disagreement"]


@pytest.mark.slow
def test_experts_are_those_of_the_tokens_and_of_nothing_else(rollouts, batch):
    columns = batch.routing_by_column()
    assert columns.dtype == torch.int8
    for row in range(rollouts.num_rows):
        length = int(rollouts.num_tokens()[row])
        assert columns[row, :length].numpy().tolist() == rollouts.routing_of(row).tolist()
        assert (columns[row, length:] == -1).all()
    idle = gather_rows(batch, np.zeros(0, np.int64), num_columns=2)
    assert idle.routing_by_column().unique().tolist() == [-1]
    some = gather_rows(batch, np.array([5, 2]), num_columns=9)
    assert torch.equal(some.routing_by_column(), columns[[5, 2], :9])
    kept = rewards_for(rollouts, 6)
    kept.keep[::2] = False
    kept_columns = train_batch(rollouts, kept).routing_by_column()
    assert torch.equal(kept_columns, columns[1::2, : kept_columns.shape[1]])
    assert batch.without_routing().take(torch.arange(2)).routing is None
    pool = with_waiting(batch, as_waiting(batch.take(torch.arange(3))))
    assert len(pool) == len(batch) + 3
    assert pool.routing is None  # the critic's, with what earlier iterations left it


@pytest.mark.slow
def test_every_forward_pass_of_the_policy_has_the_recorded_experts_in_every_layer(pin, batch):
    batch = shuffled(batch)  # no router would choose these
    trainer = trainer_of(pin, replay_routing=True, activation_checkpointing=True)
    heard: dict[str, list] = {}
    for name, module in trainer.policy.scorer.named_modules():
        if name.endswith(".mlp.experts"):
            calls = heard.setdefault(name, [])
            module.register_forward_pre_hook(lambda _, given, to=calls: to.append(given[1]))
    old = trainer.logprobs(batch)[0]
    one_step(trainer, batch.updated(old_logprobs=old))
    assert len(heard) == LAYERS
    lengths = (batch.policy_mask * torch.arange(1, old.shape[1] + 1)).amax(1)
    # Rows are packed from the longest down, each without its last token.
    order = (-lengths).argsort(stable=True)
    columns = batch.routing_by_column()
    recorded = torch.cat([columns[row, : lengths[row] - 1] for row in order])
    known = (recorded >= 0).all(-1).all(-1)
    for layer, calls in enumerate(heard.values()):
        assert len(calls) == 3  # old log-probabilities, loss, and the loss again for its gradient
        for chosen in calls:
            assert torch.equal(chosen[known], recorded[known, layer].long())


@pytest.mark.slow
def test_micro_batches_and_recomputation_change_no_loss_and_no_gradient(pin, batch):
    batch = shuffled(batch).updated(old_logprobs=batch.rollout_logprobs)
    wanted = one_step(trainer_of(pin, replay_routing=True), batch)
    free = one_step(trainer_of(pin), batch)
    assert abs(free["grad_norm"] / wanted["grad_norm"] - 1) > 0.01
    for changes in ({"tokens_per_microbatch": 60}, {"activation_checkpointing": True}):
        seen = one_step(trainer_of(pin, replay_routing=True, **changes), batch)
        assert seen == pytest.approx(wanted, abs=1e-5, rel=1e-4)


def preload():
    """Import what takes long before ranks are forked."""
    import warnings

    from transformers import Qwen3MoeForCausalLM  # noqa: F401

    with warnings.catch_warnings(action="ignore"):
        import planish.stages.train.megatron.sharding  # noqa: F401


def step_of_a_rank(rank, size, folder, *, pin, **settings):
    """Return log-probabilities, disagreement and the metrics of a step; all is random."""
    mask = ragged_mask([4 + row % 9 for row in range(21)], 13) & (torch.arange(13) > 1)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(EXPERTS, (*mask.shape, LAYERS, 1), generator=generator)
    routing = torch.cat([first, (first + 3) % EXPERTS], -1).to(torch.int8)
    routing[~ragged_mask([3 + row % 9 for row in range(21)], 13)] = -1  # the last is no input
    batch = make_batch(mask, advantages=mask * torch.linspace(-1.0, 1.0, 21)[:, None])
    batch = batch.updated(input_ids=torch.randint(4, 50, mask.shape, generator=generator))
    routing = routing[batch.attention_mask]
    trainer = trainer_of(
        pin, Ranks(rank, size), replay_routing=True, activation_checkpointing=True,
        tokens_per_microbatch=40, **settings,
    )  # fmt: skip
    whole = batch.updated(routing=routing)
    grid = trainer.grid
    share = Share(21, torch.arange(grid.dp_rank, 21, grid.dp), grid)
    batch = whole.take(share.rows)
    old, _, routed = trainer.logprobs(batch)
    metrics = one_step(trainer, batch.updated(old_logprobs=old - 0.05), whole)
    return [share.join(old, batch.policy_mask)[0].tolist(), routed, metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, SPLIT, {**SPLIT, "packing": False}], ids=["fsdp2", "megatron", "padded"]
)
def test_ranks_replay_as_one_does(tmp_path, pin, settings):
    old, routed, metrics = step_of_a_rank(0, 1, tmp_path, pin=pin)
    assert 0.7 < routed["routing_disagreement"] < 0.8  # two of eight at random
    size = 4 if settings else 2
    found = run_ranks(f"{__name__}:step_of_a_rank", size, tmp_path, pin=pin, **settings)
    for other in found:
        torch.testing.assert_close(*map(torch.tensor, (other[0], old)), atol=1e-5, rtol=1e-5)
        assert other[1] == pytest.approx(routed)
        assert other[2] == pytest.approx(metrics, abs=1e-5, rel=1e-4)


def mismatches(rank, size, folder, *, pin, trainer):
    """Return (divergence, disagreement) without replay, with it, and with other tokens' choices."""
    batch = batch_of(sample(pin))
    wrong = shuffled(batch)
    replays = {"trainer": trainer, "replay_routing": True}
    return [
        mismatch(pin, batch, trainer=trainer),
        mismatch(pin, batch, **replays),
        mismatch(pin, wrong, **replays),
        mismatch(pin, wrong, trainer=trainer),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_replay_takes_routing_out_of_the_mismatch(tmp_path, pin, trainer):
    """The engine computes in float32, the trainer in bfloat16: routers waver, and nothing is set up
    to make them."""
    (found,) = run_ranks(f"{__name__}:mismatches", 1, tmp_path, pin=pin, trainer=trainer)
    (without, share), (replayed, left), (wrong, _), (_, others) = found
    print(f"{trainer} mismatch_k3: own={without:.2e} replay={replayed:.2e} shuffled={wrong:.2e}")
    print(f"{trainer} disagreement: own={share:.4f} replay={left:.4f} shuffled={others:.4f}")
    assert replayed <= 0.1 * without
    assert wrong > 10 * without
    assert 0.001 < left <= share < 0.05
    assert others > 0.3


@pytest.mark.slow
def test_before_a_new_window_the_trainer_chooses_as_the_engine_did_under_the_same_weights(pin):
    """The engine computes earlier windows again; what it chose under older weights is history."""
    rng = np.random.default_rng(0)
    prefix = [rng.integers(4, 50, i % 6).tolist() for i in range(GROUPS * SIZE)]
    rollouts = sample(pin, prefix)
    stale = rollouts.routing.values.copy()
    starts = rollouts.prompt_tokens.lengths[rollouts.group_index] + rollouts.window_start
    per_token, offsets = LAYERS * CHOSEN, rollouts.routing.offsets
    for row in np.flatnonzero(rollouts.window_start):
        part = stale[offsets[row] : offsets[row] + (starts[row] - 1) * per_token]
        part[:] = (part + 3) % EXPERTS
    rollouts.routing.values[:] = stale
    batch = batch_of(rollouts)
    columns = batch.routing_by_column()
    for row in range(rollouts.num_rows):
        first = starts[row] - 1 if rollouts.window_start[row] else 0
        assert (columns[row, :first] == -1).all()
        own = columns[row, first : rollouts.num_tokens()[row] - 1].numpy()
        assert own.tolist() == rollouts.routing_of(row)[first:-1].tolist()
    old = trainer_of(pin, replay_routing=True).logprobs(batch)[0]
    assert mismatch_metrics(old, batch.rollout_logprobs, batch.policy_mask)["mismatch_k3"] < 1e-6


@pytest.mark.slow
def test_critic_and_reference_choose_by_themselves(pin, batch):
    wrong = shuffled(batch)
    trainer = trainer_of(pin, critic=CriticConfig(head_std=0.3), replay_routing=True)
    assert torch.equal(trainer.values(wrong), trainer.values(batch.without_routing()))
    seen = trainer.reference_logprobs(wrong, pin)
    assert torch.equal(seen, trainer.reference_logprobs(batch.without_routing(), pin))
    assert not torch.allclose(seen, trainer.logprobs(wrong)[0])


@pytest.mark.slow
def test_the_stage_tells_the_share_of_other_choices_and_refuses_to_replay_nothing(
    tmp_path, monkeypatch
):
    # The choices are drawn, so the log-probabilities of the engine are of other experts.
    monkeypatch.setattr("planish.stages.train.ranks.worker.mismatch_limit", lambda _: math.inf)
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 16}
    config = runs.tiny_config(replay_routing=True)
    tiny = runs.start_run(f"file://{tmp_path}/root", config, **experts)
    rewards = runs.add_iteration(tiny, 1)
    with pytest.raises(SystemExit) as caught:
        runs.train_once(tiny, 1, "", rewards, tmp_path)
    assert caught.value.code == 2
    rewards = runs.add_iteration(tiny, 2, experts=4)
    runs.train_once(tiny, 2, "", rewards, tmp_path)
    scalars = read_report(UpdateReport, layout.update(tiny.root, 2)).scalars
    # Two of four experts at random are those of the router half of the time.
    assert 0.4 < scalars["routing_disagreement"] < 0.6
