"""Settings that cannot be together, one table for each place that refuses them."""

import json
import re

import pytest

from planish.algorithms import ALGORITHMS
from planish.base.config import (
    SECTIONS,
    Needs,
    Section,
    Wanted,
    load_preset,
    merge,
    need_faults,
    parse_settings,
    preset_names,
    resolve_config,
    section_class,
    setting,
)
from planish.base.errors import ConfigError
from planish.engines import APART
from planish.models.shapes import shape_of
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.devices import (
    device_faults,
    find_shape,
    memory_rows,
    profile_requests,
    this_machine,
    trainer_faults,
)

MODEL = "model.path=Qwen/Qwen2.5-0.5B"
WINDOWS = "rollout.window_tokens=16 rollout.dynamic_sampling=false"
KEEP = "reward.keep_uniform_groups=true"
GROUPS = f"{WINDOWS} rollout.unfinished=hold_group"
AHEAD = "rollout.ahead=1 algorithm.correction=token_truncate"
PIN = f"file:///p#sha256={'0' * 64}"
EXPERTS = "model.num_experts=4"
MEGATRON = "train.trainer=megatron train.tensor_parallel=4 train.num_processes=0"
HEADS = "model.num_heads=8 model.num_kv_heads=4"


def configured(words="", preset=None):
    """Return the sections of a preset, or of the defaults, with overrides."""
    given = load_preset(preset) if preset else {}
    return parse_settings(resolve_config(merge(given, overrides=words.split())))


class Toy(Section):
    size: int = setting(1, Needs("toy.kind", ("a", "b"), "it has none"), ge=1)
    """Size."""
    kind: str = setting("a", Needs("other.rate", when="b"))
    """Kind."""


@pytest.mark.parametrize(
    ("toy", "told"),
    [
        ({"size": 2}, ""),
        # A section alone is judged by its own settings.
        ({"size": 2, "kind": "b"}, ""),
        (
            {"size": 2, "kind": "c"},
            '`toy.kind` must be "a" or "b" with `toy.size` = 2, got "c"; it has none',
        ),
    ],
)
def test_a_need_is_refused_with_the_value_seen_and_the_reason(toy, told):
    assert "; ".join(need_faults({"toy": Toy(**toy)})) == told


CLASSES = {name: section_class(name, {}) for name in SECTIONS} | {
    f"algorithm.{name}": section_class("algorithm", {"name": name}) for name in ALGORITHMS
}
DECLARED = [
    pytest.param(section, name, need, id=f"{section}.{name} needs {need.path}")
    for section, cls in CLASSES.items()
    for name in cls.model_fields
    for need in cls.declared(name, "needs")
]


def changed(value):
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"x": 1}
    if isinstance(value, str | tuple):
        return value + type(value)("x")
    return (value or 0) + 1


def first(values, default):
    """Return a value among the wanted ones."""
    if isinstance(values, Wanted):
        return changed(default)
    return values[0] if isinstance(values, tuple) else values


@pytest.mark.parametrize(("section", "name", "need"), DECLARED)
def test_each_declared_need_is_refused_by_name(section, name, need):
    own = section.partition(".")[0]
    sections = {key: CLASSES[key]() for key in SECTIONS} | {own: CLASSES[section]()}

    def default(path):
        place, _, key = path.partition(".")
        return getattr(CLASSES[section if place == own else place](), key)

    def faults(path, value):
        place, _, key = path.partition(".")
        sections[place] = sections[place].model_copy(update={key: value})
        starts = f"`{need.path}` must ", f" with `{own}.{name}` = "
        return [f for f in need_faults(sections) if f.startswith(starts[0]) and starts[1] in f]

    value = first(need.when, default(f"{own}.{name}"))
    wanted = value if need.values is Wanted.SAME else first(need.values, default(need.path))
    wrong = default(need.path) if need.values is Wanted.IN_USE else changed(wanted)
    for path, values in {f"{own}.{name}": (value,), **need.beside}.items():
        faults(path, first(values, None))
    assert faults(need.path, wanted) == []
    (fault,) = faults(need.path, wrong)
    assert re.search(r" must (not )?be .*, got .*; .", fault)


