"""Checks across sections."""

import json
import re

import pytest

from planish.base.config import preset_names
from planish.base.errors import ConfigError
from planish.engines import APART
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.settings import build_config

BASE = {"preset": "", "config": "", "model": "", "dataset": "", "seed": -1}


def test_impossible_combinations_are_told_together():
    faults = {
        "reward.max_response_tokens=9000": "`reward.max_response_tokens` must equal .*9000 and 204",
        "train.rollouts_per_minibatch=8193": "8192 rollouts of an iteration .* got 8193",
        "rollout.starvation_policy=relax": "`reward.keep_uniform_groups` must be true",
    }
    with pytest.raises(ConfigError) as caught:
        build_config(**BASE, overrides=" ".join(faults))
    assert [words for words in faults.values() if not re.search(words, str(caught.value))] == []


def test_training_rollouts_from_a_truncated_distribution_are_refused_and_evaluations_are_not():
    with pytest.raises(ConfigError) as caught:
        build_config(**BASE, overrides="rollout.top_p=0.9 rollout.top_k=20")
    told = str(caught.value)
    assert "`rollout.top_p` must be 1.0, which samples from the whole distribution, got 0.9" in told
    assert "`rollout.top_k` must be 0, which samples from the whole distribution, got 20" in told
    assert "the trainer does not score tokens under a truncated one" in told
    assert build_config(**BASE, overrides="evaluate.top_p=0.5")["evaluate"]["top_p"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", "for a model without experts, got true with `model.num_experts` = 0"),
        (
            "model.num_experts=4 engine.name=vllm rollout.device=cpu",
            "with the engine `vllm` on the CPU, which can",
        ),
    ],
)
def test_experts_that_nothing_can_tell_are_not_kept(overrides, words):
    for key in ("rollout.keep_routing", "train.replay_routing"):
        with pytest.raises(ConfigError, match=f"`{key}` must be false.*{words}"):
            build_config(**BASE, overrides=f"{key}=true {overrides}")
    for good in ("engine.name=transformers", "engine.name=vllm rollout.device=cuda"):
        overrides = f"rollout.keep_routing=true model.num_experts=4 {good}"
        assert build_config(**BASE, overrides=overrides)["rollout"]["keep_routing"] is True
    assert "keep_routing" not in build_config(**BASE, overrides="")["rollout"]


DIVIDE = "`engine.expert_ranks` must divide the"


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", r"a model with experts is needed, got a dense one; .* \(`model.num_experts` = 0"),
        ("model.num_experts=4 engine.expert_ranks=3", f"{DIVIDE} 4 experts of a layer, got 3"),
        (
            "model.num_experts=4 engine.expert_ranks=2 engine.redundant_experts=3",
            "must be at most the 2 experts that a rank does not hold, got 3",
        ),
        (
            "model.num_experts=4 engine.attention_ranks=9 sft.max_rows=8",
            r"`sft.max_rows` must be at least one row for each of the \d+ micro-batches .* got 8",
        ),
    ],
)
def test_what_ranks_cannot_share_is_told(name, overrides, words):
    with pytest.raises(ConfigError, match=words):
        build_config(**BASE, overrides=f"engine.name={name} {overrides}")


def test_micro_batches_need_a_row_each():
    ranks = "model.num_experts=4 engine.name=disagg engine.attention_ranks=2 "
    ranks += "engine.micro_batches=4 rollout.max_rows="
    assert build_config(**BASE, overrides=ranks + "8")["rollout"]["max_rows"] == 8
    with pytest.raises(ConfigError, match=r"`rollout.max_rows` must .* the 8 .* got 7"):
        build_config(**BASE, overrides=ranks + "7")
    # vLLM has one batch for each rank.
    two = "model.num_experts=4 engine.name=vllm_disagg engine.attention_ranks=2 rollout.max_rows="
    assert build_config(**BASE, overrides=two + "2")["rollout"]["max_rows"] == 2
    with pytest.raises(ConfigError, match=r"`rollout.max_rows` must .* the 2 .* got 1"):
        build_config(**BASE, overrides=two + "1")


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"num_local_experts": 8}, f"{DIVIDE} 8 experts of a layer, got 3 .*config.json' = 8"),
        ({"n_routed_experts": 256}, f"{DIVIDE} 256 experts of a layer, got 3"),
        ({"model_type": "llama"}, "a model with experts is needed, got a dense one"),
        ({"num_experts": 12}, ""),
    ],
)
def test_the_experts_of_a_given_model_are_read_from_its_folder(tmp_path, name, content, words):
    (tmp_path / "config.json").write_text(json.dumps(content))
    given = {**BASE, "model": str(tmp_path)}
    # What [model] says of experts belongs to a model that is built from scratch.
    overrides = f"engine.name={name} engine.expert_ranks=3 model.num_experts=7"
    if words:
        with pytest.raises(ConfigError, match=words):
            build_config(**given, overrides=overrides)
    else:
        assert build_config(**given, overrides=overrides)["engine"]["expert_ranks"] == 3
    if content.get("model_type") == "llama":
        with pytest.raises(ConfigError, match=r"without experts, got true with experts in .* = 0"):
            build_config(**given, overrides="rollout.keep_routing=true")


def test_the_experts_of_a_model_of_the_hub_are_left_to_who_downloads_it():
    overrides = "engine.name=disagg engine.expert_ranks=3"
    config = build_config(**{**BASE, "model": "some/model"}, overrides=overrides)
    assert config["engine"]["expert_ranks"] == 3


