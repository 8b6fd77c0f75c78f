"""Routers that are told what to choose."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from planish.base.errors import RecordError
from planish.models.routing import RoutingReplay, replay_in
from tests.contract.engines.test_routing import FAMILIES, NUM_LAYERS
from tests.unit.engines.tiny import family_policy

IDS = torch.arange(30).view(2, 15) % 50 + 4


def model_of(family):
    return family_policy(family, **FAMILIES[family]).model


def forward(model):
    """Return the logits, and the choices and weights [tokens, layers, k] the experts got."""
    heard = []
    handles = [
        module.register_forward_pre_hook(lambda _, given: heard.append(given[1:]))
        for name, module in model.named_modules()
        if name.endswith(".mlp.experts")
    ]
    logits = model(input_ids=IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    choices, weights = (torch.stack(parts, 1) for parts in zip(*heard, strict=True))
    return logits, choices, weights


def others(choices, experts=8):
    """Return other experts than those: of K neighbours none is twice."""
    return (choices.amax(-1, keepdim=True) + torch.arange(1, choices.shape[-1] + 1)) % experts


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_routers_choose_changes_no_bit(family):
    model = model_of(family)
    with torch.no_grad():
        plain, own, _ = forward(model)
        assert own.shape[1] == NUM_LAYERS[family]
        replay = replay_in(model, forces=True)
        with replay.using(own.to(torch.int8)):
            assert torch.equal(forward(model)[0], plain)
    assert replay.counts.tolist() == [0, own.numel()]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_are_weighed_by_the_present_scores(family):
    model = model_of(family)
    replay = replay_in(model, forces=True)
    gates = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
    given = []
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, x: given.append(x[0].detach()))
    with torch.no_grad():
        _, own, _ = forward(model)
    given.clear()
    wanted = others(own)
    with replay.using(wanted.to(torch.int8)):
        logits, chosen, weights = forward(model)
    assert torch.equal(chosen, wanted)
    assert not torch.equal(chosen, own)
    for layer, gate in enumerate(gates):
        scores = given[layer].reshape(-1, gate.hidden_dim) @ gate.weight.T
        if family == "DeepseekV3":
            scores, factor = scores.sigmoid(), gate.routed_scaling_factor
        else:
            scores, factor = scores.softmax(-1), 1.0
        picked = scores.gather(-1, wanted[:, layer])
        if getattr(gate, "norm_topk_prob", True):
            picked = picked / picked.sum(-1, keepdim=True)
        torch.testing.assert_close(weights[:, layer], picked * factor)
    logits.square().sum().backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in gates)


def test_unknown_choices_are_left_to_the_router():
    model = model_of("Qwen3Moe")
    replay = replay_in(model, forces=True)
    with torch.no_grad():
        plain, own, _ = forward(model)
        wanted = others(own)
        wanted[:15] = -1
        with replay.using(wanted):
            logits, chosen, _ = forward(model)
    assert torch.equal(chosen[15:], wanted[15:])
    assert torch.equal(chosen[:15], own[:15])
    torch.testing.assert_close(logits[0], plain[0])
    assert not torch.allclose(logits[1], plain[1], atol=1e-2)
    # The first layer sees the same states as before: none of its choices would be the forced ones.
    assert replay.counts[1] == wanted[15:].numel()
    assert replay.counts[0] >= 15


def test_without_force_choices_are_compared_where_nothing_is_learned():
    model = model_of("Mixtral")
    replay = replay_in(model, forces=False)
    with torch.no_grad():
        plain, own, _ = forward(model)
        wanted = own.clone()
        wanted[:3, 0, 0] = (own[:3, 0].amax(-1) + 1) % 8
        unlike = sum(int(wanted[t, 0, 0]) not in own[t, 0].tolist() for t in range(3))
        assert unlike > 0
        with replay.using(wanted):
            assert torch.equal(forward(model)[0], plain)
    assert replay.counts.tolist() == [unlike, own.numel()]
    with replay.using(others(own)):
        assert torch.equal(forward(model)[0], plain)
    assert replay.counts.tolist() == [unlike, own.numel()]


def test_a_recomputed_forward_meets_the_choices_of_the_first():
    replay = RoutingReplay(1, 8, forces=True)
    seen = []

    def layer(x):
        seen.append(replay.choose(0, torch.zeros(1, 2, dtype=torch.int64)).tolist())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    results = []
    for choice in ([1, 2], [3, 4]):
        with replay.using(torch.tensor([[choice]])):
            again = replay.again
            results.append(checkpoint(layer, x, use_reentrant=False, context_fn=again).sum())
    for result in results:
        result.backward()
    assert seen == [[[1, 2]], [[3, 4]]] * 2


@pytest.mark.parametrize(
    ("shape", "highest", "words"),
    [((2, 5, 3, 2), 7, "got 3 layers and the expert 7"), ((2, 5, 2, 2), 8, "and the expert 8")],
)
def test_choices_of_another_policy_are_refused(shape, highest, words):
    replay = replay_in(model_of("Qwen3Moe"), forces=True)
    replay.check(torch.full((2, 5, 2, 2), 7, dtype=torch.int8))
    replay.check(torch.full((0, 5, 2, 2), 7, dtype=torch.int8))
    with pytest.raises(RecordError, match=f"among 8 experts in each of the 2 layers.*{words}"):
        replay.check(torch.full(shape, highest, dtype=torch.int8))
