"""Colocated deployments: by hand, their limits, and when they win."""

from __future__ import annotations

import math

import pytest

from planish.engines.planner.baseline import FRAMEWORK_OVERHEAD, baselines, colocated
from planish.engines.planner.gpus import GPUS
from planish.engines.planner.models import MODELS
from planish.engines.planner.performance import Constants, Workload

MIXTRAL = MODELS["mixtral-8x22b"]


def sides(name, gpu="a800", slo=0.15, workload=None, calibration="ideal"):
    load = workload or Workload()
    return baselines(MODELS[name], load, GPUS[gpu], name=calibration, slo_seconds=slo)


def form(name, which, gpu="a800", **more):
    return next(one for one in sides(name, gpu, **more) if one.form == which)


def test_tensor_parallel_seconds_by_hand():
    one = next(
        one
        for one in colocated(MIXTRAL, Workload(), GPUS["a800"], Constants(), 1.0)
        if (one.form, one.gpus) == ("tp", 8)
    )
    rows, flops, rate = 1000, 312e12 * 0.7, 2039e9 * 0.8
    attention = 6144 * (768 + 2 * 128) + 768 * 6144
    experts = 3 * 6144 * 16384 / 8
    total = 2 * 7 / 8 * 2 * rows * 6144 / (200e9 * 0.7) + 3 * 8e-6
    layer = 2 * rows * attention / flops + rows * 650.5 * 512 / rate + total + 3 * 4e-6 + 8e-6
    layer += 2 * rows * 2 * experts / flops + 2 * 4e-6 + total
    logits = 2 * rows * 6144 * 32768 / 8 / flops + 4e-6
    assert one.seconds(rows) == pytest.approx(56 * layer + logits)


def test_few_rows_read_the_experts_that_they_meet_only():
    one = next(iter(colocated(MIXTRAL, Workload(), GPUS["h200"], Constants(), 1.0)))
    # One row meets two of eight experts.
    assert one.seconds(4) - one.seconds(1) > 0.7 * 56 * one.experts.weights


def test_the_framework_takes_twice_as_long():
    ideal, framework = (
        form("dbrx", "tp", calibration=c, slo=math.inf) for c in ("ideal", "framework")
    )
    assert ideal.batch == framework.batch
    assert framework.total == pytest.approx(FRAMEWORK_OVERHEAD * ideal.total)
    assert pytest.approx(2.56 / 1.28) == FRAMEWORK_OVERHEAD


@pytest.mark.parametrize("slo", [0.05, 0.15])
def test_the_time_between_tokens_is_kept_by_every_form(slo):
    found = sides("mixtral-8x22b", slo=slo)
    assert {one.form for one in found} == {"tp", "ep", "pp"}
    assert all(one.total <= slo for one in found)


def test_a_model_larger_than_a_node_is_spread_over_nodes():
    found = sides("scaled-moe")
    assert min(one.gpus for one in found) == 16
    # Inside a node that is large enough, sums are cheaper.
    assert form("scaled-moe", "tp", "h200").gpus == 8


def test_the_best_form_comes_first_and_cost_is_by_price():
    found = sides("mixtral-8x22b")
    assert [one.per_gpu for one in found] == sorted((o.per_gpu for o in found), reverse=True)
    assert found[0].per_cost == pytest.approx(found[0].per_gpu / 2.26)
    assert sides("mixtral-8x22b", "h100")[0].per_cost == 0.0


def test_imbalance_slows_expert_parallelism_and_not_tensor_parallelism():
    skewed = Workload(imbalance=1.5)
    assert form("dbrx", "ep", workload=skewed).per_gpu < 0.9 * form("dbrx", "ep").per_gpu
    assert form("dbrx", "tp", workload=skewed) == form("dbrx", "tp")


def test_nothing_fits_a_gpu_that_is_too_small():
    assert sides("deepseek-v3", "l20", slo=0.001) == []
