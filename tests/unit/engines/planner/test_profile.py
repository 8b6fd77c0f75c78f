"""Measured stages: the fit, the file, and plans that use it."""

import json

import pytest
import torch

from planish.__main__ import main
from planish.engines.planner.documents import read_profile
from planish.engines.planner.models import MODELS, find_model
from planish.engines.planner.performance import Constants
from planish.engines.planner.profile import attention_layer, expert_layer, fit

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
    assert made["per_watt"] is None
    assert main(["rollout", "simulate", str(tmp_path / "plan.json"), "--requests", "30"]) == 0


def test_another_length_is_corrected_by_the_cache(measured):
    path, model = measured / "profile.json", find_model(str(measured))
    slopes = [
        read_profile(path, model, length, Constants())[1]["attention", "cpu", 1].slope
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