SPREAD = "`engine.expert_ranks` must divide the"

CONFIGURATION = [
    ("train.rollouts_per_minibatch=8193", "8192 rollouts of an iteration .* got 8193"),
    ("rollout.top_p=0.9", "`rollout.top_p` must be 1.0, which .* got 0.9; the trainer does not"),
    ("rollout.top_k=20", "`rollout.top_k` must be 0, which samples .* got 20"),
    *(
        (f"{key}=true", f"`{key}` must be false for a model without experts, got true with `model.")
        for key in ("rollout.keep_routing", "train.replay_routing")
    ),
    *(
        (f"engine.name={name} {words}", told)
        for name in APART
        for words, told in (
            ("", r"a model with experts is needed, got a dense one; .* \(`model.num_experts` = 0"),
            (f"{EXPERTS} engine.expert_ranks=3", f"{SPREAD} 4 experts of a layer, got 3"),
            (
                f"{EXPERTS} engine.expert_ranks=2 engine.redundant_experts=3",
                "must be at most the 2 experts that a rank does not hold, got 3",
            ),
            (
                f"{EXPERTS} engine.attention_ranks=9 sft.max_rows=8",
                r"`sft.max_rows` must be at least one row for each of the \d+ micro-batches .* 8",
            ),
        )
    ),
    (
        f"{EXPERTS} engine.name=disagg engine.attention_ranks=2 engine.micro_batches=4 "
        "rollout.max_rows=7",
        "`rollout.max_rows` must .* the 8 .* got 7",
    ),
    (
        f"{EXPERTS} engine.name=vllm_disagg engine.attention_ranks=2 rollout.max_rows=1",
        "`rollout.max_rows` must .* the 2 .* got 1",
    ),
    (f"algorithm.name=vapo {WINDOWS} {KEEP}", "must be 'hold' or 'hold_group' .* got 'train'"),
    (f"algorithm.name=vapo {GROUPS} {KEEP}", "`algorithm.correction` must not be 'off' with"),
    (
        f"algorithm.name=grpo {WINDOWS} {KEEP} rollout.unfinished=hold algorithm.correction=bypass",
        "must be 'hold_group' with .* got 'hold'; .* compares those of a group",
    ),
    ("rollout.ahead=2", "`rollout.ahead`"),
    *(
        (f"{section}.temperature=1e-5", rf"`{section}.temperature`")
        for section in ("rollout", "evaluate")
    ),
    ("train.selection=mixed_first", "`train.max_groups` must not be .* with `train.selection` = "),
    ("engine.tensor_parallel=1", '`engine.name` must be "vllm" with .* = 1, got "transformers"'),
    (f"train.reference_policy={PIN}", "`algorithm.kl_coefficient` must not be 0.0 with"),
    (f"{KEEP} rollout.window_tokens=16", "`rollout.dynamic_sampling` must be false with"),
    ("algorithm.name=tppo", "`rollout.window_tokens` must be 8192 with .*, got 0"),
    ("train.trainer=other", "`train.trainer`: .* got 'other'"),
    (f"{MEGATRON} train.num_processes=6", r"a multiple of `tensor_parallel` \(4\), got 6"),
    ("train.split=three", "must read `samplers:trainers`"),
    ("train.split='3:0'", "must read `samplers:trainers`"),
]
"""Overrides of the defaults, and the pattern of the message."""


@pytest.mark.parametrize(("words", "told"), CONFIGURATION)
def test_settings_that_cannot_be_together_are_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        configured(words)


def test_all_faults_of_a_configuration_come_in_one_message():
    faults = {
        "rollout.starvation_policy=relax": "`reward.keep_uniform_groups` must be true",
        "rollout.top_p=0.9": "`rollout.top_p` must be 1.0",
        "train.rollouts_per_minibatch=8193": "got 8193",
    }
    with pytest.raises(ConfigError) as caught:
        configured(" ".join(faults))
    assert [words for words in faults.values() if words not in str(caught.value)] == []


