"""The configuration of a run, from preset to run parameters."""

import hashlib
import json
import re

import pytest

from planish import store
from planish.__main__ import main
from planish.algorithms import ALGORITHMS
from planish.base.config import (
    load_preset,
    parse_override,
    parse_toml,
    preset_names,
    resolve_config,
)
from planish.base.errors import ConfigError
from planish.engines import APART
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.command import toml_text
from planish.stages.prepare.settings import build_config, read_config_file, split_overrides

NOTHING = {"preset": "", "config": "", "overrides": "", "model": "", "dataset": "", "seed": -1}


def build(**changes):
    return build_config(**{**NOTHING, **changes})


def test_later_layers_win(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nseed = 5\n[train]\nlearning_rate = 1e-4\nweight_decay = 0.2\n")
    config = build(
        preset="dapo-paper",
        config=str(path),
        overrides="train.learning_rate=1e-3 run.seed=6",
        model="folder/model",
        dataset="my data.jsonl",
        seed=7,
    )
    assert config["train"]["weight_decay"] == 0.2
    assert config["train"]["learning_rate"] == 1e-3
    assert config["run"]["seed"] == 7
    assert config["model"]["path"] == "folder/model"
    assert config["curate"]["dataset"] == "my data.jsonl"


TINY = [name for name in preset_names() if "gsm8k_as" in load_preset(name).get("curate", {})]
OWN = {"own.toml": '[curate]\ngsm8k_as = "steps"\n', "other.toml": "[curate]\nnum_traces = 1\n"}


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize(
    ("changes", "read_as"),
    [
        ({}, "steps"),
        ({"model": "m"}, "problems"),
        ({"overrides": "model.path=m"}, "problems"),
        ({"overrides": "model.path=m run.seed=1", "dataset": "d.jsonl"}, "problems"),
        ({"model": "m", "config": "other.toml"}, "problems"),
        ({"model": "m", "config": "own.toml"}, "steps"),
        ({"model": "m", "overrides": "curate.gsm8k_as=steps"}, "steps"),
        ({"model": "m", "config": "own.toml", "overrides": "curate.gsm8k_as=problems"}, "problems"),
        ({"overrides": "curate.gsm8k_as=problems"}, "problems"),
    ],
)
def test_a_model_reads_word_problems_unless_the_user_says_steps(
    preset, changes, read_as, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    assert build(preset=preset, **changes)["curate"]["gsm8k_as"] == read_as


def test_nine_presets_make_steps():
    assert len(TINY) == 9
    assert build(config="", model="m")["curate"]["gsm8k_as"] == "problems"


def test_a_config_can_lie_in_a_store_and_be_pinned(file_root):
    data = b"[run]\nseed = 9\n"
    uri = f"{file_root}/config.toml"
    store.write(uri, data)
    pin = f"{uri}#sha256={hashlib.sha256(data).hexdigest()}"
    assert build(config=pin)["run"]["seed"] == 9
    store.write(uri, b"[run]\nseed = 10\n")
    assert build(config=uri)["run"]["seed"] == 10
    with pytest.raises(ConfigError, match="must have the sha256"):
        build(config=pin)


def test_what_is_no_configuration_is_refused(tmp_path, file_root):
    for place in (str(tmp_path / "none.toml"), f"{file_root}/none.toml"):
        with pytest.raises(ConfigError, match=r"none\.toml.*no file of your machine"):
            read_config_file(place)
    for content, words in ((b"\xff\xfe", "UTF-8"), (b"seed = ", "valid TOML")):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_config_file(str(tmp_path / "bad.toml"))
    with pytest.raises(ConfigError, match="did you mean `dapo-tiny`"):
        build(preset="dapo-tinny")
    with pytest.raises(ConfigError, match="got -2"):
        build(seed=-2)
    with pytest.raises(ConfigError, match=r"(?s)`rollout.group_size`.*mean `learning_rate`"):
        build(overrides="train.learning_rat=1 rollout.group_size=x")


def test_overrides_split_like_a_shell_does():
    text = """a.b=1 a.c='x y' a.d="[1, 2]" """
    assert split_overrides(text) == ["a.b=1", "a.c=x y", "a.d=[1, 2]"]
    assert split_overrides("""'a.b=x "y"' a.c=x\\ y\n"a.d=it's" """) == [
        'a.b=x "y"',
        "a.c=x y",
        "a.d=it's",
    ]
    for text in ("a.b='1", 'a.b="1', "a.b=1\\"):
        with pytest.raises(ConfigError, match="nothing closes"):
            split_overrides(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"curate.prompt_suffix=\nAnswer:", "\nAnswer:"),
        (r'curate.prompt_suffix="\nThink \"hard\"."', '\nThink "hard".'),
        (r"'curate.prompt_suffix=\n two words'", "\n two words"),
        (r"curate.prompt_suffix='\neq 0'", r"\neq 0"),
        (r"curate.prompt_suffix=\d+", r"\d+"),
        (r'model.stop_strings=["\n", "</s> ]", 3]', ["\n", "</s> ]", 3]),
        (r'model.stop_strings="[1, 2]"', [1, 2]),
    ],
)
def test_overrides_take_new_lines_lists_and_backslashes(text, value):
    words = split_overrides(f"train.micro_batch=1 {text} run.seed=2")
    assert [words[0], *words[2:]] == ["train.micro_batch=1", "run.seed=2"]
    assert parse_override(words[1])[2] == value


