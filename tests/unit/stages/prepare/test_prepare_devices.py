"""Settings against the pods of a profile."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from pipelines.post_train import largest_requests, profile_named
from planish.__main__ import main
from planish.base.config import preset_names
from planish.base.errors import ConfigError
from planish.models.shapes import shape_of
from planish.stages.prepare.cluster import PodRequests
from planish.stages.prepare.devices import (
    HOST,
    demands,
    device_faults,
    device_warnings,
    find_shape,
    memory_rows,
    profile_requests,
    this_machine,
    trainer_faults,
)
from planish.stages.prepare.settings import build_config

GPUS = "gpu-1x8"
AHEAD = "rollout.ahead=1 algorithm.correction=token_truncate"


def configured(preset, overrides=""):
    return build_config(
        preset=preset, config="", overrides=overrides, model="", dataset="", seed=-1
    )


def judged(preset, profile=GPUS, overrides=""):
    """Return the faults of devices, and the demands that do not fit."""
    config, requests = configured(preset, overrides), profile_requests(profile)
    found = demands(config, find_shape(config), requests)
    return device_faults(config, requests), [each.fault for each in found if each.fault]


@pytest.mark.parametrize("preset", [name for name in preset_names() if "qwen" in name])
def test_the_presets_for_eight_gpus_fit_and_waste_nothing(preset):
    assert judged(preset) == ([], [])
    assert device_warnings(configured(preset), profile_requests(GPUS)) == []
    train, *others = demands(
        configured(preset), find_shape(configured(preset)), profile_requests(GPUS)
    )
    assert train.device == "each of 8 GPUs"
    assert {each.stage for each in others} == {"train", "rollout", "evaluate"}
    told = judged(preset, "cpu-tiny")[1]
    assert "`train` must fit in the 1.5 GiB that the host memory leaves for it" in told[0]


def test_what_training_holds_is_what_zero_says_of_it():
    """Sixteen bytes a parameter, shared by eight GPUs; a critic adds twelve."""
    config, requests = configured("vapo-qwen2.5-7b"), profile_requests(GPUS)
    shape = find_shape(config)
    parts = demands(config, shape, requests)[0].parts
    policy, critic = shape.parameters, shape.parameters - 152_064 * 3584
    assert parts[0].num_bytes + parts[1].num_bytes == 12 * (policy + critic) // 8
    assert parts[2].num_bytes == 4 * policy // 8
    assert parts[3].num_bytes == 24_576 * 28 * 3584 * 2


def requests_apart(profile):
    return PodRequests.parse(
        largest_requests(profile_named(profile, num_iterations=2, iterations_per_task=0))
    )


def test_the_engine_says_how_many_tokens_its_cache_holds():
    config = configured("dapo-qwen2.5-7b")
    rollout = demands(config, find_shape(config), profile_requests(GPUS))[2]
    weights, forward, cache = rollout.parts
    assert weights.num_bytes == 2 * 7_615_616_512
    # Weights and moments of the trainer leave 77 % of the GPU: 0.92 - 12 B x 7.6e9 / 8 / 80e9.
    # 28 layers x 4 heads x 128 numbers x keys and values x 2 bytes
    left = int(0.77 * 80 * 10**9)
    assert cache.num_bytes // 57_344 == (left - weights.num_bytes - forward.num_bytes) // 57_344
    assert "751,647 tokens x 57,344 B, room for 73.4 of the longest responses" in cache.how
    apart = demands(config, find_shape(config), requests_apart("gpu-16x8"))[2]
    assert apart.room_bytes == 68 * 10**9


def test_a_cold_start_is_planned_where_there_is_one():
    """A given model begins as it is, unless it is told to learn from traces."""

    def stages(preset, overrides=""):
        config = configured(preset, overrides)
        text = largest_requests(profile_named(GPUS, cold_start=True))
        found = demands(config, find_shape(config), PodRequests.parse(text))
        return {demand.stage: demand for demand in found}

    assert "sft" in stages("dapo-tiny")
    assert "sft" not in stages("dapo-qwen2.5-0.5b")
    forced = "sft.force=true sft.traces_per_minibatch=4 sft.max_response_tokens=1024"
    start = stages("dapo-qwen2.5-0.5b", forced)["sft"]
    weights, moments, activations, _, engine = start.parts
    assert weights.num_bytes + moments.num_bytes == 16 * 494_032_768
    assert "4 traces x " in activations.how
    # vLLM takes its share whatever it needs of it.
    assert engine.num_bytes == pytest.approx(0.3 * 80e9, rel=0.01)
    assert not start.fault
    fault = stages("dapo-qwen2.5-7b", forced.replace("=4", "=1"))["sft"].fault
    assert "are AdamW moments and gradients" in fault
    assert "(`sft.force=false`)" in fault


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("rollout.device=cpu", "`rollout.device` must be 'auto' or 'cuda' in a pod of 8 GPUs, got"),
        ("train.device=cpu", "`train.device` must be 'auto' or 'cuda' in a pod of 8 GPUs, got"),
        ("evaluate.device=cpu", "`evaluate.device` must be"),
        ("sft.device=cuda", "`sft.device` must be"),
        ("curate.pass_rate_device=cuda", "`curate.pass_rate_device` must be"),
        ("sft.force=true", "`sft.force` must be off in a pipeline whose `sft` has a pod of no"),
        ("curate.pass_rate_policy=s3://b/p", "got 's3://b/p'; compile it with GPUs for it"),
        ("train.num_processes=1", "must be 0 or 8 in a pod of 8 GPUs, got 1; 0 is one for each"),
        ("engine.tensor_parallel=2", "at most the GPUs of a pod of `evaluate` (1), got 2"),
        ("engine.tensor_parallel=3", "several iterations, got 3 for 8 and 8; `train.num_proc"),
    ],
)
def test_settings_of_a_cpu_are_refused_in_a_pod_with_gpus(overrides, told):
    assert told in "; ".join(judged("dapo-qwen2.5-0.5b", overrides=overrides)[0])
    assert judged("dapo-qwen2.5-0.5b", overrides="train.num_processes=8") == ([], [])


def test_an_accelerator_is_refused_in_a_pod_without_one():
    faults, _ = judged("dapo-tiny", "cpu-tiny", "rollout.device=cuda")
    assert faults == [
        "`rollout.device` must be 'auto' or 'cpu' in a pod of no GPUs, got 'cuda'; change it, or "
        "take another profile"
    ]
    for preset in (name for name in preset_names() if name.endswith("-tiny")):
        assert judged(preset, "cpu-tiny") == ([], [])


def test_a_model_from_scratch_is_refused_in_pods_with_gpus():
    for preset in preset_names():
        # The sizes of their model stand on the hub alone.
        overrides = "model.path=Qwen/Qwen2.5-0.5B" * preset.endswith("-small")
        (faults, _), is_small = judged(preset, overrides=overrides), preset.endswith("-tiny")
        assert [fault[:50] for fault in faults] == is_small * [
            "`model.path` must name a model in pods with GPUs, "
        ], preset
    assert judged("dapo-tiny", overrides="model.path=Qwen/Qwen2.5-0.5B") == ([], [])
    # Nothing is known of the pods of a run on this machine, whatever it has.
    assert device_faults(configured("dapo-tiny"), this_machine()) == []


@pytest.mark.parametrize(
    ("preset", "overrides", "told"),
    [
        (
            "dapo-qwen2.5-7b",
            "train.activation_checkpointing=false",
            "are activations kept; set `train.activation_checkpointing=true`, set",
        ),
        ("dapo-qwen2.5-7b", "model.path=Qwen/Qwen2.5-32B", "set `train.offload=true`, lower"),
        ("dapo-qwen2.5-7b", "train.replicas=8", "moments, float32; lower `train.replicas`, set"),
        ("vapo-qwen2.5-7b", "train.offload=true model.path=Qwen/Qwen2.5-72B", "the host memory"),
        ("dapo-qwen2.5-7b", "model.path=Qwen/Qwen2.5-72B", "`rollout` must fit in the 762.9 MiB"),
        ("dapo-qwen2.5-7b", "engine.memory_share=0.2", "raise `engine.memory_share`, lower"),
        ("dapo-paper", "", "are keys and values; lower `rollout.max_rows`"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(preset, overrides, told):
    assert told in "; ".join(judged(preset, overrides=overrides)[1])


def test_float32_on_gpus_is_a_warning():
    config = configured("dapo-qwen2.5-0.5b", "train.compute_dtype=float32")
    assert "in bfloat16" in device_warnings(config, profile_requests(GPUS))[0]
    assert device_warnings(config, profile_requests("cpu-tiny")) == []


def test_a_folder_says_its_sizes_itself(tmp_path):
    folder = tmp_path / "Qwen2.5-7B"
    transformers.Qwen2Config(num_hidden_layers=3).save_pretrained(folder)
    config = configured("dapo-qwen2.5-7b", f"model.path={folder}")
    assert find_shape(config).layers == 3
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got"):
        find_shape(config)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="must hold config"):
        find_shape(configured("dapo-qwen2.5-7b", f"model.path={tmp_path}"))


def test_a_model_whose_memory_is_unknown_is_told_and_not_refused():
    config, requests = configured("dapo-qwen2.5-7b"), profile_requests(GPUS)
    assert memory_rows(config, {}, requests) == ([], [])
    strange = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
    ((what, told),), _ = memory_rows(config, strange, requests)
    assert (what, told[:13]) == ("memory", "not counted: ")


def test_an_estimate_of_a_gpu_only_warns_before_a_run():
    config, requests = configured("dapo-qwen2.5-7b"), profile_requests(GPUS)
    shape = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28}
    shape |= {"num_hidden_layers": 80, "intermediate_size": 18944, "vocab_size": 152064}
    shape["max_position_embeddings"] = 32768
    rows, warnings = memory_rows(config, shape, requests)
    assert len(rows) == 4
    assert "`train` must fit in the 68.5 GiB that each of 8 GPUs leaves" in warnings[0]
    assert "`rollout` must fit in the 38.0 GiB that each of 8 GPUs leaves" in warnings[1]
    assert all(line.endswith("(an estimate)") for line in warnings)
    # The host's memory is a limit that kills.
    shape["num_hidden_layers"] = 280
    config = configured("dapo-qwen2.5-7b", "train.offload=true")
    with pytest.raises(ConfigError, match="that the host memory leaves for it"):
        memory_rows(config, shape, requests)


def test_this_machine_is_the_pod_of_a_local_run(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    requests = this_machine()
    assert requests.stages["train"].memory_bytes > 1 << 28
    with pytest.raises(ConfigError, match="that the host memory leaves for it"):
        memory_rows(configured("dapo-tiny", "model.hidden_size=1000000"), {}, requests)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    assert this_machine().stages == {}


def test_the_command_tells_all_and_ends_with_2_where_something_does_not_fit(capsys):
    assert main(["plan", "dapo-qwen2.5-0.5b", "--profile", GPUS]) == 0
    shown = capsys.readouterr().out
    assert "Qwen/Qwen2.5-0.5B-Instruct: 494,032,768 parameters, gpu-1x8" in shown
    assert "of 68.5 GiB: fits" in shown
    assert main(["plan", "dapo-qwen2.5-7b", "--gpu-memory", "24", "run.seed=1", "--json"]) == 2
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["gpu_bytes"] == 24 * 10**9
    fits = [(each["stage"], each["fits"]) for each in document["demands"]]
    assert fits == [("train", False), ("train", True), ("rollout", False), ("evaluate", True)]
    assert told.err.startswith("planish: `train` must fit in the 20.6 GiB")
    for words in (["--gpu-memory", "0.5"], ["--profile", "gpu-2x8"], ["model.path=/absent"]):
        assert main(["plan", "dapo-qwen2.5-7b", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


MEGATRON = 'train.trainer="megatron" train.tensor_parallel=4 train.num_processes=0'
SPARSE = "model.num_heads=8 model.num_kv_heads=4 model.num_experts=4"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("model.num_heads=8 model.num_kv_heads=4", ()),
        ("", ("the 2 heads of", "the 1 heads of keys and values")),
        ("model.num_heads=8 model.num_kv_heads=4 model.lora_rank=4", ("`model.lora_rank`",)),
        (
            "model.num_heads=8 model.num_kv_heads=4 model.num_layers=4 train.pipeline_parallel=3",
            ("`train.pipeline_parallel` must divide the 4 layers of the model, got 3",),
        ),
        ("model.num_heads=8 model.num_kv_heads=4 model.num_layers=4 train.pipeline_parallel=2", ()),
        (f"{SPARSE} train.sequence_parallel=true train.expert_parallel=2", ()),
        (SPARSE, ("`train.sequence_parallel` must be true",)),
        (f"{SPARSE} train.expert_parallel=3", ("must divide the 4 experts of a layer, got 3",)),
        (
            "model.num_heads=8 model.num_kv_heads=4 train.expert_parallel=2",
            ("`train.expert_parallel` must be 1 for a model without experts, got 2",),
        ),
        ("model.num_heads=8 model.num_kv_heads=4 train.context_parallel=2", ()),
        (
            "model.num_heads=8 model.num_kv_heads=4 train.context_parallel=4",
            ("`train.context_parallel` must divide the heads of a model, and its heads",),
        ),
    ],
)
def test_a_model_that_ranks_can_not_share_is_refused_before_any_is_opened(changes, words):
    config = configured("dapo-tiny", " ".join(filter(None, [MEGATRON, changes])))
    faults = trainer_faults(config, find_shape(config))
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults, strict=True))
    if words:
        with pytest.raises(ConfigError, match=re.escape(words[0])):
            memory_rows(config, {}, this_machine())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("train.tensor_parallel=2", "`trainer = 'megatron'` cuts matrices"),
        ("train.expert_parallel=2", "the trainer 'fsdp2', got (1, 1, 2)"),
        (MEGATRON + " train.num_processes=6", "a multiple of `tensor_parallel` (4), got 6"),
        ('train.trainer="megatron" train.sequence_parallel=true', "with `tensor_parallel = 1`"),
        ("train.context_parallel=2 train.packing=false", "`packing` must be true with `context_p"),
        ("train.split=three", "must read `samplers:trainers`"),
        ("train.split='3:0'", "must read `samplers:trainers`"),
    ],
)
def test_a_grid_that_is_none_is_refused(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        configured("dapo-tiny", settings)


@pytest.mark.parametrize(
    ("profile", "settings", "words"),
    [
        ("gpu-1x8", "train.expert_parallel=16", "got 16 for 8; lower it"),
        ("gpu-4x8", "train.expert_parallel=16", ""),
        ("gpu-4x8", "train.expert_parallel=16 train.pipeline_parallel=4", "got 16 for 8; lower it"),
        ("gpu-1x8", "train.tensor_parallel=3", "got 3 x 1 x 1 for 8; `train.num_processes` sets"),
        ("gpu-1x8", "train.context_parallel=3", "got 1 x 1 x 3 for 8; `train.num_processes` sets"),
        ("cpu-tiny", "train.expert_parallel=2", "got 2 for 1; lower it"),
        ("cpu-tiny", "train.expert_parallel=2 train.num_processes=2", ""),
    ],
)
def test_a_grid_that_the_pods_do_not_fill_is_refused(profile, settings, words):
    grid = f'train.trainer="megatron" train.num_processes=0 {settings}'
    config = configured("dapo-tiny", f"{grid} model.path=Qwen/Qwen2.5-0.5B")
    faults = device_faults(config, profile_requests(profile))
    assert len(faults) == bool(words)
    assert not words or words in faults[0]


@pytest.mark.parametrize(
    ("profile", "settings", "words"),
    [
        ("gpu-4x8", "", ()),
        ("gpu-4x8", "train.split='2:1'", ("'2:1' must divide the number of training proc",)),
        ("gpu-4x8", "train.replicas=3", ("`train.replicas` must divide the number of",)),
        ("gpu-1x8", "train.replicas=2", ()),
        ("gpu-16x8", "engine.tensor_parallel=4", ()),
        (
            "gpu-4x8",
            "train.split='1:1' engine.tensor_parallel=16",
            ("for 8 and 16;", "(8), got", "(1), got"),
        ),
        ("cpu-tiny", "", ("must be 0 where every stage", "with `rollout.ahead`, got 1;")),
        ("cpu-tiny", "train.num_processes=4", ("must be 0 where every stage",)),
    ],
)
def test_a_split_of_ranks_that_can_not_be_is_refused(profile, settings, words):
    config = configured("dapo-qwen2.5-0.5b", f"{AHEAD} train.num_processes=0 {settings}")
    faults = device_faults(config, profile_requests(profile))
    assert len(faults) == len(words), faults
    for word in words:
        assert any(word in fault for fault in faults)


def test_ranks_that_sample_ahead_have_devices_of_their_own():
    shape = find_shape(configured("dapo-qwen2.5-7b"))

    def of(profile, settings):
        config = configured("dapo-qwen2.5-7b", settings)
        found = demands(config, shape, profile_requests(profile))
        return {each.stage: each for each in found if "GPU" in each.device}

    ahead, in_turn = of("gpu-4x8", AHEAD), of(GPUS, "")
    # Eight ranks of the 32 train, as on one machine.
    assert ahead["train"].parts == in_turn["train"].parts
    assert ahead["train"].device == "each of 8 GPUs"
    assert ahead["rollout"].room_bytes > in_turn["rollout"].room_bytes
    assert not any(each.fault for each in ahead.values())
    config = configured("dapo-tiny", f"{AHEAD} train.num_processes=4")
    found = demands(config, find_shape(config), this_machine(in_turn=True))
    (parts,) = (each.parts for each in found if each.stage == "iterate")
    assert {part.how.rpartition(" x ")[2] for part in parts if " x " in part.how} >= {"3"}


@pytest.mark.parametrize(
    ("profile", "num_nodes", "is_refused"),
    [
        *(("gpu-1x8", 0, False), ("gpu-1x8", 1, False), ("gpu-1x8", 4, True)),
        *(("gpu-4x8", 1, False), ("gpu-4x8", 3, False), ("gpu-16x8", 8, False)),
        ("cpu-tiny", 2, False),
    ],
)
def test_a_pod_with_gpus_does_not_wait_for_others_like_it(profile, num_nodes, is_refused):
    settings = f"train.num_processes=0 train.num_nodes={num_nodes}"
    config = configured("dapo-tiny", f"{settings} model.path=Qwen/Qwen2.5-0.5B")
    requests = profile_requests(profile)
    # Submit asks with what the profile says, and prepare with what the settings make of it.
    for each in (requests, requests.of_training(config["train"])):
        faults = device_faults(config, each)
        assert len(faults) == is_refused
        words = f"take the profile gpu-4x8 or gpu-16x8 with `train.num_nodes={num_nodes}`"
        assert not is_refused or words in faults[0]


def test_a_family_that_megatron_does_not_train_is_refused_by_name():
    config = configured("dapo-qwen2.5-7b", 'train.trainer="megatron"')
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 1024}
    with pytest.raises(ConfigError, match="'fsdp2' for a model with `model_type` 'mist"):
        memory_rows(config, {"model_type": "mistral", **sizes}, this_machine())
    deep = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
    with pytest.raises(ConfigError, match=r"'fsdp2' for such a model.*'deepseek_v3'"):
        memory_rows(config, deep, this_machine())
    config = configured("dapo-qwen2.5-7b", "train.context_parallel=2")
    with pytest.raises(ConfigError, match="rows can not be packed, got 2 for 'gemma2'; take one"):
        memory_rows(config, {"model_type": "gemma2", **sizes}, this_machine())


def test_ranks_that_share_experts_hold_their_part_of_them():
    """Qwen3-30B-A3B on eight GPUs: most of it is experts, of which each holds an eighth."""
    model = transformers.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128).to_dict()
    shape, requests = shape_of(model), profile_requests(GPUS)
    settings = 'train.trainer="megatron" train.expert_parallel='
    weights, moments = [], []
    for ranks in (1, 8):
        config = configured("dapo-qwen2.5-7b", f"{settings}{ranks}")
        parts = demands(config, shape, requests)[0].parts
        weights.append(parts[0].num_bytes)
        moments.append(parts[1].num_bytes)
    experts = 48 * 128 * 3 * 2048 * 768
    assert weights[0] == 4 * shape.parameters
    assert weights[0] - weights[1] == 4 * experts * 7 // 8
    assert moments[1] == 2 * weights[1]


# Sizes of Qwen3-30B-A3B.
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("engine", ["disagg", "vllm_disagg"])
def test_each_rank_of_attention_and_experts_has_a_device_of_its_own(engine, tmp_path, capsys):
    """Three ranks do not fit one GPU; they fit a pod of four, in which one has nothing to do."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    words = ["plan", "dapo-qwen2.5-0.5b", f"engine.name={engine}", "engine.expert_ranks=2"]
    words += [f"model.path={tmp_path}", "rollout.max_rows=64", "evaluate.max_rows=64"]
    words += ["train.num_processes=0", "--json"]

    def planned(profile):
        main([*words, "--profile", profile])
        document = json.loads(capsys.readouterr().out)
        ours = [d for d in document["demands"] if d["stage"] == "rollout"]
        return document["faults"], {d["device"]: (d["fits"], d["parts"]) for d in ours}

    faults, _ = planned("gpu-1x8")
    told = "`engine.attention_ranks` + `engine.expert_ranks` must be at most the GPUs of a pod of"
    assert [f"{told} `evaluate` (1), got 3" in fault for fault in faults].count(True) == 1
    assert f"`engine.name` = '{engine}' needs iterations apart" in faults[0]
    faults, devices = planned("gpu-16x8")
    assert [fault for fault in faults if "engine" in fault] == faults[:1]
    assert list(devices) == ["GPU 0 of attention", "each of GPUs 1 to 2 of experts"]
    assert [fits for fits, _ in devices.values()] == [True, True]
    # 48 layers x 64 experts x 3 matrices of 2048 x 768, and all else of the model.
    experts = 48 * 64 * 3 * 2048 * 768
    attention, (of_experts, arriving) = (parts for _, parts in devices.values())
    assert of_experts["num_bytes"] == 2 * experts
    rate, seconds = ("0.24", 120) if engine == "disagg" else ("0.032", 900)
    told = f"read at {rate} GB/s or more (`engine.rank_timeout_seconds` allows {seconds} s)"
    assert told in of_experts["how"]
    assert attention[0]["num_bytes"] == 2 * (shape_of(EXPERTS).parameters - 2 * experts)
    # Both ways, for each micro-batch: 512 tokens go to at most eight experts each, 2048 x 2 bytes.
    slots = 2 if engine == "disagg" else 1
    assert arriving["num_bytes"] == 2 * slots * 512 * 8 * 4096
    assert attention[-2]["num_bytes"] == 2 * arriving["num_bytes"]
    # The same in words, for pods of which evaluation has one device.
    words[words.index("--json")] = "--profile=gpu-4x8"
    assert main(words) == 2
    shown = capsys.readouterr()
    for told in ("rollout, GPU 0 of attention", "rollout, each of GPUs 1 to 2 of experts"):
        assert told in shown.out
    assert "`evaluate` (1), got 3" in shown.err