@pytest.mark.parametrize(
    "words",
    [
        "evaluate.top_p=0.5",
        f"rollout.keep_routing=true {EXPERTS} engine.name=transformers",
        f"rollout.keep_routing=true {EXPERTS} engine.name=vllm rollout.device=cuda",
        f"{EXPERTS} engine.name=disagg engine.attention_ranks=2 engine.micro_batches=4 "
        "rollout.max_rows=8",
        f"{EXPERTS} engine.name=vllm_disagg engine.attention_ranks=2 rollout.max_rows=2",
        "model.path=some/model engine.name=disagg engine.expert_ranks=3",
        f"algorithm.name=tppo {WINDOWS} {KEEP} algorithm.window_tokens=16",
        f"algorithm.name=vapo {WINDOWS} {KEEP} rollout.unfinished=hold algorithm.correction=bypass",
        f"algorithm.name=ppo {GROUPS} algorithm.correction=token_truncate",
        f"algorithm.name=dapo {GROUPS} algorithm.correction=sequence_mask",
        # a window for the longest response is no window at all
        f"algorithm.name=vapo rollout.window_tokens=20480 rollout.dynamic_sampling=false {KEEP}",
        *(
            f"rollout.max_staleness=2 algorithm.correction={name}"
            for name in ("bypass", "token_truncate", "sequence_mask")
        ),
        *(
            f"engine.name={engine} {EXPERTS} {section}.temperature=1e-4"
            for section in ("rollout", "evaluate")
            for engine in ("vllm", "vllm_disagg", "transformers")
        ),
    ],
)
def test_settings_that_fit_are_taken(words):
    configured(words)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"num_local_experts": 8}, f"{SPREAD} 8 experts of a layer, got 3 .*config.json' = 8"),
        ({"n_routed_experts": 256}, f"{SPREAD} 256 experts of a layer, got 3"),
        ({"model_type": "llama"}, "a model with experts is needed, got a dense one"),
        ({"num_experts": 12}, ""),
    ],
)
def test_the_experts_of_a_given_model_are_read_from_its_folder(tmp_path, content, told):
    (tmp_path / "config.json").write_text(json.dumps(content))
    # What [model] says of experts belongs to a model that is built from scratch.
    words = f"model.path={tmp_path} engine.expert_ranks=3 model.num_experts=7"
    for name in APART:
        if told:
            with pytest.raises(ConfigError, match=told):
                configured(f"{words} engine.name={name}")
        else:
            assert configured(f"{words} engine.name={name}").engine.expert_ranks == 3
    if "model_type" in content:
        with pytest.raises(ConfigError, match=r"without experts, got true with experts in .* = 0"):
            configured(f"model.path={tmp_path} rollout.keep_routing=true")


LENGTHS = r"`{}.max_response_tokens` must be below `model.max_model_tokens` \(1024\).* got 20480"


@pytest.mark.parametrize(
    ("words", "shards", "told"),
    [
        ("", 8, [LENGTHS.format("rollout"), LENGTHS.format("evaluate")]),
        *((MODEL, shards, []) for shards in (1, 8, 512)),
        *((MODEL, shards, [f"1 to .* rollout shards, got {shards}"]) for shards in (0, 513)),
        (f"{MODEL} curate.verifier=operator:eq", 1, []),
        *(
            (f"{MODEL} curate.verifier={name}", 1, [f"`curate.verifier`.*{words}"])
            for name, words in (
                ("integr", "did you mean 'integer'"),
                ("not_here.rewards:right", "No module named 'not_here'"),
                ("json:dumps", r"must take the two arguments \(response, answer\)"),
            )
        ),
    ],
)
def test_what_a_run_lacks_is_refused(words, shards, told):
    faults = check_run(configured(words), shards)
    assert len(faults) == len(told)
    assert all(map(re.search, told, faults))


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("-tiny")])
def test_a_tiny_preset_runs_on_cpus_and_is_refused_in_pods_with_gpus(preset):
    config = configured(preset=preset)
    assert check_run(config, 2) == []
    assert device_faults(config, profile_requests("cpu-tiny")) == []
    (fault,) = device_faults(config, profile_requests("gpu-1x8"))
    assert fault.startswith("`model.path` must name a model in pods with GPUs, got none")


