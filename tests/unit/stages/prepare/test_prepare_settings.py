"""The configuration of a run, from preset to run parameters."""

import hashlib
import json

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
