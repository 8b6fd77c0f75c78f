"""Times of stages and of colocated deployments by hand: rooflines, caches, sums, the network."""

import pytest

from planish.engines.planner.baseline import baselines, colocated
from planish.engines.planner.gpus import GPUS, changed, find_gpus
from planish.engines.planner.models import MODELS, MoeModel
from planish.engines.planner.performance import (
    Constants,
    Measured,
    Workload,
    attention_core,
    attention_stage,
    expert_stage,
    matrices_roofline,
    outside_stage,
    rows_per_node,
)
from planish.engines.planner.query import Query, Space

FREE = Constants(
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
    kernel_seconds=0.0,
    link_seconds=0.0,
    layer_seconds=0.0,
    network_seconds=0.0,
    half_rate_bytes=0.0,
)
"""Nothing but the data sheet."""
MIXTRAL = MODELS["mixtral-8x22b"]


def test_an_a100_needs_156_rows_to_compute_as_long_as_it_reads():
    a100 = changed(find_gpus("a100"), ["a100.memory_rate=2e12"])[0]
    line = matrices_roofline([(6144, 16384)], a100, FREE)
    assert line.weights / line.compute == pytest.approx(156)
    assert line.seconds(1) == line.seconds(156) < line.seconds(157)
    for name, rows in {"mixtral-8x22b": 624, "dbrx": 624, "scaled-moe": 1248}.items():
        line = expert_stage(MODELS[name], a100, 1, 1, FREE)
        share = MODELS[name].experts_per_token / MODELS[name].num_experts
        assert line.weights / (line.compute * share) == pytest.approx(rows)


def test_latent_attention_computes_longer_than_it_reads_on_a_slow_gpu():
    model = MODELS["deepseek-v3"]
    h20 = attention_core(model, GPUS["h20"], 1, 1.0, FREE)
    assert h20 == pytest.approx(2 * 128 * (2 * 512 + 64) / 148e12)
    assert attention_core(model, GPUS["h200"], 1, 1.0, FREE) == pytest.approx(
        2 * 128 * 1088 / 989e12
    )
    # Grouped heads read longer than they compute.
    assert attention_core(MIXTRAL, GPUS["h20"], 1, 1.0, FREE) == pytest.approx(4096 / 4096e9)


def test_shared_experts_make_attention_longer_and_leave_the_experts():
    model = MODELS["deepseek-v3"]
    without = MoeModel(**{**vars(model), "shared_size": 0})
    pair = [attention_stage(m, GPUS["h200"], 1, 650, FREE) for m in (model, without)]
    extra = 2 * 3 * 7168 * 2048 / 989e12
    assert pair[0].compute - pair[1].compute == pytest.approx(extra)
    stages = [expert_stage(m, GPUS["h200"], 1, 1, FREE) for m in (model, without)]
    assert stages[0] == stages[1]


def test_dense_layers_and_logits_are_outside_of_the_pipeline():
    model = MODELS["deepseek-v3"]
    bare = MoeModel(**{**vars(model), "dense_layers": 0})
    logits = outside_stage(bare, GPUS["h200"], 1, 650, FREE)
    assert logits.weights == pytest.approx(2 * 7168 * 129280 / 4800e9)
    dense = outside_stage(model, GPUS["h200"], 1, 650, FREE).weights - logits.weights
    attention = sum(a * b for a, b in model.attention_matrices(1))
    assert dense == pytest.approx(3 * 2 * (attention + 3 * 7168 * 18432) / 4800e9)


def test_messages_have_the_published_size():
    # 128 rows of Mixtral over 2 GPUs: 196,608 bytes from each GPU to each expert node.
    query = Query(MIXTRAL, [], [], constants=FREE)
    one = query.deploy((GPUS["a800"], GPUS["a800"]), tp_a=2, tp_e=1, n_a=1, n_e=8)
    assert 128 * one.network.attention_bytes / 8 == 196608


def test_local_sums_send_at_most_one_row_per_token_and_node():
    qwen = MODELS["qwen3-30b"]
    assert rows_per_node(qwen, 8, "exact") == 1.0
    assert 0.5 < rows_per_node(qwen, 8, "local_sum") < 0.7
    assert rows_per_node(qwen, 128, "local_sum") == pytest.approx(8 / 128)
    assert rows_per_node(qwen, 1, "local_sum") == 1.0


def test_measured_points_are_met_and_prolonged():
    line = Measured(rows=(16.0, 32.0, 64.0), measured=(1.0, 1.0, 2.0))
    assert [line.seconds(x) for x in (1, 16, 48, 64, 96)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert line.seconds_per_row() == 1 / 32
    four = line.repeated(4)
    assert four.seconds(4 * 48) == 4 * line.seconds(48)


def sides(name, gpu="a800", slo=0.15, workload=None, calibration="ideal"):
    space = Space(slo_seconds=slo)
    query = Query(MODELS[name], [], [], workload=workload or Workload(), space=space)
    return baselines(query, GPUS[gpu], calibration)


def form(name, which, gpu="a800", **more):
    return next(one for one in sides(name, gpu, **more) if one.form == which)


def test_tensor_parallel_seconds_by_hand():
    seconds, _ = colocated(Query(MIXTRAL, [], []), GPUS["a800"], "tp", 8, 8)
    rows, flops, rate = 1000, 312e12 * 0.7, 2039e9 * 0.8
    attention = 6144 * (768 + 2 * 128) + 768 * 6144
    experts = 3 * 6144 * 16384 / 8
    total = 2 * 7 / 8 * 2 * rows * 6144 / (200e9 * 0.7) + 3 * 8e-6
    layer = 2 * rows * attention / flops + rows * 650.5 * 512 / rate + total + 3 * 4e-6 + 8e-6
    layer += 2 * rows * 2 * experts / flops + 2 * 4e-6 + total
    logits = 2 * rows * 6144 * 32768 / 8 / flops + 4e-6
    assert seconds(rows) == pytest.approx(56 * layer + logits)


def test_imbalance_slows_expert_parallelism_and_not_tensor_parallelism():
    skewed = Workload(imbalance=1.5)
    assert form("dbrx", "ep", workload=skewed).per_gpu < 0.9 * form("dbrx", "ep").per_gpu
    assert form("dbrx", "tp", workload=skewed) == form("dbrx", "tp")