GRID = "train.trainer=megatron train.num_processes=0"
EIGHT = "in a pod of 8 GPUs, got"
SUBMIT = "take the profile gpu-4x8 or gpu-16x8 with `train.num_nodes=4`"

PODS = [
    ("gpu-1x8", "rollout.device=cpu", [f"`rollout.device` must be 'auto' or 'cuda' {EIGHT}"]),
    ("gpu-1x8", "train.device=cpu", [f"`train.device` must be 'auto' or 'cuda' {EIGHT} 'cpu'"]),
    ("gpu-1x8", "evaluate.device=cpu", ["`evaluate.device` must be"]),
    ("gpu-1x8", "sft.device=cuda", ["`sft.device` must be"]),
    ("gpu-1x8", "curate.pass_rate_device=cuda", ["`curate.pass_rate_device` must be"]),
    ("gpu-1x8", "sft.force=true", ["`sft.force` must be off in a pipeline whose `sft` has a pod"]),
    ("gpu-1x8", "curate.pass_rate_policy=s3://b/p", ["got 's3://b/p'; compile it with GPUs for"]),
    ("gpu-1x8", "train.num_processes=1", [f"must be 0 or 8 {EIGHT} 1; 0 is one for each"]),
    ("gpu-1x8", "train.num_processes=8", []),
    ("gpu-1x8", "engine.tensor_parallel=2", ["at most the GPUs of a pod of `evaluate` (1), got 2"]),
    ("gpu-1x8", "engine.tensor_parallel=3",
     ["a pod of `evaluate` (1), got 3", "several iterations, got 3 for 8 and 8; `train.num_proc"]),
    ("cpu-tiny", "rollout.device=cuda", ["`rollout.device` must be 'auto' or 'cpu' in a pod"]),
    ("gpu-1x8", f"{GRID} train.expert_parallel=16", ["got 16 for 8; lower it"]),
    ("gpu-4x8", f"{GRID} train.expert_parallel=16", []),
    ("gpu-4x8", f"{GRID} train.expert_parallel=16 train.pipeline_parallel=4", ["got 16 for 8"]),
    ("gpu-1x8", f"{GRID} train.tensor_parallel=3", ["got 3 x 1 x 1 for 8; `train.num_processes`"]),
    ("gpu-1x8", f"{GRID} train.context_parallel=3", ["got 1 x 1 x 3 for 8; `train.num_processes`"]),
    ("cpu-tiny", f"{GRID} train.expert_parallel=2", ["got 2 for 1; lower it"]),
    ("cpu-tiny", "train.trainer=megatron train.expert_parallel=2 train.num_processes=2", []),
    ("gpu-4x8", AHEAD, []),
    ("gpu-4x8", f"{AHEAD} train.split=2:1", ["'2:1' must divide the number of training proc"]),
    ("gpu-4x8", f"{AHEAD} train.replicas=3", ["`train.replicas` must divide the number of"]),
    ("gpu-1x8", f"{AHEAD} train.replicas=2", []),
    ("gpu-16x8", f"{AHEAD} engine.tensor_parallel=4", []),
    ("gpu-4x8", f"{AHEAD} train.split=1:1 engine.tensor_parallel=16",
     ["(8), got", "(1), got", "for 8 and 16;"]),
    ("cpu-tiny", AHEAD, ["must be 0 where every stage", "with `rollout.ahead`, got 1;"]),
    ("cpu-tiny", f"{AHEAD} train.num_processes=4", ["must be 0 where every stage"]),
    ("gpu-1x8", "train.num_nodes=1", []),
    ("gpu-1x8", "train.num_nodes=4", [SUBMIT]),
    *((profile, f"train.num_nodes={count}", [])
      for profile, count in (("gpu-4x8", 1), ("gpu-4x8", 3), ("gpu-16x8", 8), ("cpu-tiny", 2))),
]  # fmt: skip
"""Profile, overrides of the smallest preset for GPUs, and words of each fault."""


