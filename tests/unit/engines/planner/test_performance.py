"""Times of stages and of colocated deployments by hand: rooflines, caches, sums, the network."""

import json
import random

import pytest
import torch

from planish.__main__ import main
from planish.base.errors import ConfigError
from planish.engines.planner.baseline import baselines, colocated
from planish.engines.planner.deployment import Deployment
from planish.engines.planner.documents import read_profile
from planish.engines.planner.gpus import GPUS, changed, find_gpus
from planish.engines.planner.models import MODELS, MoeModel, find_model, model_of
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
from planish.engines.planner.pipeline import Pipeline, Work, iteration_seconds
from planish.engines.planner.profile import attention_layer, expert_layer, fit
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
    a800, sizes = GPUS["a800"], {"tp_a": 2, "tp_e": 1, "n_a": 1, "n_e": 8}
    one = Deployment(
        model=MIXTRAL,
        workload=Workload(),
        constants=FREE,
        profiles={},
        attention_gpu=a800,
        expert_gpu=a800,
        **sizes,
    )
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


def form(name, which, workload=None):
    space = Space(slo_seconds=0.15)
    query = Query(MODELS[name], [], [], workload=workload or Workload(), space=space)
    return next(one for one in baselines(query, GPUS["a800"], "ideal") if one.form == which)


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


@pytest.mark.parametrize(
    ("times", "m", "layers", "expected"),
    [
        ((400, 300, 100), 1, 56, 50400),
        ((400, 300, 100), 2, 56, 50800),
        ((300, 400, 350), 3, 56, 79200),
        ((300, 400, 350), 4, 56, 90600),
        ((3, 5, 1), 1, 7, (3 + 5 + 2) * 7),
    ],
)
def test_iteration_seconds_equals_the_vectors(times, m, layers, expected):
    assert iteration_seconds(*times, m, layers) == expected


def even(attention, experts, network, layers, n_a=1, n_e=1, outside=0.0):
    """Return the work of a micro-batch that is equal on all ranks."""
    return Work(
        attention=[attention] * n_a,
        dispatch=[network] * n_a,
        experts=[[experts] * n_e] * layers,
        combine=[network] * n_e,
        outside=[outside] * n_a,
    )


@pytest.mark.parametrize("ranks", [(1, 1), (3, 2), (2, 5)])
def test_equal_times_give_the_law(ranks):
    source = random.Random(sum(ranks))
    for _ in range(600):
        times = [source.uniform(0.0, 3.0) + 1e-6 for _ in range(3)]
        m, layers = source.randint(1, 6), source.randint(1, 40)
        work = [even(*times, layers, *ranks)] * m
        found = Pipeline(*ranks).iteration(7.0, work, layers) - 7.0
        assert found == pytest.approx(iteration_seconds(*times, m, layers), rel=1e-9)


def test_work_outside_is_bounded_by_what_the_planner_adds():
    source = random.Random(5)
    for _ in range(300):
        times = [source.uniform(0.1, 3.0) for _ in range(3)]
        m, layers, outside = source.randint(1, 5), source.randint(1, 20), source.uniform(0.1, 9)
        work = [even(*times, layers, outside=outside)] * m
        found = Pipeline(1, 1).iteration(0.0, work, layers)
        law = iteration_seconds(*times, m, layers)
        assert law + outside - 1e-9 <= found <= law + m * outside + 1e-9


def test_experts_wait_for_the_slowest_attention_rank_that_has_rows():
    def end(*attention):
        links = [0.1] * 2, [[2.0]] * 10, [0.1], [0.0, 0.0]
        return Pipeline(2, 1).iteration(0.0, [Work(one, *links) for one in attention], 10)

    assert end([1.0, 4.0], [1.0, 4.0]) == end([4.0, 4.0], [4.0, 4.0])
    assert end([3.0, 0.0], [0.0, 3.0]) < end([3.0, 3.0], [3.0, 3.0])


MIXTRAL_FILE = {
    "model_type": "mixtral",
    "num_hidden_layers": 56,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("name", "attention", "expert", "kv_bytes"),
    [
        ("mixtral-8x22b", 4.93, 16.91, 229376),
        ("dbrx", 3.52, 7.93, 163840),
        ("scaled-moe", 7.25, 9.66, 196608),
    ],
)
def test_parameters_and_cache_equal_the_published_counts(name, attention, expert, kv_bytes):
    model = MODELS[name]
    shapes = model.attention_matrices(1)
    assert round(model.layers * sum(a * b for a, b in shapes) / 1e9, 2) == attention
    assert round(model.expert_parameters / 1e9, 2) == expert
    assert model.all_layers * model.kv_bytes(1) == kv_bytes