@pytest.mark.parametrize("name", preset_names())
def test_what_is_shown_resolves_to_the_same_configuration(name):
    config = resolve_config(load_preset(name))
    assert resolve_config(parse_toml(toml_text(config), name="shown")) == config


def test_overrides_stand_before_or_behind_the_options(capsys):
    for words in (
        ["run.seed=7", "--json", "model.alphabet=ab\U0001f600\x7f"],
        ["--json", "run.seed=7", "model.alphabet=ab\U0001f600\x7f"],
    ):
        assert main(["config", "show", "dapo-tiny", *words]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["run"]["seed"], shown["model"]["alphabet"]) == (7, "ab\U0001f600\x7f")
        assert resolve_config(parse_toml(toml_text(shown), name="shown")) == shown


@pytest.mark.parametrize("is_preset_first", [True, False])
def test_a_file_is_laid_over_a_preset_and_overrides_over_both(tmp_path, capsys, is_preset_first):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nlearning_rate = 0.5\ngrad_clip = 0.25\n")
    names = ["dapo-tiny", str(file)][:: 1 if is_preset_first else -1]
    assert main(["config", "show", *names, "train.grad_clip=2.0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["train"]["learning_rate"], shown["train"]["grad_clip"]) == (0.5, 2.0)
    assert shown["model"] == resolve_config(load_preset("dapo-tiny"))["model"]
    assert main(["plan", *names, "train.grad_clip=2.0", "--profile", "cpu-tiny"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dapo-tini"], "did you mean `dapo-tiny`"),
        (["dapo-tiny", "train.lerning_rate=1"], "did you mean `learning_rate`"),
        (["dapo-tiny", "seed"], "an override must read `section.key=value`, got 'seed'"),
        (["dapo-tiny", "grpo-tiny"], "got ['dapo-tiny', 'grpo-tiny']"),
        (["a.toml", "b.toml"], "one preset, one file, or one of each"),
        (["absent.toml"], "`config` must be the URI or path of a TOML file"),
    ],
)
def test_what_cannot_be_shown_is_told_with_exit_code_2(words, told, capsys):
    assert main(["config", "show", *words]) == 2
    assert told in capsys.readouterr().err


def test_impossible_combinations_are_told_together():
    faults = {
        "reward.max_response_tokens=9000": "`reward.max_response_tokens` must equal .*9000 and 204",
        "train.rollouts_per_minibatch=8193": "8192 rollouts of an iteration .* got 8193",
        "rollout.starvation_policy=relax": "`reward.keep_uniform_groups` must be true",
    }
    with pytest.raises(ConfigError) as caught:
        build(overrides=" ".join(faults))
    assert [words for words in faults.values() if not re.search(words, str(caught.value))] == []


def test_training_rollouts_from_a_truncated_distribution_are_refused_and_evaluations_are_not():
    with pytest.raises(ConfigError) as caught:
        build(overrides="rollout.top_p=0.9 rollout.top_k=20")
    told = str(caught.value)
    assert "`rollout.top_p` must be 1.0, which samples from the whole distribution, got 0.9" in told
    assert "`rollout.top_k` must be 0, which samples from the whole distribution, got 20" in told
    assert "the trainer does not score tokens under a truncated one" in told
    assert build(overrides="evaluate.top_p=0.5")["evaluate"]["top_p"] == 0.5


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
            build(overrides=f"{key}=true {overrides}")
    for good in ("engine.name=transformers", "engine.name=vllm rollout.device=cuda"):
        overrides = f"rollout.keep_routing=true model.num_experts=4 {good}"
        assert build(overrides=overrides)["rollout"]["keep_routing"] is True
    assert "keep_routing" not in build()["rollout"]


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
        build(overrides=f"engine.name={name} {overrides}")


def test_micro_batches_need_a_row_each():
    ranks = "model.num_experts=4 engine.name=disagg engine.attention_ranks=2 "
    ranks += "engine.micro_batches=4 rollout.max_rows="
    assert build(overrides=ranks + "8")["rollout"]["max_rows"] == 8
    with pytest.raises(ConfigError, match=r"`rollout.max_rows` must .* the 8 .* got 7"):
        build(overrides=ranks + "7")
    # vLLM has one batch for each rank.
    two = "model.num_experts=4 engine.name=vllm_disagg engine.attention_ranks=2 rollout.max_rows="
    assert build(overrides=two + "2")["rollout"]["max_rows"] == 2
    with pytest.raises(ConfigError, match=r"`rollout.max_rows` must .* the 2 .* got 1"):
        build(overrides=two + "1")


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
    given = {"model": str(tmp_path)}
    # What [model] says of experts belongs to a model that is built from scratch.
    overrides = f"engine.name={name} engine.expert_ranks=3 model.num_experts=7"
    if words:
        with pytest.raises(ConfigError, match=words):
            build(**given, overrides=overrides)
    else:
        assert build(**given, overrides=overrides)["engine"]["expert_ranks"] == 3
    if content.get("model_type") == "llama":
        with pytest.raises(ConfigError, match=r"without experts, got true with experts in .* = 0"):
            build(**given, overrides="rollout.keep_routing=true")


def test_the_experts_of_a_model_of_the_hub_are_left_to_who_downloads_it():
    overrides = "engine.name=disagg engine.expert_ranks=3"
    config = build(model="some/model", overrides=overrides)
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
        ("dapo", "rollout.ahead=1", "correction` must not be .off. with `rollout.ahead`"),
        ("dapo", "rollout.max_staleness=1", "must not be .off. with `rollout.max_staleness`"),
        ("gspo", "rollout.max_staleness=3", "must not be .off. with `rollout.max_staleness`"),
        ("vapo", "rollout.max_staleness=2", "must not be .off. with `rollout.max_staleness`"),
        ("ppo", "rollout.ahead=1", "must not be .off. with `rollout.ahead`"),
        ("dapo", "rollout.ahead=1 rollout.max_staleness=1", "must be 0 with `ahead`, got 0 and 1"),
        ("dapo", "rollout.ahead=2", "`rollout.ahead`"),
        ("vapo", "rollout.window_tokens=16", "`dynamic_sampling` must be false"),
        ("vapo", WINDOWS + "rollout.max_staleness=1", "`max_staleness` 0 with `window_tokens`"),
        ("vapo", "rollout.unfinished=hold", "`window_tokens` must be above 0 with"),
    ],
)  # fmt: skip
def test_windows_and_rollouts_ahead_that_cannot_be_are_told(algorithm, overrides, words):
    with pytest.raises(ConfigError, match=words):
        build(overrides=f"algorithm.name={algorithm} {overrides}")


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
    config = build(overrides=f"algorithm.name={algorithm} {overrides}")
    assert config["rollout"]["window_tokens"] > 0