def test_ranks_elsewhere_take_no_device_of_the_pod(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    overrides = f"engine.name=disagg engine.peers=['a:1','b:1'] model.path={tmp_path}"
    config, requests = configured("dapo-qwen2.5-0.5b", overrides), requests_apart("gpu-16x8")
    (fault,) = device_faults(config, requests)
    assert "must run one rollout task at a time, got 32; compile it with one shard" in fault
    requests = replace(requests, moments={"rollout": (1, {})})
    assert device_faults(config, requests) == []
    found = demands(config, find_shape(config), requests)
    assert {demand.stage for demand in found} == {"train"}


def test_offload_and_replicas_say_where_the_state_lies():
    """Qwen2.5-32B and Qwen3-30B-A3B on the machines they are trained on."""
    gpu = "train.compute_dtype=bfloat16 train.activation_checkpointing=true engine.name=vllm"

    def planned(overrides, profile, shape=None):
        config = configured("dapo-paper", f"{gpu} {overrides}")
        shape = shape or find_shape(config)
        found = demands(config, shape, profile_requests(profile))
        assert [each.fault for each in found if each.fault] == []
        return shape, {(each.stage, each.device): list(each.parts) for each in found}

    shape, found = planned("engine.tensor_parallel=4", "gpu-16x8")
    state = 16 * shape.parameters
    parts = found["train", "each of 128 GPUs"]
    assert sum(part.num_bytes for part in parts[:3]) == pytest.approx(state / 128, abs=128)
    _, found = planned("engine.tensor_parallel=4 train.replicas=4", "gpu-16x8")
    parts = found["train", "each of 128 GPUs"]
    assert sum(part.num_bytes for part in parts[:3]) == pytest.approx(state / 32, abs=128)
    # Embedding, head and its gradient are whole on each GPU, in the type of the head.
    half = "engine.tensor_parallel=4 train.replicas=4 model.head_dtype=bfloat16"
    less = planned(half, "gpu-16x8")[1]["train", "each of 128 GPUs"][-1]
    assert parts[-1].num_bytes - less.num_bytes == 2 * (3 * 152_064 + 1) * 5120
    shape, found = planned("train.offload=true", "gpu-4x8", shape_of(EXPERTS))
    assert not any("masters" in part.name for part in found["train", "each of 32 GPUs"])
    host = found["train", "the host memory"]
    *state, batch = host
    assert sum(part.num_bytes for part in state) == pytest.approx(
        16 * shape.parameters / 4, abs=128
    )
    # Each of the eight ranks of a machine has as many rows.
    assert (batch.name, batch.num_bytes % 8) == ("rollout batch", 0)


@pytest.mark.parametrize(
    ("overrides", "each", "ranks"),
    [
        ("", 76, 8),
        ("algorithm.kl_coefficient=0.04", 80, 8),
        ("algorithm.name=vapo", 104, 8),
        ("rollout.prompts_per_iteration=1024", 76, 8),
        ("train.num_processes=4", 76, 4),
        ("train.context_parallel=2", 76, 8),
    ],
)
def test_the_rows_of_a_rank_and_the_rollouts_it_reads_are_counted_in_host_memory(
    overrides, each, ranks
):
    preset = "vapo-qwen2.5-7b" if "vapo" in overrides else "dapo-qwen2.5-7b"
    sizes = (
        "rollout.prompts_per_iteration=512 rollout.group_size=16 rollout.max_prompt_tokens=2048 "
    )
    sizes += "rollout.max_response_tokens=20480 " + overrides.replace("algorithm.name=vapo", "")
    config, requests = configured(preset, sizes), profile_requests(GPUS)
    parts = [d.parts for d in demands(config, find_shape(config), requests) if d.device == HOST]
    rows = 16 * int(config["rollout"]["prompts_per_iteration"])
    groups = ranks // config["train"].get("context_parallel", 1)
    wanted = ranks * 22_528 * (rows // groups * each + rows * 20)
    assert parts[0][-1].num_bytes == wanted
    short = replace(
        requests, stages={k: replace(v, memory="64Gi") for k, v in requests.stages.items()}
    )
    fault = next(d for d in demands(config, find_shape(config), short) if d.device == HOST).fault
    is_large = wanted > 60 << 30
    assert ("are rollout batch; lower `rollout.prompts_per_iteration`" in fault) == is_large


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_ranks_that_share_tokens_keep_their_part_of_the_activations(checkpointing):
    overrides = 'train.trainer="megatron" train.tensor_parallel=4 train.sequence_parallel='

    def kept(is_shared):
        again = f" train.activation_checkpointing={checkpointing}"
        config = configured("dapo-qwen2.5-7b", overrides + is_shared + again)
        parts = demands(config, find_shape(config), profile_requests(GPUS))[0].parts
        (found,) = (part.num_bytes for part in parts if part.name == "activations kept")
        return found

    assert kept("false") == 4 * kept("true") > 0


def test_ranks_that_share_rows_hold_their_part_of_a_long_response():
    def planned(ranks):
        overrides = f"rollout.max_response_tokens=98304 train.context_parallel={ranks}"
        config = configured("dapo-qwen2.5-7b", overrides)
        return demands(config, find_shape(config), profile_requests(GPUS))[0]

    assert "`rollout.max_response_tokens`, raise `train.context_parallel`, or" in planned(1).fault
    assert planned(4).parts[3].num_bytes == 98_304 // 4 * 28 * 3584 * 2 + 2048 // 4 * 28 * 7168
    assert not planned(4).fault
