"""The search: brute force, monotone batches, limits, reasons of rejection, published ratios."""

import math

import pytest

from planish.base.errors import ConfigError
from planish.engines.planner.baseline import baselines
from planish.engines.planner.gpus import GPUS, changed, find_gpus
from planish.engines.planner.models import MODELS
from planish.engines.planner.performance import Workload
from planish.engines.planner.query import Query, Space
from planish.engines.planner.search import search
from tests import thin
from tests.unit.engines.planner import brute_force

PAPER = ("mixtral-8x22b", "dbrx", "scaled-moe")
SLO = Space(slo_seconds=0.15)
WITHOUT_PLAN = 47
"""The only random problem in which nothing fits."""


def query(name, gpus="a800", experts="", space=SLO, **more):
    return Query(MODELS[name], find_gpus(gpus), find_gpus(experts or gpus), space=space, **more)


def found(*arguments, **more):
    return search(query(*arguments, **more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", thin.third([WITHOUT_PLAN, *range(WITHOUT_PLAN), *range(WITHOUT_PLAN + 1, 50)])
)
def test_the_best_plan_is_that_of_brute_force(seed):
    problem = brute_force.problem(seed)
    expected, best = brute_force.best(problem), search(problem).best
    assert (best is None) == (expected is None) == (seed == WITHOUT_PLAN)
    if best is not None:
        assert best.value(problem.objective) == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("gpus", [("a800", "a800"), ("h20", "l40s")])
def test_balance_and_the_default_are_as_good_as_trying_all_replicas(name, gpus):
    every = found(name, *gpus, space=Space(slo_seconds=0.15, replicas=tuple(range(1, 33)))).best
    balanced = found(name, *gpus, space=Space(slo_seconds=0.15, replicas="balance")).best
    assert 0.9 * every.per_gpu <= balanced.per_gpu <= every.per_gpu
    assert found(name, *gpus).best.per_gpu >= 0.999 * every.per_gpu
    if gpus == ("a800", "a800"):
        assert every.times.attention == pytest.approx(every.times.experts, rel=0.25)
        assert every.flags()["balanced"]


def test_the_time_between_tokens_is_kept_and_limits():
    tight = found("mixtral-8x22b", space=Space(slo_seconds=0.03))
    assert tight.best.limit == "slo"
    assert all(one.total <= 0.03 for one in tight.plans)
    assert found("mixtral-8x22b", space=Space()).best.per_gpu > tight.best.per_gpu


@pytest.mark.parametrize(
    ("gpu", "change", "replicas", "limit"),
    [
        ("a800", "a800.network_rate=2e9", 1, "network"),
        ("h20", "h20.flops=2e13", 1, "attention"),
        ("a800", "a800.price=1", 16, "experts"),
        ("l40s", "l40s.memory_bytes=4.2e10", 1, "memory"),
    ],
)
def test_the_limit_is_the_resource_that_is_short(gpu, change, replicas, limit):
    gpus = changed(find_gpus(gpu), [change])
    space = Space(replicas=(replicas,), tp_attention=(1,), micro_batches=(3,))
    best = search(Query(MODELS["mixtral-8x22b"], gpus, gpus, space=space)).best
    assert best.limit == limit


def test_a_fixed_batch_is_spread_and_may_be_uneven():
    space = Space(batch=100, replicas=(3,), micro_batches=(4,), tp_attention=(1,), tp_experts=(1,))
    best = found("mixtral-8x22b", space=space).best
    # 100 rows over 12 slots: the fullest has 9.
    assert (best.batch, best.b_a) == (100, 9)
    assert best.per_gpu == pytest.approx(100 / best.total / 11)


@pytest.mark.parametrize(
    ("name", "gpus", "space", "reason"),
    [
        ("mixtral-8x22b", "l40s", Space(batch=5, replicas=(2,)), "more micro-batches"),
        ("mixtral-8x22b", "a800", Space(slo_seconds=1e-3), "one row takes longer"),
        ("mixtral-8x22b", "a800", Space(max_gpus=8), "more than 8 GPUs"),
        ("mixtral-8x22b", "l40s", Space(batch=100000), "the cache of a batch of 100000"),
        ("mixtral-8x22b", "a800", Space(batch=100, slo_seconds=1e-3), "a batch of 100 takes"),
        ("scaled-moe", "l40s", Space(tp_experts=(1,), expert_nodes=(8,)), "4 experts a layer do"),
        ("deepseek-v3", "l20", Space(tp_attention=(1,)), "the cache of one row"),
        ("mixtral-8x22b", "a800", Space(tp_attention=(16,)), "more than the 8 GPUs of a node"),
        ("mixtral-8x22b", "a800", Space(tp_attention=(3,)), "48 heads and 8 KV heads do not split"),
        ("mixtral-8x22b", "a800", Space(tp_experts=(3,)), "experts of width 16384 do not split"),
    ],
)
def test_each_rejection_has_its_reason(name, gpus, space, reason):
    load = Workload(1e6) if "one row" in reason and name == "deepseek-v3" else Workload()
    result = found(name, gpus, space=space, workload=load)
    assert result.best is None
    assert any(reason in why for why in result.rejected)


def test_expert_nodes_must_divide_the_experts_and_cost_needs_a_price():
    with pytest.raises(ConfigError, match=r"must divide the 8 experts .* got 3, 5"):
        found("mixtral-8x22b", space=Space(expert_nodes=(3, 4, 5)))
    with pytest.raises(ConfigError, match=r"got none for h100.*h100\.price"):
        found("mixtral-8x22b", "a800", "h100", objective="cost")
    assert math.isnan(found("mixtral-8x22b", "h100").best.per_cost)


def test_ratios_to_the_ideal_baseline_are_the_published_ones():
    # One set of constants; TensorRT-LLM is 1.28x on one node and 1.90x across nodes.
    ratios = []
    for name in PAPER:
        asked = query(name)
        base = next(one for one in baselines(asked, GPUS["a800"]) if one.form == "tp")
        ratios.append(search(asked).best.per_gpu / base.per_gpu)
    assert ratios == pytest.approx([1.28, 1.28, 1.90], rel=0.3)
    assert ratios[2] > max(ratios[:2])


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("objective", ["cost", "watt"])
def test_attention_on_h20_and_experts_on_l40s_beat_either_alone(name, objective):
    sides = [("h20", "l40s"), ("h20", "h20"), ("l40s", "l40s"), ("l40s", "h20")]
    values = [found(name, *pair, objective=objective).best.value(objective) for pair in sides]
    assert values[0] == max(values)


def test_the_default_search_goes_on_around_balance_and_finds_what_sixteen_replicas_miss():
    wide = {"tp_attention": (1, 2), "tp_experts": (1,), "expert_nodes": (256,)}
    few = Space(replicas=tuple(range(1, 17)), **wide)
    stopped, balanced = (
        found("deepseek-v3", "h800", space=space)
        for space in (few, Space(replicas="balance", **wide))
    )
    around = found("deepseek-v3", "h800", space=Space(**wide))
    assert around.best.deployment.n_a > 16
    assert around.best.per_gpu >= balanced.best.per_gpu > 1.5 * stopped.best.per_gpu
    assert "most attention replicas that were tried, 16" in stopped.edge
    assert (around.edge, balanced.edge) == ("", "")