@pytest.mark.parametrize("correction", ["bypass", "token_truncate", "sequence_mask"])
def test_what_older_policies_sampled_is_trained_on_with_a_correction(correction):
    config = build(overrides=f"rollout.max_staleness=2 algorithm.correction={correction}")
    assert config["rollout"]["max_staleness"] == 2


@pytest.mark.parametrize("section", ["rollout", "evaluate"])
@pytest.mark.parametrize("engine", ["vllm", "vllm_disagg model.num_experts=2", "transformers"])
@pytest.mark.parametrize(
    ("temperature", "is_taken"), [("1e-5", False), ("1e-4", True), ("0.5", True)]
)
def test_every_engine_takes_the_same_temperatures(section, engine, temperature, is_taken):
    overrides = f"engine.name={engine} {section}.temperature={temperature}"
    if is_taken:
        assert build(overrides=overrides)[section]["temperature"] == float(temperature)
    else:
        with pytest.raises(ConfigError, match=rf"`{section}.temperature`"):
            build(overrides=overrides)


def test_the_longest_response_is_given_once():
    settings = "rollout.max_response_tokens=5000"
    config = build(overrides=settings)
    assert [config[name]["max_response_tokens"] for name in ("reward", "evaluate")] == [5000, 5000]
    config = build(overrides=f"{settings} evaluate.max_response_tokens=6000")
    assert config["evaluate"]["max_response_tokens"] == 6000