@pytest.mark.parametrize(
    ("config", "name"),
    [(MIXTRAL_FILE, "mixtral-8x22b"), (QWEN3, "qwen3-235b"), (DEEPSEEK, "deepseek-v3")],
)
def test_a_config_file_gives_the_model_of_the_table(tmp_path, config, name):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    expected = vars(MODELS[name]) | {"name": tmp_path.name, "head_dim": found.head_dim}
    assert vars(found) == expected
    assert found == find_model(str(tmp_path / "config.json"))


def test_key_value_heads_are_replicated_beyond_their_number():
    qwen = MODELS["qwen3-235b"]
    assert [qwen.kv_bytes(tp) for tp in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
    assert qwen.attention_matrices(8)[0] == (4096, 8192 // 8 + 2 * 128)
    assert qwen.splits_over(8)
    # The queries are wider than the residual stream.
    assert qwen.attention_matrices(1) == [(4096, 8192 + 1024), (8192, 4096)]


def test_latent_attention_caches_its_compressed_rows_on_every_gpu():
    model = MODELS["deepseek-v3"]
    assert [model.kv_bytes(tp) for tp in (1, 8)] == [2 * 576, 2 * 576]
    assert model.all_layers == 61


def test_tied_embeddings_are_stored_once_and_several_modalities_are_read_by_their_language():
    nested = {"model_type": "qwen3_vl_moe", "vocab_size": 1, "text_config": QWEN3}
    assert model_of(nested, "q") == model_of(QWEN3, "q")
    tied, apart = (model_of({**QWEN3, "tie_word_embeddings": t}, "q") for t in (True, False))
    assert apart.attention_bytes(1) - tied.attention_bytes(1) == 2 * 151936 * 4096


def test_layers_without_experts_are_counted_in_each_family():
    assert model_of({**QWEN3, "mlp_only_layers": [0, 5]}, "q").dense_layers == 2
    every_second = model_of({**QWEN3, "decoder_sparse_step": 2}, "q")
    assert (every_second.layers, every_second.dense_layers) == (47, 47)
    assert every_second.dense_size == 12288
    assert model_of(QWEN3, "q").dense_size == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "got a dense one"),
        ({**MIXTRAL_FILE, "hidden_size": None}, "as `hidden_size`, got None"),
        ({**MIXTRAL_FILE, "hidden_size": "6144"}, "got '6144'"),
        ({**MIXTRAL_FILE, "num_experts_per_tok": 9}, "at most as many experts per token"),
        ({**QWEN3, "mlp_only_layers": 3}, "must be a list, got 3"),
        ({**QWEN3, "num_experts": "x"}, "whole number of experts"),
        ({**QWEN3, "num_hidden_layers": 10**12}, "whole number of 1 to 10000000"),
        ({**QWEN3, "mlp_only_layers": list(range(94))}, "at least one layer with experts"),
    ],
)
def test_a_config_that_can_not_be_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        model_of(config, "m")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"must (be JSON|hold a JSON object), got"):
        find_model(str(tmp_path))


TINY = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 128,
}