WINDOWS = "rollout.window_tokens=16 rollout.dynamic_sampling=false "
WHOLE_GROUPS = WINDOWS + "rollout.unfinished=hold_group "
KEEP = "reward.keep_uniform_groups=true "


@pytest.mark.parametrize(
    ("algorithm", "overrides", "words"),
    [
        ("tppo", "", "must equal `algorithm.window_tokens`, got 0 and 8192"),
        ("tppo", WINDOWS + KEEP, "must equal `algorithm.window_tokens`, got 16 and 8192"),
        ("tppo", WINDOWS + "algorithm.window_tokens=16", "`reward.keep_uniform_groups` must be"),
        ("tppo", WHOLE_GROUPS + KEEP + "algorithm.window_tokens=16", "must be 'train' for an"),
        ("vapo", WINDOWS + KEEP, "must be 'hold' or 'hold_group' with .* got 'train'"),
        ("vapo", WHOLE_GROUPS + KEEP, "`algorithm.correction` must not be 'off'"),
        ("grpo", WINDOWS + KEEP + "rollout.unfinished=hold algorithm.correction=bypass",
         "must be 'hold_group' with .* got 'hold'; .* compares those of a group"),
        ("vapo", "rollout.window_tokens=16", "`dynamic_sampling` must be false"),
        ("vapo", WINDOWS + "rollout.max_staleness=1", "`max_staleness` 0 with `window_tokens`"),
        ("vapo", "rollout.unfinished=hold", "`window_tokens` must be above 0 with"),
    ],
)  # fmt: skip
def test_windows_that_an_algorithm_cannot_use_are_told(algorithm, overrides, words):
    with pytest.raises(ConfigError, match=words):
        build_config(**BASE, overrides=f"algorithm.name={algorithm} {overrides}")


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("tppo", WINDOWS + KEEP + "algorithm.window_tokens=16"),
        ("vapo", WINDOWS + KEEP + "rollout.unfinished=hold algorithm.correction=bypass"),
        ("ppo", WHOLE_GROUPS + "algorithm.correction=token_truncate"),
        ("dapo", WHOLE_GROUPS + "algorithm.correction=sequence_mask"),
        # a window for the longest response is no window at all
        ("vapo", "rollout.window_tokens=20480 rollout.dynamic_sampling=false " + KEEP),
    ],
)
def test_windows_that_fit_have_no_fault(algorithm, overrides):
    config = build_config(**BASE, overrides=f"algorithm.name={algorithm} {overrides}")
    assert config["rollout"]["window_tokens"] > 0


def test_the_longest_response_is_given_once():
    settings = "rollout.max_response_tokens=5000"
    config = build_config(**BASE, overrides=settings)
    assert [config[name]["max_response_tokens"] for name in ("reward", "evaluate")] == [5000, 5000]
    config = build_config(**BASE, overrides=f"{settings} evaluate.max_response_tokens=6000")
    assert config["evaluate"]["max_response_tokens"] == 6000


def test_a_tiny_preset_shapes_rewards_and_keeps_groups_as_the_published_form_does():
    def of(name, form):
        config = build_config(**{**BASE, "preset": f"{name}-{form}"}, overrides="")
        reward = config["reward"]
        return {
            "punishes long responses": reward["overlong_penalty_factor"] > 0,
            "filters long responses": config["algorithm"].get("overlong_filtering"),
            "rewards": (reward["reward_correct"], reward["reward_wrong"]),
            "keeps groups without a signal": reward["keep_uniform_groups"],
            "draws until the batch is full": config["rollout"]["dynamic_sampling"],
        }

    forms = dict(name.split("-", 1) for name in preset_names() if name.endswith("-paper"))
    assert set(forms) == {"grpo", "dapo", "ppo", "vc_ppo", "vapo", "tppo"}
    for name in preset_names():
        algorithm, _, form = name.partition("-")
        assert of(algorithm, form) == of(algorithm, "paper"), name


def test_the_small_model_cannot_run_the_published_lengths():
    config = build_config(**BASE, overrides="")
    faults = check_run(config, 8)
    assert [fault.split(".")[0] for fault in faults] == ["`rollout", "`evaluate"]
    assert "(1024)" in faults[0]
    assert "got 20480" in faults[0]
    for shards, count in ((1, 0), (512, 0), (513, 1), (0, 1)):
        given = build_config(**{**BASE, "model": "some/model"}, overrides="")
        assert len(check_run(given, shards)) == count
    for preset in (name for name in preset_names() if name.endswith("-tiny")):
        assert check_run(build_config(**{**BASE, "preset": preset}, overrides=""), 2) == []
    assert check_run(build_config(**{**BASE, "model": "some/model"}, overrides=""), 8) == []


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("integr", "did you mean 'integer'"),
        ("not_here.rewards:right", "No module named 'not_here'"),
        ("json:dumps", r"must take the two arguments \(response, answer\)"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_refused_before_the_run(verifier, words):
    config = build_config(**BASE, overrides=f"curate.verifier={verifier} model.path=a/b")
    usable = "curate.verifier=operator:eq model.path=a/b"
    assert check_run(build_config(**BASE, overrides=usable), 1) == []
    [fault] = check_run(config, 1)
    assert "`curate.verifier`" in fault
    assert re.search(words, fault)