def test_a_tiny_preset_shapes_rewards_and_keeps_groups_as_the_published_form_does():
    def of(name, form):
        config = build(preset=f"{name}-{form}")
        reward = config["reward"]
        return {
            "punishes long responses": reward["overlong_penalty_factor"] > 0,
            "filters long responses": config["algorithm"].get("overlong_filtering"),
            "rewards": (reward["reward_correct"], reward["reward_wrong"]),
            "keeps groups without a signal": reward["keep_uniform_groups"],
            "draws until the batch is full": config["rollout"]["dynamic_sampling"],
        }

    forms = dict(name.split("-", 1) for name in preset_names() if name.endswith("-paper"))
    assert set(forms) == set(ALGORITHMS)
    for name in preset_names():
        algorithm, _, form = name.partition("-")
        assert of(algorithm, form) == of(algorithm, "paper"), name


def test_the_small_model_cannot_run_the_published_lengths():
    config = build()
    faults = check_run(config, 8)
    assert [fault.split(".")[0] for fault in faults] == ["`rollout", "`evaluate"]
    assert "(1024)" in faults[0]
    assert "got 20480" in faults[0]
    for shards, count in ((1, 0), (512, 0), (513, 1), (0, 1)):
        given = build(model="some/model")
        assert len(check_run(given, shards)) == count
    for preset in (name for name in preset_names() if name.endswith("-tiny")):
        assert check_run(build(preset=preset), 2) == []
    assert check_run(build(model="some/model"), 8) == []


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("integr", "did you mean 'integer'"),
        ("not_here.rewards:right", "No module named 'not_here'"),
        ("json:dumps", r"must take the two arguments \(response, answer\)"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_refused_before_the_run(verifier, words):
    config = build(overrides=f"curate.verifier={verifier} model.path=a/b")
    usable = "curate.verifier=operator:eq model.path=a/b"
    assert check_run(build(overrides=usable), 1) == []
    [fault] = check_run(config, 1)
    assert "`curate.verifier`" in fault
    assert re.search(words, fault)