STAGE = {"stage": "experts", "tp": 1, "rows": [1, 2], "seconds": [1, 2]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    sizes = ["--rows", "2,4,8,16", "--tp", "1,2", "--length", "20", "--dtype", "float32"]
    out = ["--out", str(folder / "profile.json"), "--device", "cpu", "--repeats", "5"]
    out += ["--transport", "sockets"]
    assert main(["rollout", "profile", "--model", str(folder), *sizes, *out]) == 0
    return folder


def test_the_fit_finds_line_and_floor():
    found = fit([1.0, 2.0, 4.0, 8.0, 16.0], [5.0, 5.0, 5.0, 9.0, 17.0])
    assert vars(found) == pytest.approx({"slope": 1.0, "offset": 1.0, "floor": 5.0, "r2": 1.0})
    # A straight line has its floor at the first rows.
    found = fit([1.0, 2.0, 3.0], [5.0, 7.0, 9.0])
    assert (found.slope, found.offset, found.floor) == pytest.approx((2.0, 3.0, 5.0))
    assert fit([1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 1.0, 9.0, 2.0, 6.0]).r2 < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x22b", "deepseek-v3"])
@pytest.mark.parametrize("tp", [1, 8])
def test_what_is_measured_has_the_shapes_of_the_planner(name, tp):
    model = MODELS[name]
    small = type(model)(**{**vars(model), "hidden_size": 16, "expert_size": 24})
    device = torch.device("cpu")
    shapes = (small, tp, 3, 5, device, torch.float32)
    assert attention_layer(*shapes)().shape == (3, 16)
    assert expert_layer(*shapes)().shape == (3, 16)


def test_a_plan_takes_the_measured_stages(measured, tmp_path):
    # Noise must not decide: the times of the file are replaced by round ones.
    document = json.loads((measured / "profile.json").read_text())
    assert (document["label"], document["gpu"]["name"]) == ("measured-cpu", "cpu")
    found = {(one["stage"], one["tp"]) for one in document["stages"]}
    assert found == {(stage, tp) for stage in ("attention", "experts") for tp in (1, 2)}
    for one in document["stages"]:
        assert one["rows"] == [2, 4, 8, 16]
        assert min(one["seconds"]) > 0
        one["seconds"] = [1.0, 1.0, 2.0, 4.0] if one["stage"] == "experts" else [3.0] * 4
    network = document["network"]
    assert (network["transport"], len(network["bytes"])) == ("sockets", len(network["seconds"]))
    assert all(seconds > 0 for seconds in network["seconds"])
    document["network"] = {"slope": 0.001, "offset": 0.5}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    gpus = ["--attention-gpus", "cpu", "--expert-gpus", "cpu", "--profile", str(path)]
    shape = ["--tp-a", "1", "--tp-e", "1", "--replicas", "1", "--micro-batches", "3"]
    load = ["--input", "10", "--output", "20", "--batch", "48", "--slo-ms", "inf"]
    arguments = ["rollout", "plan", "--model", str(measured), *gpus, *shape, *load]
    assert main([*arguments, "--json", str(tmp_path / "plan.json")]) == 0
    made = json.loads((tmp_path / "plan.json").read_text())
    # 16 rows on the replica; each of 8 experts has 4 of them.
    assert made["plan"]["b_a"] == 16
    assert made["times_s"]["attention"] == pytest.approx(3.0, rel=1e-3)
    assert made["times_s"]["expert"] == pytest.approx(1.0, rel=1e-3)
    # 16 rows go to two experts each, with 64 numbers of two bytes.
    assert made["times_s"]["network"] == pytest.approx(0.5 + 0.001 * 16 * 2 * 64 * 2)
    assert made["per_watt"] is None
    assert main(["rollout", "simulate", str(tmp_path / "plan.json"), "--requests", "30"]) == 0


def test_another_length_is_corrected_by_the_cache(measured):
    path, model = measured / "profile.json", find_model(str(measured))
    slopes = [
        read_profile(path, model, length, Constants())[2]["attention", "cpu", 1].slope
        for length in (20, 40)
    ]
    assert slopes[0] == 0.0 < slopes[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [{**STAGE, "rows": [2, 1]}]}, "rows must rise"),
        ({"stages": [{**STAGE, "rows": [1], "seconds": [1]}]}, "at least 2 items"),
        ({"stages": [{**STAGE, "stage": "x"}]}, "should be 'attention' or 'experts'"),
        ({"stages": [{"stage": "experts", "tp": 1}]}, "stages.0.rows: Field required"),
        ({"gpu": {"name": "cpu"}}, "gpu.memory_bytes: Field required"),
        ({"network": {"slope": 0.0, "offset": 1.0}}, "network.slope: Input should be greater"),
    ],
)
def test_a_damaged_profile_is_refused(measured, tmp_path, change, message, capsys):
    document = json.loads((measured / "profile.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps({**document, **change}))
    sides = ["--attention-gpus", "cpu", "--expert-gpus", "cpu"]
    arguments = ["rollout", "plan", "--model", str(measured), *sides]
    assert main([*arguments, "--profile", str(tmp_path / "p.json")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "must be a file of `planish rollout profile`" in error


@pytest.mark.parametrize(
    ("action", "arguments", "message"),
    [
        ("plan", ["--model", "dbrx"], "must be of the model that is planned, dbrx"),
        ("plan", ["--objective", "watt"], "needs the watts of each GPU, got none for cpu"),
        ("plan", ["--attention-gpus", "b200"], "h200, cpu, got b200"),
        (
            "plan",
            ["--attention-gpus", "a800", "--expert-gpus", "h20"],
            "a GPU that is tried, got one of cpu",
        ),
        ("profile", ["--rows", "4"], "`--rows` must name at least 2"),
        ("profile", ["--tp", "3"], "`--tp` must divide"),
        ("profile", ["--out", "/no/such/p.json"], "`--out` must be a file"),
        pytest.param(
            *("profile", ["--device", "cuda"], "needs an accelerator"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(measured, tmp_path, action, arguments, message, capsys):
    options = {
        "plan": ["--attention-gpus", "cpu", "--expert-gpus", "cpu", "--profile"],
        "profile": ["--rows", "1,2", "--length", "4", "--repeats", "1", "--device", "cpu", "--out"],
    }[action]
    file = {"plan": measured / "profile.json", "profile": tmp_path / "p.json"}[action]
    base = ["rollout", action, "--model", str(measured), *options, str(file)]
    assert main([*base, *arguments]) == 2
    assert message in capsys.readouterr().err
