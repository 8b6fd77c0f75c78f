"""The configuration of a run, from preset to run parameters."""

import hashlib

import pytest

from planish import store
from planish.base.config import parse_override
from planish.base.errors import ConfigError
from planish.stages.prepare.settings import (
    build_config,
    read_config_file,
    split_overrides,
)

NOTHING = {
    "preset": "",
    "config": "",
    "overrides": "",
    "model": "",
    "dataset": "",
    "seed": -1,
}


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
