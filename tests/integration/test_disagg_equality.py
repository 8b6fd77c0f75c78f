"""Attention and experts apart give the tokens of the model in one piece, whatever the instance.

In float64, since products of other batches round in other places. Ranks are threads here, with real
messages and frames; test_disagg_failures.py has processes. `--full` runs the whole matrix.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from planish.engines.disagg import exchange, expert_model, expert_rank
from planish.engines.disagg.placement import ExpertLayout
from planish.engines.requests import Request, Sampling
from planish.engines.weights import DictWeights
from planish.models.experts import on_disk
from tests.rounding import VALUES
from tests.unit.engines.disagg.instances import FAMILIES, disagg, moe_policy
from tests.unit.engines.tiny import prompt, start

pytestmark = pytest.mark.slow

MATRIX = list(product(FAMILIES, (1, 2), (1, 2), (1, 2, 3, 4), ("sockets", "nixl")))
SAMPLE = [
    ("Qwen3Moe", 1, 1, 1, "nixl"),
    ("Qwen3Moe", 2, 2, 3, "sockets"),
    ("Qwen3Moe", 1, 2, 4, "sockets"),
    ("Mixtral", 2, 1, 2, "nixl"),
    ("Mixtral", 2, 2, 4, "sockets"),
    ("DeepseekV3", 2, 2, 2, "nixl"),
    ("DeepseekV3", 1, 2, 3, "sockets"),
    ("Qwen2Moe", 2, 2, 2, "sockets"),
]


def pytest_generate_tests(metafunc):
    """Take the whole matrix where it is asked for."""
    if "case" in metafunc.fixturenames:
        cases = MATRIX if metafunc.config.getoption("--full") else SAMPLE
        metafunc.parametrize("case", cases, ids=["-".join(map(str, case)) for case in cases])


def requests() -> list[Request]:
    """16 prompts of 1 to 46 tokens, responses of 17 to 32, greedy and sampled."""
    return [
        Request(
            f"r{i}",
            prompt(i, 1 + 3 * i),
            Sampling(
                max_new_tokens=17 + i,
                temperature=0.0 if i % 4 == 0 else 1.0,
                seed=100 + i,
                ignore_eos=i % 2 == 0,
            ),
        )
        for i in range(16)
    ]


@cache
def whole(family: str, seed: int = 0) -> list:
    """What the model in one piece gives."""
    return start(moe_policy(family, seed), max_rows=16).generate(requests())


def equal(outputs, expected) -> bool:
    """Compare tokens and reasons exactly, log-probabilities to what float32 of them holds."""
    return all(
        (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        and torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=VALUES)
        for a, b in zip(outputs, expected, strict=True)
    )


def test_every_instance_gives_the_tokens_of_the_model_in_one_piece(case):
    family, *numbers, transport = case
    with disagg(moe_policy(family), *numbers, max_rows=9, transport=transport) as engine:
        outputs = engine.generate(requests())
        assert equal(outputs, whole(family))
        sent = sum(sum(layer) for layer in engine.stats()["expert_tokens"])
    layers = 2 if family == "DeepseekV3" else 3
    computed = sum(
        len(r.prompt_ids) - 1 + o.num_tokens for r, o in zip(requests(), outputs, strict=True)
    )
    # Padding of prompts is computed too; each token that counts went to two experts a layer.
    assert sent >= 2 * layers * computed


def test_requests_that_arrive_while_others_run_change_nothing():
    waiting = requests()
    done = {}
    with disagg(moe_policy("Qwen3Moe"), 2, 2, 2, max_rows=6) as engine:
        while len(done) < 16:
            if waiting:
                engine.submit([waiting.pop(0)])
            done.update((o.request_id, o) for o in engine.poll(0.0))
    assert equal([done[r.request_id] for r in requests()], whole("Qwen3Moe"))


def test_all_tokens_to_two_experts_of_one_rank_leave_the_other_without_rows():
    policy = moe_policy("DeepseekV3")
    for layer in policy.model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[[0, 2]] = 10.0
    expected = start(policy, max_rows=16).generate(requests())
    with disagg(policy, 2, 2, 2) as engine:
        assert equal(engine.generate(requests()), expected)
        tokens, before = engine.stats()["expert_tokens"], tokens_by_rank(engine)
        # With the next weights the two experts part.
        engine.update_weights(weights(policy), 1)
        assert equal(engine.generate(requests()), expected)
        after = tokens_by_rank(engine) - before
    for layer in tokens:
        assert layer[0] == layer[2] == sum(layer) / 2 > 0
    assert not before[1].any()
    assert after[0].sum() == after[1].sum() == before[0].sum() / 2
    assert not equal(expected, whole("DeepseekV3"))


@pytest.mark.parametrize("family", FAMILIES)
def test_replicas_of_busy_experts_share_their_rows_and_change_no_token(family):
    with disagg(moe_policy(family), 2, 2, 2, redundant_experts=3) as engine:
        assert equal(engine.generate(requests()), whole(family))
        before, counts = engine.layout, tokens_by_rank(engine)
        engine.update_weights(weights(moe_policy(family, 1)), 1)
        assert engine.layout.version == before.version + 1
        assert engine.layout.layers != before.layers
        assert equal(engine.generate(requests()), whole(family, 1))
        counts = tokens_by_rank(engine) - counts
        placed = engine.layout
        engine.update_weights(weights(moe_policy(family)), 2)
        # By the rows since the last change, and a row more of each.
        loads = (1.0 + counts.sum(0)).tolist()
        wanted = ExpertLayout.of(loads, num_nodes=2, num_redundant=3)
        assert engine.layout.layers == wanted.layers
    assert ((counts > 0).sum(0) == 2).any()
    for layer, placement in enumerate(placed.layers):
        for expert in range(8):
            holders = [node for node, _ in placement.replicas(expert)]
            assert not np.delete(counts[:, layer, expert], holders).any()


def tokens_by_rank(engine) -> np.ndarray:
    """Return the rows that each expert rank computed, [ranks, layers, experts]."""
    ranks = engine.stats()["ranks"]
    return np.array([rank["expert_tokens"] for rank in ranks if rank["role"] == "expert"])


@pytest.mark.parametrize(
    ("sizes", "attention", "expert"),
    [({"num_experts_per_tok": 8}, 1, 2), ({"num_experts": 2}, 3, 2)],
    ids=["all experts", "few experts"],
)
def test_every_expert_for_every_token_and_more_replicas_than_experts(sizes, attention, expert):
    policy = moe_policy("Qwen3Moe", **sizes)
    expected = start(policy, max_rows=16).generate(requests())
    with disagg(policy, attention, expert, 2) as engine:
        assert equal(engine.generate(requests()), expected)


def test_long_prompts_go_in_several_frames():
    with disagg(moe_policy("Mixtral"), 1, 2, 2, batch_tokens=7) as engine:
        assert equal(engine.generate(requests()), whole("Mixtral"))


def weights(policy) -> DictWeights:
    """Return the weights of a policy by their names on disk."""
    tensors = on_disk(policy.model.state_dict(), policy.model.config.to_dict())
    return DictWeights({name: tensor.detach().clone() for name, tensor in tensors.items()})


# Negative controls: each breaks one thing and must be noticed.


def outputs_of(policy, **options) -> list:
    with disagg(policy, 1, 2, 2, max_rows=16, **options) as engine:
        return engine.generate(requests())


def test_a_dropped_row_is_noticed(monkeypatch):
    expected, combine = whole("Qwen3Moe"), exchange.combine

    def dropping(replies, weights, packed):
        return combine([torch.cat([r[:-1], r[-1:] * 0]) for r in replies], weights, packed)

    monkeypatch.setattr(exchange, "combine", dropping)
    assert not equal(outputs_of(moe_policy("Qwen3Moe")), expected)


def test_another_order_of_the_sum_is_noticed_in_float32(monkeypatch):
    policy = moe_policy("Qwen3Moe", num_experts_per_tok=4)
    policy.model.float()
    combine = exchange.combine

    def run():
        with disagg(policy, 1, 2, 1, max_rows=16) as engine:
            return [output.logprobs for output in engine.generate(requests())]

    expected = run()
    assert run() == expected

    def descending(replies, weights, packed):
        turned = replace(packed, places=packed.places.flip(1), choices=packed.choices.flip(1))
        return combine(replies, weights, turned)

    monkeypatch.setattr(exchange, "combine", descending)
    assert run() != expected


def test_the_experts_of_another_layer_are_noticed(monkeypatch):
    expected, compute = whole("Qwen3Moe"), expert_model.ExpertModel.compute

    def stale(self, layer, *given):
        compute(self, max(layer - 1, 0), *given)

    monkeypatch.setattr(expert_model.ExpertModel, "compute", stale)
    assert not equal(outputs_of(moe_policy("Qwen3Moe")), expected)


def test_experts_that_kept_old_weights_are_noticed(monkeypatch):
    def keeping(self, _):
        self._version, self.layout, _ = self._next
        return {}

    with disagg(moe_policy("Qwen3Moe"), 1, 2, 2, max_rows=16) as engine:
        monkeypatch.setattr(expert_rank.ExpertRank, "commit", keeping)
        engine.update_weights(weights(moe_policy("Qwen3Moe", 1)), 1)
        assert not equal(engine.generate(requests()), whole("Qwen3Moe", 1))
