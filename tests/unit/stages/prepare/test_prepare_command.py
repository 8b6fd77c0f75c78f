"""`planish config show`."""

import json

import pytest

from planish.__main__ import main
from planish.base.config import load_preset, parse_toml, preset_names, resolve_config
from planish.stages.prepare.command import toml_text


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