@pytest.mark.parametrize(("profile", "words", "told"), PODS)
def test_settings_that_the_pods_of_a_profile_cannot_run_are_refused(profile, words, told):
    config, requests = configured(words, "dapo-qwen2.5-0.5b"), profile_requests(profile)
    # Submit asks with what the profile says, and prepare with what the settings make of it.
    for each in (requests, requests.of_training(vars(config.train))):
        faults = device_faults(config, each)
        assert len(faults) == len(told), faults
        assert all(words in fault for words, fault in zip(told, faults, strict=True))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (HEADS, []),
        ("", ["the 2 heads of", "the 1 heads of keys and values"]),
        (f"{HEADS} model.num_layers=4 train.pipeline_parallel=3", ["the 4 layers of the model"]),
        (f"{HEADS} model.num_layers=4 train.pipeline_parallel=2", []),
        (f"{HEADS} {EXPERTS} train.sequence_parallel=true train.expert_parallel=2", []),
        (f"{HEADS} {EXPERTS}", ["`train.sequence_parallel` must be true"]),
        (f"{HEADS} {EXPERTS} train.expert_parallel=3", ["must divide the 4 experts of a layer"]),
        (f"{HEADS} train.expert_parallel=2", ["`train.expert_parallel` must be 1 for a model"]),
        (f"{HEADS} train.context_parallel=2", []),
        (f"{HEADS} train.context_parallel=4", ["`train.context_parallel` must divide the"]),
    ],
)  # fmt: skip
def test_a_model_that_ranks_can_not_share_is_refused_before_any_is_opened(words, told):
    config = configured(f"{MEGATRON} {words}", "dapo-tiny")
    faults = trainer_faults(config, find_shape(config))
    assert len(faults) == len(told)
    assert all(words in fault for words, fault in zip(told, faults, strict=True))
    if told:
        with pytest.raises(ConfigError, match=re.escape(told[0])):
            memory_rows(config, {}, this_machine())


SLIDING = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROPE = "rope_parameters"


@pytest.mark.parametrize(
    ("setting", "model", "told"),
    [
        ("megatron", {"model_type": "qwen2", **SLIDING}, "sliding windows"),
        ("megatron", {"model_type": "qwen2", **SLIDING, "use_sliding_window": False}, ""),
        ("megatron", {"model_type": "qwen2", **SLIDING, "max_window_layers": 2}, ""),
        ("megatron", {"model_type": "qwen3", "attention_bias": True}, "biases of its projections"),
        ("megatron", {"model_type": "llama", "mlp_bias": True}, "biases of its projections"),
        ("megatron", {"model_type": "llama", "hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        ("megatron", {"model_type": "llama", "rope_scaling": {"type": "yarn"}}, "`rope_type` 'y"),
        ("megatron", {"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, ""),
        ("megatron", {"model_type": "llama", ROPE: {"rope_type": "longrope"}}, "'longrope'"),
        ("megatron", {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2},
         "layers without experts"),
        ("megatron", {"model_type": "mixtral", **MIXED, "num_experts_per_tok": 1},
         "one expert for each token"),
        ("megatron", {"model_type": "mixtral", **MIXED, "sliding_window": 8}, "sliding windows"),
        ("megatron", {"model_type": "mistral"}, "'fsdp2' for a model with `model_type` 'mist"),
        ("context", {"model_type": "mistral", "sliding_window": 64}, "with sliding windows; take"),
        ("context", {"model_type": "mistral", "sliding_window": None}, ""),
        ("context", {"model_type": "qwen2", **SLIDING}, "with sliding windows; take"),
        ("context", {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
         "with sliding windows; take"),
        ("context", {"model_type": "qwen2", **SLIDING, "max_window_layers": 2}, ""),
        ("context", {"model_type": "gemma2"}, "rows can not be packed, got 2 for 'gemma2'; take"),
    ],
)  # fmt: skip
def test_what_a_trainer_refuses_at_its_start_is_refused_by_prepare(setting, model, told):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 1024}
    words = {"megatron": "train.trainer=megatron", "context": "train.context_parallel=2"}
    config = configured(words[setting], "dapo-qwen2.5-7b")
    faults = trainer_faults(config, shape_of({**sizes, **model}))
    assert len(faults) == bool(told)
    assert told in "".join(faults)
